import json
import re
import types
from dataclasses import dataclass, replace

import pytest

from tests.cli import read_lines, write_lines
from tests.fakes import Client
from tripletune.core.calls import CallError, Completion, Generator, TokenScores
from tripletune.core.options import setting
from tripletune.eval import load_task, task_names
from tripletune.eval.__main__ import main, parser
from tripletune.eval.report.figures import figures_of
from tripletune.eval.report.runs import read_run
from tripletune.eval.report.setting import shared_settings
from tripletune.eval.suites.questions import QuestionSuite, evaluate, suites_of
from tripletune.eval.systems import QuestionOptions, read_options
from tripletune.llm.backends import LLMOptions
from tripletune.rag.extractor import TextExtractor
from tripletune.rag.search.retrievers import open_retriever
from tripletune.rag.systems import LoopOptions, find_system, system_names
from tripletune.rag.systems.ras import SYSTEM
from tripletune.rag.triples.names import read_names

FACTS = [f"Town{n} lies on the River{n}." for n in range(6)]
HOTPOT = [
    {"_id": f"h{n}", "question": f"Which river flows through town{n}?", "answer": f"River{n}", "type": "bridge",
     "supporting_facts": [[f"Town{n}", 0]], "context": [[f"Town{n}", [fact]], ["Shared", ["A page of all questions."]]]}
    for n, fact in enumerate(FACTS)
]  # fmt: skip


WITHOUT_FLAG = ("control", "control_run", "batch_size", "extractor_set")


class Oracle(Generator):
    """A planner that searches once, and an answerer that reads the object of the first triple or a word of the text."""

    def __init__(self):
        self.calls = 0

    def reply(self, sample):
        self.calls += 1
        if sample.task == "planning":
            return "[SUFFICIENT]" if sample.steps else f"[SUBQ] {sample.question}"
        if not sample.steps:
            return "no idea"
        step = sample.steps[0]
        return step.triples[0].object if step.triples else step.text[-6:-1]

    async def generate(self, sample, max_new_tokens, evidence=None):
        return Completion(self.reply(sample), 10, 2)


@pytest.fixture
def oracle(serve):
    return serve(Oracle())


@pytest.fixture
def files(tmp_path):
    """A question file and its triples."""
    write_lines(tmp_path / "hotpot.jsonl", HOTPOT)
    found = [[[f"Town{n}", "lies on", f"River{n}"]] for n in range(6)]
    triples = [{"title": f"Town{n}", "text": fact, "triples": found[n]} for n, fact in enumerate(FACTS)]
    write_lines(tmp_path / "triples.jsonl", triples)
    return tmp_path


def command(files, system="ras", output="out", **more):
    options = {
        "system": system, "task": "hotpotqa", "data": files / "hotpot.jsonl", "model": files / "model",
        "output": files / output, "triples": files / "triples.jsonl", **more,
    }  # fmt: skip
    words = ["run"]
    for name, value in options.items():
        if name in WITHOUT_FLAG:
            words += ["--set", f"{name}={value}"]
        elif value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def metrics(files, output="out"):
    return json.loads((files / output / "metrics.json").read_text())


def test_run_builds_the_corpus_of_all_contexts_and_scores(files, oracle, capsys):
    assert main(command(files, limit=3)) == 0
    found = metrics(files)
    assert (found["questions"], found["metrics"]["exact_match"]["mean"]) == (3, 1.0)
    assert found["recall"]["retrieved@2"]["mean"] == 1.0
    corpus = (files / "out" / "corpus.jsonl").read_text().splitlines()
    assert len(corpus) == 7, "six towns of all six questions, and the shared page once"
    shown = capsys.readouterr().out
    assert "ras on hotpotqa, 3 questions" in shown
    assert "a gold answer, ignoring case, articles and punctuation" in shown


