"""Only what is comparable is compared: by settings alone, and by the two commands."""

import ast
import inspect
import json
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest

from tests.cli import read_lines, write_lines
from tests.eval.report import test_page
from tripletune.core.files import read_json
from tripletune.eval.__main__ import main
from tripletune.eval.report import setting
from tripletune.eval.report import setting_rows as rows_of_settings
from tripletune.eval.report.contents import build_report
from tripletune.eval.report.groups import group_runs
from tripletune.eval.report.runs import Run, read_run
from tripletune.eval.report.setting import differing_settings
from tripletune.eval.report.setting_rows import setting_rows
from tripletune.eval.report.tables import sections_of
from tripletune.eval.results import RunAbout, RunSettings
from tripletune.rag.systems import system_names

TASK = {"name": "hotpotqa", "metrics": ["exact_match"], "template": "{question}", "max_answer_tokens": 100}
SETTINGS = {
    "system": "standard", "task": TASK, "data": "d" * 64, "limit": None, "corpus": "c" * 64, "retriever": "dense",
    "encoder": "e5", "triples": None, "teacher": "openai:m", "sampling": [0.0, 1.0, None], "options": {"top_k": 5},
}  # fmt: skip


def row(number, system):
    return test_page.row(number, system) | {"error": ""}


def run_of(folder="f", questions=20, **changes):
    options = {**SETTINGS["options"], **changes.pop("options", {})}
    settings = {name: one for name, one in {**SETTINGS, **changes, "options": options}.items() if one != "absent"}
    table = pd.DataFrame({"id": [], "hops": []})
    return Run(folder, "", RunSettings.from_json(settings), RunAbout(questions=questions), {}, rows=table)


READERS = ({"reader": "paper", "reader_tokens": 900}, {"reader": "common", "reader_tokens": 2000}, {})
STUDENT, SMART = {"spec": "runs/a", "weights": "w"}, {"model": "openai:smart"}
GRAPH_LLM = {"teacher": "absent", "sampling": "absent", "model": STUDENT}


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ({}, {"corpus": "other"}, "corpus"),
        ({}, {"corpus": None}, "corpus"),
        ({}, {"data": "other"}, "data"),
        ({}, {"questions": 10}, "limit"),
        ({}, {"task": {**TASK, "template": "{question} In short."}}, "task"),
        ({}, {"retriever": "hybrid"}, "retriever"),
        ({}, {"vectors": "hnsw"}, "retriever"),
        ({}, {"encoder": "bge"}, "encoder"),
        ({}, {"query_prompt": "query: "}, "encoder"),
        ({}, {"options": {"top_k": 2}}, "top_k"),
        ({"system": "cirag", "options": {"top_k": 2}}, {}, "top_k"),
        ({}, {"teacher": "openai:n"}, "model"),
        ({"teacher_weights": "v"}, {"teacher_weights": "w"}, "model"),
        ({}, {"teacher": None, "model": STUDENT, "sampling": None}, "model"),
        ({}, {"llm": {"answer": {"model": "openai:n"}}}, "model"),
        ({}, {"sampling": [0.7, 1.0, None]}, "sampling"),
        ({}, {"options": {"reader": "common", "reader_tokens": 2000}}, "reader"),
        *(({"options": one}, {"options": {"reader": "common", "reader_tokens": 900}}, "reader") for one in READERS),
        ({"options": {"max_answer_tokens": 100}}, {"options": {"max_answer_tokens": 30}}, "max_answer_tokens"),
        ({"triples": "t"}, {"triples": {"store": "s", "model": "m"}}, "triples"),
        # What one of them does not take, what is the system's own, and the same under another name.
        ({}, {"system": "cirag", "options": {"top_k": 10, "rerank": False}, "integrator": STUDENT}, ""),
        ({"system": "cirag", "options": {"top_k": 5}}, {"options": {"top_k": 5}}, ""),
        ({}, {"system": "no_retrieval", "retriever": None, "encoder": None, "corpus": None}, ""),
        ({"triples": "t"}, {"options": {"max_rounds": 2}}, ""),
        ({}, {"sampling": [0.0, 1.0, 7]}, ""),
        ({"system": "t2rag", "llm": {"t2rag.resolve": SMART}}, {}, ""),
        *(({"system": "cirag", "llm": {role: SMART}}, {}, "model") for role in ("cirag", "cirag.answer.triples")),
        ({"system": "react", "llm": {"react.act": SMART}}, {}, "model"),
        ({"system": "t2rag", "llm": {"t2rag.answer": SMART}}, {"llm": {"standard.answer": SMART}}, ""),
        ({"llm": {"t2rag.answer": SMART}}, {}, ""),
        *(({"options": {"reader": "common"}, "files": {"answer_passages": one}},
           {"options": {"reader": "common"}, "llm": {"standard": SMART}, "files": {"answer_passages": "v", "x": "y"}},
           differ) for one, differ in (("v", ""), ("w", "reader"))),
        ({"files": {"answer_passages": "v"}}, {"files": {"answer_passages": "w"}}, ""),
        (GRAPH_LLM, {**GRAPH_LLM, "student_seed": 1}, "sampling"),
        ({**GRAPH_LLM, "student_seed": 1}, {**GRAPH_LLM, "student_seed": 2}, ""),
        ({"student_seed": 1, "integrator": STUDENT}, {}, ""),
        ({"gold": "g"}, {"gold": "h"}, "gold"),
        ({"gold": "g"}, {}, ""),
        ({"model": STUDENT}, {"model": {**STUDENT, "spec": "copies/a"}}, ""),
        ({"teacher": "hf:a", "teacher_weights": "w"}, {"teacher": "hf:copies/a", "teacher_weights": "w"}, ""),
        *(
            ({"llm": {"answer": {"model": "hf:a", "model_weights": "w"}}},
             {"llm": {"answer": {"model": "hf:copies/a", "model_weights": own}}}, differ)
            for own, differ in (("w", ""), ("v", "model"))
        ),
        ({"options": {"reader": True}}, {"options": {"reader": "paper", "reader_tokens": 7}}, ""),
        ({}, {"questions": None, "limit": "absent"}, ""),
        ({"questions": None, "limit": 5}, {"questions": None, "limit": 7}, "limit"),
    ],
)  # fmt: skip
def test_runs_are_compared_where_all_is_equal_that_should_be(one, other, differ):
    first, second = run_of("a", **one), run_of("b", **other)
    assert (
        list(differing_settings(first, second))
        == list(differing_settings(second, first))
        == ([differ] if differ else [])
    )
    assert not differing_settings(first, second, [differ])
    groups = group_runs([first, second])
    assert [len(group.runs) for group in groups] == ([1, 1] if differ else [2])
    if differ:
        told = [group.told for group in groups]
        assert told[0] != told[1], "what tells them apart stands in words"
    if differ and differ != "data":
        assert len(group_runs([first, second], [differ])) == 1


def test_every_two_runs_that_agree_are_in_one_group():
    # No run has both settings, so each agrees with two others, which do not agree with each other.
    runs = [
        run_of("triples", triples="t", gold=None),
        run_of("gold", triples=None, gold="g"),
        run_of("other triples", triples="u", gold=None),
        run_of("other gold", triples=None, gold="h"),
    ]
    folders = [[run.folder for run in group.runs] for group in group_runs(runs)]
    assert folders == [
        ["triples", "gold"],
        ["triples", "other gold"],
        ["gold", "other triples"],
        ["other triples", "other gold"],
    ]


def test_every_system_has_defaults_that_can_be_compared():
    runs = [run_of(name, system=name, options={"max_plan_tokens": 3}) for name in system_names()]
    own = dict(setting_rows(runs, system_names()))["not as in its paper"]
    assert own.startswith("max_plan_tokens=3 (")
    assert own.count("=") == 1, "what is as in each paper is not told"