def test_an_abstention_is_counted_and_never_scored_as_an_answer(files, serve, capsys):
    class Sure(Oracle):
        async def generate(self, sample, max_new_tokens, evidence=None):
            logprob = -2.0 if sample.question.endswith(("0?", "1?")) else -0.1
            scores = TokenScores(logprob, 1.0) if sample.task == "answering" else None
            return Completion(self.reply(sample), 10, 2, scores=scores)

    serve(Sure())
    assert main(command(files, abstain=0.5, limit=4)) == 0
    found = metrics(files)
    assert (found["counts"]["abstentions"], found["counts"]["refusals"]) == (2, 0)
    assert found["metrics"]["exact_match"]["mean"] == 0.5
    assert (found["answered"]["exact_match"]["mean"], found["answered"]["exact_match"]["n"]) == (1.0, 2)
    rows = read_lines(files / "out" / "results.jsonl")
    assert [row["prediction"] for row in rows[:2]] == ["I don't know"] * 2
    assert rows[0]["trace"]["withheld"] == "River0"
    assert rows[0]["trace"]["confidence"]["probability"] == pytest.approx(0.1353)
    assert "exact_match, answered" in capsys.readouterr().out
    assert json.loads((files / "out" / "settings.json").read_text())["options"]["abstain"] == 0.5
    assert main(command(files, output="all", limit=4)) == 0
    assert "abstentions" not in metrics(files, "all")["counts"]
    # So that a folder of an earlier version, which has no such options, is continued.
    options = json.loads((files / "all" / "settings.json").read_text())["options"]
    assert not {"stop", "abstain", "confidence", "answer_samples", "logprobs"} & set(options)


def test_a_new_option_of_a_loop_reaches_flag_set_yaml_and_settings(files, oracle, monkeypatch):
    @dataclass(frozen=True, slots=True)
    class More(LoopOptions):
        depth: int = setting(1, "levels of a tree", at_least=1)

    monkeypatch.setattr("tripletune.rag.system_options.LoopOptions", More)
    monkeypatch.setattr("tripletune.rag.systems.ras.SYSTEM", replace(SYSTEM, options=More))

    def suites(*more):
        words = [*command(files), *more]
        return QuestionSuite.suites(parser(words).parse_args(words))

    named = {name: str(files / file) for name, file in (("data", "hotpot.jsonl"), ("triples", "triples.jsonl"))}
    named |= {"system": "ras", "task": "hotpotqa", "model": str(files / "model"), "output": str(files / "out")}
    (yaml,) = suites_of(*read_options(named | {"depth": 3}))
    for (suite,) in (suites("--depth", "3"), suites("--set", "depth=3"), [yaml]):
        assert suite.settings()["options"]["depth"] == 3
    several = suites("--system", "ras,standard", "--set", "ras.top_k=7", "--top-k", "5")
    assert [suite.loop.top_k for suite in several] == [7, 5]


def test_from_python_the_metrics_are_those_of_the_command(files, oracle):
    assert main(command(files, top_k=2)) == 0
    given = {name: str(files / file) for name, file in (("model", "model"), ("triples", "triples.jsonl"))}
    found = evaluate("ras", "hotpotqa", str(files / "hotpot.jsonl"), top_k=2, **given)
    assert found["metrics"] == metrics(files)["metrics"]


def test_the_graph_token_can_be_left_out(files, oracle):
    asked = []
    oracle.processor = types.SimpleNamespace(without_graph=lambda: asked.append("without") or oracle.processor)
    assert main([*command(files), "--set", "graph=no"]) == 0
    assert asked
    assert json.loads((files / "out" / "settings.json").read_text())["options"]["graph"] is False