def test_files_are_shown_by_name_and_digest():
    named = {"data": "w/test.jsonl", "corpus": "w/corpus.jsonl", "triples": "w/store.sqlite"}
    store = {"extractor": "rule", "store": "s" * 64}
    older = run_of(triples=store)
    first = replace(older, about=RunAbout(**named))
    copied = replace(older, about=RunAbout(data="copy.jsonl", corpus="copy.corpus.jsonl", triples="copy.sqlite"))
    rows = dict(setting_rows([first, copied], ["first", "copied"]))
    assert rows["data"] == "w/test.jsonl (SHA-256 dddddddddddd)", "equal files are one"
    assert rows["triples"] == "w/store.sqlite (rule, ssssssssssss)"
    assert dict(setting_rows([older], ["older"]))["corpus"] == "c" * 12


def test_a_run_stands_in_every_group_that_it_fits_and_a_setting_is_told_with_its_runs(folders):
    made = folders(
        none={"system": "no_retrieval", "retriever": None, "encoder": None, "corpus": None},
        five={}, two={"options": {"top_k": 2}}, ras={"system": "ras", "teacher": "oracle:w/test"},
    )  # fmt: skip
    runs = [replace(read_run(folder), folder=Path(folder).name) for folder in made]
    groups, (bare, five, two, _) = group_runs(runs), runs
    report = build_report([], groups)
    (overview,) = [one for one in sections_of(report) if one.title == "All tasks"]
    assert "mean" not in overview.blocks[0].head, "one task in two settings has none"
    assert [[run.folder for run in group.runs] for group in groups] == [["none", "five"], ["none", "two"], ["ras"]]
    assert [group.told for group in groups][:2] == [f"top_k {k}, model openai:m" for k in (5, 2)]
    moved = replace(five, settings=replace(five.settings, data="d", corpus="c"))
    assert group_runs([five, moved])[1].told == "data d", "its corpus tells nothing more"
    assert [run.folder for run in group_runs([bare, five], baseline="standard")[0].runs] == ["five", "none"]
    rows = dict(setting_rows([five, two, bare], ["five", "two", "none"]))
    changed = run_of("x", options={"evidence": "text"}, sampling=[0.0, 1.0, 7])
    assert dict(setting_rows([five, changed], ["five", "x"]))["not as in its paper"] == "evidence=text, seed=7 (x)"
    mixed = run_of("y", system="t2rag", llm={"t2rag.resolve": SMART, "cirag": SMART}, options={"top_k": 2})
    told = dict(setting_rows([mixed], ["y"]))
    assert (told["model"], told["not as in its paper"]) == ("openai:m", "t2rag.resolve=openai:smart")
    assert rows["top_k"] == "5 (five); 2 (two)"
    assert rows["retriever"] == "dense"
    assert rows["corpus"] == "c" * 12
    assert rows["triples"] == "-"
    assert "knows the facts" in dict(setting_rows(groups[2].runs, groups[2].names))["model"]


@pytest.fixture
def folders(tmp_path):
    """`folders(name=changes, …)`: folders of finished runs."""

    def make(**runs):
        for number, (name, changes) in enumerate(runs.items()):
            run, folder = run_of(**changes), tmp_path / "runs" / name
            folder.mkdir(parents=True)
            rows = [row(one, ("bad", "good")[number % 2]) for one in range(12)]
            write_lines(folder / "results.jsonl", rows)
            session = {"began": f"2026-11-2{9 - number}T10:00:00.000", "version": "0.1.0", "commit": "a" * 40}
            metrics = {"system": run.system, "task": "hotpotqa", "primary": "exact_match", "cost_per_question": {}}
            about = {"questions": 12, "sessions": [session]}
            for file, value in (("settings", run.settings.to_json()), ("run", about), ("metrics", metrics)):
                (folder / f"{file}.json").write_text(json.dumps(value))
        return [str(tmp_path / "runs" / name) for name in runs]

    return make