def test_a_control_in_the_loop_changes_what_the_model_reads_and_nothing_else(files, oracle, monkeypatch):
    oracle.processor = types.SimpleNamespace(settings=types.SimpleNamespace(use_graph=True))
    seen, reply = [], oracle.reply
    monkeypatch.setattr(oracle, "reply", lambda sample: seen.append(sample) or reply(sample))
    assert main(command(files)) == 0
    seen.clear()
    other = {"control_run": files / "out"}
    assert main(command(files, output="none", control="no_facts")) == 0
    assert {step.triples + tuple(step.text) for sample in seen for step in sample.steps} == {()}
    assert main(command(files, output="facts", control="other_facts", **other)) == 0
    seen.clear()
    assert main(command(files, output="graph", control="other_graph", **other)) == 0
    read = [(one.steps[0], one.graph_of[0]) for one in seen if one.steps]
    assert len(read) == 12
    assert all(own.query == theirs.query and own.triples != theirs.triples for own, theirs in read)
    names = ("out", "none", "facts", "graph")
    assert [metrics(files, name)["metrics"]["exact_match"]["mean"] for name in names] == [1.0, 0.0, 0.0, 1.0]
    traces = [
        [[json.loads(line)["trace"][part] for part in ("steps", "actions")] for line in rows.open()]
        for rows in (files / name / "results.jsonl" for name in names)
    ]
    assert traces[0] == traces[1] == traces[2] == traces[3], "this planner does not read, so its loops are the same"
    assert main(["report", *(str(files / name) for name in names), "--output", str(files / "report")]) == 0
    page = (files / "report" / "report.md").read_text()
    assert all(f"| ras, control={name} |" in page for name in ("no_facts", "other_facts", "other_graph"))
    assert "control run=" not in page


def test_other_systems_and_compare(files, oracle, capsys, error_of):
    assert main(command(files)) == 0
    assert main(command(files, "standard", "std", triples=None)) == 0
    assert main(command(files, "no_retrieval", "none", triples=None)) == 0
    assert metrics(files, "none")["metrics"]["exact_match"]["mean"] == 0.0
    assert not (files / "none" / "corpus.jsonl").exists()
    assert main(command(files, "gold_passages", "gold", triples=None)) == 0
    assert metrics(files, "gold")["recall"]["retrieved@2"]["mean"] == 1.0
    capsys.readouterr()
    folders = [str(files / name) for name in ("out", "std", "none")]
    assert main(["compare", *folders, "--metric", "exact_match", "--output", str(files / "compare.json")]) == 0
    shown = capsys.readouterr().out
    assert "hotpotqa, 6 questions" in shown
    assert "-100.0" in shown
    assert "two-level bootstrap" not in shown
    first, _, third = json.loads((files / "compare.json").read_text())["scores"]["exact_match"]
    assert first["difference"] is None
    assert third["difference"]["mean"] == -1.0
    assert main(["compare", folders[0], f"{folders[0]},{folders[2]}"]) == 2
    assert "seeds of one system" in error_of()
    assert main(command(files, output="blind", control="no_facts")) == 0
    seeds = [folders[0], f"{folders[0]},{files / 'blind'}"]
    assert main(["compare", *seeds]) == 2
    assert "differ in control (None and no_facts)" in error_of()
    settings = json.loads((files / "out" / "settings.json").read_text())
    for seed, name in enumerate(("out", "blind")):
        (files / name / "settings.json").write_text(json.dumps({**settings, "student_seed": seed}))
    assert main(["compare", *seeds, "--metric", "exact_match", "--output", str(files / "seeds.json")]) == 0
    shown = capsys.readouterr().out
    assert "run 2, exact_match of each seed: 100.0, 0.0" in shown
    assert "Of several seeds, seeds and questions are drawn for interval and p (two-level bootstrap)" in " ".join(
        shown.split()
    )
    _, both = json.loads((files / "seeds.json").read_text())["scores"]["exact_match"]
    assert (both["score"]["mean"], both["difference"]["mean"]) == (0.5, -0.5)
    assert both["difference"]["test"] == "two-level bootstrap"


def test_an_extractor_in_the_loop_reads_each_passage_once(files, oracle, monkeypatch, capsys):
    clients = []

    def reply(asked):
        title, _, text = asked.text.partition(":")
        return f"(S> {title}| P> lies on| O> {text.rstrip('.').split()[-1]})"

    def open_extractor(spec, options):
        clients.append(Client(answer=reply))
        return TextExtractor(clients[-1], "Extract.", settings={"beams": options.beams})

    monkeypatch.setattr("tripletune.rag.extractor.open_local_extractor", open_extractor)
    more = {"extractor": files / "model", "extractor_set": "beams=4"}
    assert main(command(files, triples=files / "t.sqlite", **more)) == 0
    assert metrics(files)["metrics"]["exact_match"]["mean"] == 1.0
    assert metrics(files)["cost_per_question"]["structuring_seconds"] > 0
    assert sorted(asked.text.split(":")[0] for asked in clients[0].asked) == [f"Town{n}" for n in range(6)]
    assert clients[0].closed
    assert "triples in the loop" in capsys.readouterr().out
    assert main(command(files, output="again", triples=files / "t.sqlite", **more)) == 0
    assert clients[1].asked == []
    read, again = metrics(files), metrics(files, "again")
    assert (read["indexing"]["calls"], again["indexing"]["calls"]) == (6, 0)
    assert read["counts"]["tallies"] == {"calls.extract.triples": 6}
    assert read["cost"] == again["cost"]
    rows = [
        [{**json.loads(line), "trace": None} for line in (files / name / "results.jsonl").read_text().splitlines()]
        for name in ("out", "again")
    ]
    assert rows[0] == rows[1]
    # Look-up in that store alone, and a store in the index folder.
    assert main(command(files, output="stored", triples=files / "t.sqlite", extractor="1")) == 0
    assert main(command(files, output="own", triples=None, limit=1, **more)) == 0
    assert (files / "own" / "index" / "triples.sqlite").is_file()
    assert len(clients) == 3


def test_passages_whose_extraction_fails_in_the_loop_are_reported(files, oracle, monkeypatch, caplog):
    def fail(asked):
        raise CallError("too long")

    monkeypatch.setattr(
        "tripletune.rag.extractor.open_local_extractor",
        lambda spec, options: TextExtractor(Client(answer=fail), "Extract.", settings={}),
    )
    main(command(files, triples=files / "t.sqlite", extractor=files / "model"))
    assert "ras on hotpotqa: 6 passages could not be read, so questions may be answered" in caplog.text
    assert not any(row["error"] for row in read_lines(files / "out" / "results.jsonl"))