def test_a_papers_main_table_csv_and_what_a_slice_leaves_out(folders, tmp_path):
    part = {"part": {"system": "gold_passages"}}
    three = folders(bad={}, good={"system": "ras"}, none={"system": "no_retrieval", "retriever": None}, **part)
    rows = [row(number, "good") for number in range(12)]
    lost = [
        {**one, "error": "TimeoutError", "scores": {"exact_match": 0.0}} if n < 9 else one for n, one in enumerate(rows)
    ]
    write_lines(f"{three[1]}/results.jsonl", rows)
    write_lines(f"{three[2]}/results.jsonl", lost)
    write_lines(f"{three[3]}/results.jsonl", rows[:3])
    for folder in three:
        found = read_lines(f"{folder}/results.jsonl")
        write_lines(
            f"{folder}/results.jsonl",
            [{**one, "supporting": one["supporting"] if n else []} for n, one in enumerate(found)],
        )
    assert main(["report", *three, "--output", str(tmp_path / "out")]) == 0
    main_table = (tmp_path / "out" / "report.tex").read_text().partition(r"\midrule")[2].partition(r"\bottomrule")[0]
    lines = [" ".join(line.split()) for line in main_table.strip().splitlines()]
    assert lines[0] == r"standard & 8.3 \\"
    assert lines[1] == r"ras & \textbf{91.7}$^\dagger$ \\"
    assert lines[2] == r"no\_retrieval & 16.7 (9 failed) \\"
    assert lines[3] == r"gold\_passages & 100.0 (3 of 12) \\", "an unfinished run is not the best"
    for folder in three:
        write_lines(f"{folder}/results.jsonl", [{**one, "scores": dict.fromkeys(one["scores"], 0.0)} for one in rows])
    assert main(["report", *three, "--output", str(tmp_path / "zero")]) == 0
    assert "textbf" not in (tmp_path / "zero" / "report.tex").read_text(), "nobody is best with 0"
    (scores,) = (tmp_path / "out" / "csv").glob("*_Scores.csv")
    table = pd.read_csv(scores)
    assert list(table["failed"]) == [0, 0, 9, 0]
    assert list(table["run"]) == ["standard", "ras", "no_retrieval", "gold_passages"]
    assert list(table["questions"]) == ["12", "12", "12", "3 of 12"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "1 of 12 questions are in no column, since none of their supporting" in page.partition("number of hops")[2]
    assert "| no_retrieval (9 failed) |" in page
    assert "| gold_passages (3 of 12) |" in page


@pytest.mark.parametrize(
    ("rows", "cells"), [(12, ["91.7 (75.0 to 100.0)", "50.0"]), (3, ["100.0 (29.2 to 100.0) (3 of 12)", "-"])]
)
def test_a_mean_over_tasks_is_of_finished_runs(folders, rows, cells):
    two = folders(one={}, two={"task": {**TASK, "name": "musique"}})
    write_lines(f"{two[1]}/results.jsonl", [row(number, "good") for number in range(rows)])
    (overview,) = [
        one for one in sections_of(build_report([], group_runs(list(map(read_run, two))))) if one.title == "All tasks"
    ]
    assert overview.blocks[0].rows[0][2:] == cells


@pytest.mark.parametrize(
    ("alone", "sent", "shown"),
    [
        ([True], True, "0.50 (0.50 to 0.50)"),
        ([True, False], True, "not shown, since another evaluation used the machine"),
        ([True, None], True, "not shown, since it is not known whether"),
        ([], True, "not shown, since it is not known whether"),
        ([True], False, "not shown, since 12 of its calls were not sent"),
        ([True], None, "not shown, since it is not known which of its calls the ledger answered"),
    ],
)
def test_seconds_are_shown_of_runs_that_had_the_machine_and_asked_themselves(folders, tmp_path, alone, sent, shown):
    (folder,) = folders(one={"triples": "t"})
    if sent is not False:
        made = [row(number, "good") for number in range(12)]
        for one in made if sent is None else ():
            one["trace"]["calls"] += 1  # a Graph-LLM's calls have no roles
        write_lines(f"{folder}/results.jsonl", made)
    sessions = [{"began": "2026", "embedded": 40, **({} if one is None else {"alone": one})} for one in alone]
    (tmp_path / "runs" / "one" / "run.json").write_text(
        json.dumps({"questions": 12, "sessions": sessions, "command": ["--ledger", "x"]})
    )
    assert main(["report", folder, "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert shown in page.partition("### Latency")[2].partition("###")[0]
    assert f"| standard | 0 | 0 | 0 | 0 | 0 | - | {40 if alone else '-'} | triples of an earlier run |" in page


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling": [0.0, 1.0, 7]}, ""),
        ({"teacher": "hf:b", "teacher_weights": "y"}, ""),
        ({"options": {"top_k": 1}}, "differ in options.top_k (5 and 1)"),
        ({"sampling": [0.7, 1.0, 7]}, "differ in sampling (0.0,1.0 and 0.7,1.0)"),
        ({"control": "no_facts"}, "differ in control (None and no_facts)"),
        ({"system": "ras"}, "differ in system (standard and ras)"),
    ],
)
def test_seeds_of_one_system_differ_in_nothing_else(folders, error_of, changes, said):
    base, one, two = folders(
        base={"system": "no_retrieval", "teacher": "hf:a"}, one={"teacher": "hf:a", "teacher_weights": "x"},
        two={"teacher": "hf:a", "teacher_weights": "x", **changes},
    )  # fmt: skip
    assert main(["compare", base, f"{one},{two}", "--across", "model,sampling,top_k"]) == (2 if said else 0)
    assert not said or said in error_of()


def test_one_seed_is_not_taken_for_two(folders, tmp_path, error_of):
    trained = {"teacher": "hf:a", "teacher_weights": "x"}
    base, one, copy, drawn, again = folders(
        base={"system": "no_retrieval", "teacher": "hf:a"}, one=trained, copy=trained,
        drawn={**trained, "sampling": [0.7, 1.0]}, again={**trained, "sampling": [0.7, 1.0]},
    )  # fmt: skip
    across = ["--across", "model,sampling"]
    assert main(["compare", base, f"{one},{one}/", *across]) == 2
    assert "named 2 times" in error_of()
    assert main(["compare", base, f"{one},{copy}", *across]) == 2
    assert f"{one} and {copy} are not two seeds" in error_of()
    assert main(["compare", base, f"{drawn},{again}", *across]) == 0, "without a seed, other replies are drawn"
    for name, weights in (("one", "x"), ("copy", "y")):
        folder = tmp_path / "runs" / name
        settings = json.loads((folder / "settings.json").read_text())
        settings["model"] = {"spec": name, "weights": weights}
        (folder / "settings.json").write_text(json.dumps(settings))
        about = json.loads((folder / "run.json").read_text())
        about["trainings"] = {"model": {"config": "c", "seed": 3}}
        (folder / "run.json").write_text(json.dumps(about))
    assert main(["compare", base, f"{one},{copy}", *across]) == 2
    assert "their seeds and all other settings are equal" in error_of()


def test_compare_takes_names_and_a_baseline(folders, tmp_path, error_of, capsys):
    one, two = folders(one={}, two={"sampling": [0.0, 1.0, 9]})
    output = tmp_path / "compared.json"
    words = ["compare", f"mine={one}", f"base={two}", "--metric", "exact_match", "--output", str(output)]
    assert main(words) == 0
    assert [(run["name"], run["folder"]) for run in read_json(output)["runs"]] == [("mine", one), ("base", two)]
    assert f"run 2: {two} (base)" in capsys.readouterr().out.replace("\n", "")
    for name in ("base", "two"):
        assert main([*words, "--baseline", name]) == 0
        assert [run["name"] for run in read_json(output)["runs"]] == ["base", "mine"]
    assert main([*words, "--baseline", "bse"]) == 2
    assert "--baseline bse: no run has this name" in error_of()
    assert main(["compare", f"seeds={one},{two}", f"base={two}"]) == 0
    # A folder may have "=" in its name, also as one of several seeds.
    odd = str(Path(one).rename(tmp_path / "lr=1"))
    assert main(["compare", two, f"{odd},{two}", "--output", str(output)]) == 0
    assert read_json(output)["runs"][1]["folder"] == f"{odd},{two}"


def test_compare_and_report_take_only_what_is_named(folders, tmp_path, error_of, capsys):
    two = folders(one={}, two={"options": {"top_k": 2}, "sampling": [0.7, 1.0, 3]})
    assert main(["compare", *two]) == 2
    assert "differ in top_k (5 and 2); sampling (0.0,1.0 and 0.7,1.0), so" in error_of()
    assert main(["compare", *two, "--across", "top_k"]) == 2
    assert "pass --across sampling" in error_of()
    assert main(["compare", *two, "--across", "topk"]) == 2
    assert "did you mean top_k?" in error_of()
    assert main(["compare", *two, "--across", "top-k,sampling"]) == 0
    shown = []
    for words in ([], ["--across", "top_k,sampling", "--title", "A <b>", "--baseline", "one"]):
        assert main(["report", str(tmp_path / "runs"), "--output", str(tmp_path / "out"), *words]) == 0
        found = json.loads((tmp_path / "out" / "report.json").read_text())
        shown.append([[run["folder"][-3:] for run in group["runs"]] for group in found["groups"]])
    assert shown == [[["two"], ["one"]], [["one", "two"]]], "the oldest first, if nothing else is said"
    assert found["groups"][0]["pairs"]["exact_match"][1][0]["verdict"] == "better"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<title>A &lt;b&gt;</title>" in page
    assert "model: openai:m; date: 2026-11-29 (" in page
    assert "code: 0.1.0 aaaaaaaaaaaa" in page
    (tmp_path / "runs" / "one" / "run.json").write_text(json.dumps({"sessions": [{"began": 3}]}))
    assert main(["compare", *two]) == 2
    assert "sessions[0].began must be text" in error_of()


def test_a_report_of_several_tasks_prints_and_names_the_score_of_each(folders, tmp_path, capsys, error_of):
    scores = {"f1_hotpotqa": 0.5, "f1": 0.25}
    task = {"metrics": ["f1_hotpotqa", "f1"]}
    two = folders(first={"task": {"name": "hotpotqa", **task}}, second={"task": {"name": "musique", **task}})
    for folder in two:
        write_lines(f"{folder}/results.jsonl", [{**row(number, "good"), "scores": scores} for number in range(12)])
    words = ["report", *two, "--output", str(tmp_path / "out"), "--metric"]
    assert main([*words, "f1_hotpotqa,musique=f1"]) == 0
    shown = capsys.readouterr().out
    assert "hotpotqa f1_hotpotqa" in shown
    assert "musique f1" in shown
    assert "50.0" in shown
    assert "25.0" in shown
    assert main([*words, "exact_match,other=f1"]) == 2
    error = error_of()
    assert "'other' is not one of hotpotqa, musique" in error
    assert "'exact_match' is not one of f1_hotpotqa, f1" in error


def test_every_setting_of_a_run_is_compared_or_shown():
    read = set()
    for module in (setting, rows_of_settings):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "settings":
                read.add(node.attr)
    # A new field of `RunSettings` must be read in `shared_settings` or `_own_settings`, or two runs would look equal.
    assert {item.name for item in fields(RunSettings)} <= read