def test_passages_whose_replies_are_no_triples_in_the_loop_are_reported(files, oracle, monkeypatch, caplog):
    monkeypatch.setattr(
        "tripletune.rag.extractor.open_local_extractor",
        lambda spec, options: TextExtractor(Client(answer=lambda asked: "I see."), "Extract.", settings={}),
    )
    assert main(command(files, triples=files / "t.sqlite", extractor=files / "model")) == 0
    assert "ras on hotpotqa: 6 passages have replies that are no triples, such as 'I see.'" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "hotpot"}, "nor a YAML file (did you mean hotpotqa?)"),
        ({"triples": None}, "--system ras needs triples: give --triples FILE"),
        ({"system": "gear", "extractor": "x"}, "whole corpus, but --extractor x extracts only from retrieved"),
        ({"model": "/nowhere"}, "model '/nowhere': there is no such folder"),
        ({"control": "other_graph"}, "control_run (the run without control) is for"),
        ({"control": "other_facts", "control_run": "x", "evidence": "text"}, "leave out --evidence text"),
        ({"max_rounds": -1, "top_k": 0}, "max_rounds: -1 must be at least 0; top_k: 0"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(files, oracle, error_of, change, message):
    assert main(command(files, **change)) == 2
    assert message in error_of()
    assert oracle.calls == 0


def test_a_question_comes_once(files, oracle, error_of):
    write_lines(files / "hotpot.jsonl", HOTPOT[:1] * 2)
    assert main(command(files)) == 2
    assert "1 question ids occur more than once, for example 'h0'; results are stored by id" in error_of()


def test_changed_settings_need_overwrite(files, oracle, error_of):
    for _ in range(2):
        assert main(command(files)) == 0
        assert oracle.calls == 6 * 3, "the same command answers nothing anew"
    assert main(command(files, top_k=2)) == 2
    assert "options.top_k was 5 and is 2" in error_of()
    assert main(command(files, top_k=2, overwrite=True)) == 0
    assert main(command(files, top_k=2, concurrency=1, batch_size=3)) == 0, "speed settings are free to change"


def test_one_name_per_entity_changes_answers_and_is_a_setting(files, oracle, error_of):
    entities = files / "entities.tsv"
    entities.write_text("merge\tname\tinto\nyes\tRiver1\tRiver One\n")
    assert main(command(files, entities=entities)) == 0
    rows = [json.loads(line) for line in (files / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in rows][:2] == ["River0", "River One"]
    entities.write_text("merge\tname\tinto\twhy\nyes\tRiver1\tRiver One\tsigns\nno\tRiver2\tRiver\t\n")
    assert main(command(files, entities=entities)) == 0, "what is not merged changes nothing"
    assert main(command(files)) == 2
    assert "entities was" in error_of()
    assert main(command(files, output="plain")) == 0
    first, second = [shared_settings(read_run(str(files / name))) for name in ("out", "plain")]
    assert first.triples == {"triples": second.triples, "entities": f"entities {read_names(entities).digest}"}


def test_an_index_of_another_corpus_is_kept(files, oracle, error_of):
    rows = [{"id": f"first{n}", "text": fact} for n, fact in enumerate(FACTS)]
    more = {"corpus": write_lines(files / "all.jsonl", rows), "triples": None, "evidence": "text"}
    assert main(command(files, **more)) == 0
    others = [{"id": row["id"], "text": f"Another {row['text']}"} for row in rows]
    other = more | {"corpus": write_lines(files / "others.jsonl", others), "index": files / "out" / "index"}
    assert main(command(files, output="other", **other)) == 2
    assert "give another --index, or add --overwrite to replace" in error_of()
    assert main(command(files, output="other", **other, overwrite=True)) == 0


def test_base_model_must_be_asked_for(files, oracle, error_of):
    (files / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert main(command(files)) == 2
    assert "add --untrained" in error_of()
    assert main(command(files, untrained=True)) == 0


@pytest.mark.parametrize(("failing", "calls", "rounds"), [("planning", 0, 0), ("answering", 2, 1)])
def test_all_questions_failing_is_an_error_and_what_was_called_is_counted(
    files, oracle, monkeypatch, failing, calls, rounds
):
    def fail(sample):
        if sample.task == failing:
            raise RuntimeError("no memory")
        return Oracle.reply(oracle, sample)

    monkeypatch.setattr(oracle, "reply", fail)
    assert main(command(files)) == 1
    found = metrics(files)
    assert (found["counts"]["errors"], found["counts"]["rounds"]) == (6, 6 * rounds)
    assert [found["cost"][name] for name in ("calls", "prompt_tokens")] == [6 * calls, 60 * calls]
    assert found["counts"]["stop_reasons"] == {"error": 6}
    assert {one["mean"] for one in (*found["metrics"].values(), *found["recall"].values())} == {0.0}
    row = json.loads((files / "out" / "results.jsonl").read_text().splitlines()[-1])
    assert (row["prediction"], row["error"].split(" (")[0], row["trace"]["seconds"] > 0) == (
        "",
        "RuntimeError: no memory",
        True,
    )


def test_compare_needs_finished_runs_of_one_task(files, oracle, error_of):
    assert main(["compare", str(files / "nothing")]) == 2
    assert "is not the output of a finished" in error_of()
    assert main(command(files)) == 0
    figures = (files / "out" / "metrics.json").rename(files / "metrics.json")
    rows = (files / "out" / "results.jsonl").read_text()
    (files / "out" / "results.jsonl").write_text("".join(rows.splitlines(keepends=True)[:2]))
    assert main(["compare", str(files / "out")]) == 2
    assert "is not finished: it has 2 of 6 results. Run its command again to complete it" in error_of()
    (files / "out" / "results.jsonl").write_text(rows)
    figures.rename(files / "out" / "metrics.json")
    head = metrics(files) | {"task": "musique"}
    (files / "other").mkdir()
    (files / "other" / "metrics.json").write_text(json.dumps(head))
    assert main(["compare", str(files / "out"), str(files / "other")]) == 2
    assert "different tasks (hotpotqa, musique)" in error_of()
    (files / "out" / "results.jsonl").write_text("")
    assert main(["compare", str(files / "out")]) == 2
    assert "the results are empty" in error_of()


def test_every_task_loads_and_a_wrong_one_names_all_its_problems(tmp_path):
    assert {"2wikimultihopqa", "arc", "hotpotqa", "musique", "popqa", "pubhealth", "triviaqa"} <= {*task_names()}
    lengths = {name: load_task(name).max_answer_tokens for name in task_names()}
    assert {name for name, length in lengths.items() if length == 50} == {"arc", "pubhealth", "multihoprag"}
    assert load_task("2wikimultihopqa").metrics[0] == load_task("hotpotqa").metrics[0] == "f1_hotpotqa"
    protocol = load_task("flashrag_popqa")
    assert (protocol.questions, protocol.top_k, protocol.metrics[0]) == (1000, 5, "f1_hotpotqa")
    assert load_task("hipporag_2wiki").reader == "two_wiki"
    wrong = tmp_path / "mine.yaml"
    wrong.write_text("reader: hotpotqa\nmetric: [f1]\nmetrics: [f2]\n")
    with pytest.raises(ValueError, match=r"(?s)mine.yaml: .*unknown key metric \(did you mean metrics"):
        load_task(str(wrong))
    wrong.write_text("metrics: [f2]\nmax_answer_tokens: 0\ntemplate: x\n")
    with pytest.raises(
        ValueError, match=r"(?s)tokens: 0 must.*reader is missing.*'f2' is not.*\{question\} is missing"
    ):
        load_task(str(wrong))


def test_several_systems_and_tasks(files, oracle, error_of, monkeypatch, capsys):
    tasks = ["hotpotqa", str(files / "towns.yaml")]
    (files / "towns.yaml").write_text("reader: hotpotqa\nmetrics: [exact_match]\nmax_answer_tokens: 9\n")
    for name in ("hotpotqa", "towns"):
        (files / f"{name}.jsonl").write_text((files / "hotpot.jsonl").read_text())
        (files / f"{name}.corpus").write_text('{"title": "Town1", "text": "Town1 lies on the River1."}\n')
    words = command(files, data=files / "{task}.jsonl", corpus=files / "{task}.corpus")
    words[1:5] = ["--systems", "ras,standard,no_retrieval", "--tasks", ",".join(tasks)]
    assert main([*words, "--set", "ras.graf=no", "--set", "geer.top_k=3"]) == 2
    error = error_of()
    assert "(did you mean gear?)" in error
    assert "system 'ras' has no option 'graf' (did you mean graph?)" in error
    assert not (files / "out").exists()

    (files / "towns.corpus").write_text("no JSON\n")
    assert main(words) == 1
    assert "2 of 6 evaluations failed: " in error_of()
    assert not (files / "out" / "towns" / "ras" / "metrics.json").exists()
    for name in ("towns/no_retrieval", "hotpotqa/standard"):
        assert metrics(files, f"out/{name}")["questions"] == 6
    (files / "towns.corpus").write_text((files / "hotpotqa.corpus").read_text())
    opened = []
    monkeypatch.setattr(
        "tripletune.rag.answering.open_retriever", lambda *how: opened.append(how) or open_retriever(*how)
    )
    calls = oracle.calls
    assert main([*words, "--overwrite"]) == 0
    assert len(opened) == 2, "an index a task"
    capsys.readouterr()
    assert main(words) == 0
    assert oracle.calls == calls + 2 * 6 * (3 + 1 + 1), "what is complete is not run again"
    shown = capsys.readouterr()
    assert shown.out.count("All systems on") == 2, "one table a task"
    for system in ("ras", "standard", "no_retrieval"):
        assert len(re.findall(rf"^│ {system} .*│$", shown.out, re.MULTILINE)) == 2
    assert f"next: tripletune eval report {files / 'out'}" in shown.out
    assert "has no effect" not in shown.err, "RAS reads the triples"
    assert main(["report", str(files / "out"), "--output", str(files / "report")]) == 0
    page = (files / "report" / "report.md").read_text()
    assert "|  | hotpotqa f1_hotpotqa | towns exact_match |\n" in page, "no mean of two metrics"
    assert re.search(r"\| standard \| (\d+\.\d) \(.+\) \| \1 \([^|]+\) \|\n", page)


def test_lengths_are_the_tasks_and_a_common_reader_is_a_chat_model(files):
    task, data = files / "towns.yaml", str(files / "hotpot.jsonl")
    task.write_text("reader: hotpotqa\nmetrics: [exact_match]\nmax_answer_tokens: 9\nanswer: long\n")
    named = {"task": str(task), "data": data, "corpus": data, "output": str(files / "out"), "encoder": "none"}

    def opened(**options):
        return suites_of(QuestionOptions(**named | options), LLMOptions(model="m"))

    asking = [name for name in system_names() if find_system(name).model != "none"]
    every = opened(system=",".join(asking), retriever="dense", triples=data)
    assert {(one.loop.max_answer_tokens, one.loop.answer, one.loop.reader) for one in every} == {(9, "long", "paper")}
    ras, standard = opened(system="ras,standard", model="graph", triples=data, set=["reader=common"])
    assert (ras.options.model, ras.options.planner_model, ras.teacher.model) == (None, "graph", "m")
    assert (standard.options.model, standard.options.planner_model, standard.teacher.model) == (None, None, "m")
    with pytest.raises(ValueError, match="common reader is a chat model: give it with --llm, and the Graph-LLM as pl"):
        opened(system="ras", model="graph", triples=data, set=["reader=common"])


@pytest.mark.parametrize("corpus", [False, True])
def test_answers_of_another_program(files, error_of, capsys, corpus, caplog):
    rows = [
        {"id": f"h{n}", "answer": f"River{n}\n", "passages": ["x", {"title": f"Town{n}", "text": f" {FACTS[n]}"}],
         "prompt_tokens": 9, "seconds": 2.5}
        for n in range(5)
    ]  # fmt: skip
    write_lines(files / "theirs.jsonl", rows)
    words = ["run", "--system", "answers", "--task", "hotpotqa", "--data", str(files / "hotpot.jsonl")]
    words += ["--output", str(files / "theirs")]
    if corpus:
        towns = [{"id": f"doc-{n}", "title": f"Town{n}", "text": fact} for n, fact in enumerate(FACTS)]
        words += ["--corpus", str(write_lines(files / "corpus.jsonl", towns))]
        rows[0]["passages"][1] = "doc-0"
    assert main(words) == 2
    assert "--answers FILE and --system answers need each other" in error_of()
    assert main([*words, "--answers", str(files / "theirs.jsonl")]) == 4, "one of six questions has no answer"
    said = "\n".join(record.getMessage() for record in caplog.records if record.levelname != "DEBUG")
    assert "has no line with the id or the text of question" in said
    assert "traceback" not in said
    assert "with a completed file, --overwrite scores it anew" in said
    found = metrics(files, "theirs")
    assert found["metrics"]["exact_match"]["mean"] == pytest.approx(5 / 6)
    assert (found["failed"], found["cost"]["prompt_tokens"]) == (1, 45)
    assert found["recall"]["shown@2"]["mean"] == pytest.approx(5 / 6)
    figures = figures_of(read_run(str(files / "theirs")))
    assert "calls" not in figures.cost, "what the file does not tell is not known, not 0"
    assert "tokens_read" in figures.cost
    assert figures.indexing == found["indexing"] == {}
    assert not {"calls", "sent", "dollars"} & figures.cost.keys()
    names = {"prompt_tokens", "cached_prompt_tokens", "truncated_triples", "truncated_words"}
    assert found["cost"].keys() == names
    assert found["cost_per_question"].keys() == {*names, "seconds", "structuring_seconds"}
    # A line without passages has no recall, and a file without costs has no costs.
    bare = [{key: row[key] for key in ("id", "answer", "passages")[: 2 + n % 2]} for n, row in enumerate(rows)]
    write_lines(files / "theirs.jsonl", bare)
    assert main([*words, "--overwrite", "--answers", str(files / "theirs.jsonl"), "--price", "1,1"]) == 4
    found = metrics(files, "theirs")
    assert {(round(3 * one["mean"]), one["n"]) for one in found["recall"].values()} == {(2, 3)}
    assert found["cost"].keys() == found["cost_per_question"].keys() == {"truncated_triples", "truncated_words"}
    assert main(["score", str(files / "theirs"), "--metrics", "recall@5"]) == 0
    assert re.search(r"recall@5\b.* 66\.7 ", capsys.readouterr().out)
    assert main(["compare", str(files / "theirs")]) == 0
    assert "(answers), per question: -\n" in capsys.readouterr().out
    # An array of rows without ids, matched by the questions' texts.
    texts = {row["_id"]: row["question"] for row in HOTPOT}
    unnamed = [{"query": f" {texts[row['id']]}", "result": row["answer"]} for row in rows]
    (files / "array.json").write_text(json.dumps(unnamed))
    assert main([*words, "--overwrite", "--answers", str(files / "array.json")]) == 4
    assert metrics(files, "theirs")["metrics"]["exact_match"]["mean"] == pytest.approx(5 / 6)
    write_lines(files / "theirs.jsonl", [*rows, rows[0]])
    assert main([*words, "--overwrite", "--answers", str(files / "theirs.jsonl")]) == 2
    assert "theirs.jsonl:6: a second answer to question h0" in error_of()


def test_help_of_a_system_shows_its_own_options(capsys):
    def shown(*words):
        with pytest.raises(SystemExit):
            main(["run", *words, "--help"])
        return " ".join(capsys.readouterr().out.split())

    gear, ras, both = shown("--system", "gear"), shown("--system=ras"), shown("--systems", "gear,ras")
    for flag in ("--read-k", "--variant {agent,sync,naive}", "--prompts", "more options of gear", "reader_tokens"):
        assert flag in gear
        assert flag in both
    assert "--max-plan-tokens" not in gear
    assert "--no-planning retrieve once" in ras
    assert "more options of ras, by --set NAME=VALUE: reader_tokens" in ras
    assert "--max-plan-tokens" in both
    # Without a system there is a line per system.
    listed = shown()
    assert "systems, for --system:" in listed
    assert "gear GEAR" in listed


def test_options_that_no_system_uses_are_named_once(files, oracle, caplog):
    words = command(files, triples=files / "none.jsonl")
    words[1:3] = ["--systems", "standard,no_retrieval"]
    main(words)
    assert [text for text in caplog.messages if "has no effect" in text] == [
        f"--triples {files / 'none.jsonl'} has no effect: none of these systems uses it"
    ]


def test_prompts_have_a_flag_in_every_loop(capsys):
    for system in ("ras", "cirag", "t2rag", "gear", "thrag", "ppr", "standard", "react", "ircot", "self_ask"):
        words = ["run", "--system", system, "--task", "qa", "--data", "d", "--output", "o", "--prompts", "mine"]
        assert parser(words).parse_args(words).set == ["prompts=mine"]
