import asyncio
import json
import re
from types import SimpleNamespace

import pytest

from tests.cli import read_lines
from tests.fakes import Facts, Shelf
from tripletune.core.calls import Completion, Generator
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Question
from tripletune.core.data.records import Action
from tripletune.core.data.triples import Triple
from tripletune.core.tables import plain_console
from tripletune.eval import Task, find_metrics
from tripletune.eval.__main__ import main
from tripletune.eval.result_log import ResultLog, changed_settings, watch_for_other_evaluations
from tripletune.eval.running import run_suites
from tripletune.eval.suites.questions import QuestionSuite
from tripletune.eval.systems import QuestionOptions
from tripletune.rag.systems import LoopOptions, Tools, find_system

TASK = Task("toy", "none", ("f1_hotpotqa", "exact_match"), 20)
GOLD = {number: Passage(f"Page {number}", f"Fact {number}.") for number in range(70)}
QUESTIONS = [
    Question(f"q{n}", f"What is {n}?", (f"answer {n}",), (GOLD[n], Passage("Other", "noise")), (0,), "bridge", "toy")
    for n in range(70)
]
IDS = [question.id for question in QUESTIONS]


class Model(Generator):
    """Asks twice, then answers; odd questions are answered wrong, and chosen ones fail. Replies at uneven times."""

    def __init__(self, failing=()):
        self.failing = failing
        self.answered: list[str] = []
        self.most_at_once = self._at_once = 0

    async def generate(self, sample, max_new_tokens, evidence=None):
        number = int(sample.question.split()[-1].rstrip("?"))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        for _ in range(number * 7 % 5):
            await asyncio.sleep(0)
        self._at_once -= 1
        if sample.task == "planning":
            if len(sample.steps) < 2:
                return Completion(f"[SUBQ] step {len(sample.steps)} of {number}", 5, 3)
            return Completion(Action.SUFFICIENT.value if number % 3 else "garbage", 5, 1)
        if sample.question in self.failing:
            raise RuntimeError("out of memory")
        self.answered.append(sample.question)
        return Completion(f"answer {number if number % 2 == 0 else 'wrong'}", 9, 2)


def passages_of(query):
    number = int(query.split()[-1].rstrip("?"))
    return [GOLD[number]] if number != 4 else []


def facts_of(passage):
    return (Triple(passage.title, "is", "a page"),) if passage.title != "Page 6" else None


class Toy(QuestionSuite):
    """RAS over questions that no file holds."""

    def __init__(self, folder, model, questions, concurrency=64, overwrite=False, retry_errors=False):
        self.options = QuestionOptions(
            data="toy", output=str(folder), system="ras", task="toy", concurrency=concurrency, overwrite=overwrite
        )
        self.system, self.task, self.loop = find_system("ras"), TASK, LoopOptions()
        self.metrics = {name: find_metrics()[name] for name in TASK.metrics}
        self.questions, self.ids = questions, [question.id for question in questions]
        self.tools, self.gold, self.own_contexts = Tools(model, model, Shelf(passages_of), Facts(facts_of)), None, True
        self.concurrency, self.retry_errors, self.prices, self.teacher = concurrency, retry_errors, {}, None

    def items(self):
        return iter(self.questions)

    def settings(self):
        return {"version": 1}

    def open(self):
        pass


def run(folder, model=None, questions=QUESTIONS, **options):
    run_suites([Toy(folder, model or Model(), questions, **options)])
    return json.loads((folder / "metrics.json").read_text())


def without_times(folder):
    found = read_lines(folder / "results.jsonl")
    for row in found:
        row["trace"].pop("seconds"), row["trace"].pop("structuring_seconds")
    return found


def test_64_at_once_equals_one_by_one(tmp_path):
    model = Model()
    many = run(tmp_path / "many", model)
    one = run(tmp_path / "one", concurrency=1)
    assert model.most_at_once > 10
    assert [row["id"] for row in read_lines(tmp_path / "many" / "results.jsonl")] == IDS
    assert without_times(tmp_path / "many") == without_times(tmp_path / "one")
    for metrics in (many, one):
        metrics.pop("session")
        metrics["cost_per_question"].pop("seconds"), metrics["cost_per_question"].pop("structuring_seconds")
    assert many == one


def test_a_model_is_loaded_once_before_the_first_question(tmp_path):
    model, loaded = Model(), []
    model.load = lambda: loaded.append(len(model.answered))
    suite = Toy(tmp_path, model, QUESTIONS[:2])
    suite.clients = [model]
    run_suites([suite])
    assert loaded == [0]
    assert len(model.answered) == 2


def test_metrics_count_what_happened(tmp_path):
    metrics = run(tmp_path)
    assert metrics["metrics"]["exact_match"]["mean"] == 0.5
    assert metrics["metrics"]["f1_hotpotqa"]["mean"] == pytest.approx(0.75)
    assert metrics["questions"] == metrics["metrics"]["exact_match"]["n"] == 70
    assert not isinstance(metrics["counts"]["errors"], bool)
    assert metrics["counts"] == {
        "errors": 0, "refusals": 0, "malformed_plans": 24, "unexpected_plans": 0, "rounds": 140, "passages": 138,
        "passages_without_triples": 2, "triples": 136, "tallies": {"unreadable.plan": 24},
        "stop_reasons": {"malformed": 23, "repeated_subquery": 1, "sufficient": 46},  # question 6 has no graph
        "actions": {"[SUBQ]": 140, "[SUFFICIENT]": 46, "malformed": 24},
    }  # fmt: skip
    assert metrics["cost"]["calls"] == 70 * 4
    assert metrics["cost"]["prompt_tokens"] == 70 * 24
    assert [metrics["recall"][f"{of}@2"]["mean"] for of in ("first", "retrieved")] == [pytest.approx(69 / 70)] * 2
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics


def test_failing_questions_score_0_and_are_asked_again_alone(tmp_path):
    metrics = run(tmp_path, Model(failing=("What is 2?", "What is 3?")))
    row = read_lines(tmp_path / "results.jsonl")[2]
    assert (row["id"], row["error"].split(" (")[0], row["prediction"]) == ("q2", "RuntimeError: out of memory", "")
    assert row["scores"] == {"f1_hotpotqa": 0.0, "exact_match": 0.0}
    assert metrics["counts"]["errors"] == 2
    score = metrics["metrics"]["exact_match"]
    assert (score["mean"], score["n"]) == (pytest.approx(34 / 70), 70), "they stay in the denominator"
    model = Model()
    assert run(tmp_path, model)["session"] == metrics["session"], "no speed of a run that asked nothing"
    assert model.answered == []
    (made,) = json.loads((tmp_path / "run.json").read_text())["sessions"]
    assert made.keys() >= {"began", "version", "alone"}, "a call that asks nothing makes no result"

    class Gone(Model):
        def load(self):
            raise KeyboardInterrupt

    gone = Toy(tmp_path, model, QUESTIONS, retry_errors=True)
    gone.clients = [Gone()]
    with pytest.raises(KeyboardInterrupt):
        run_suites([gone])
    assert not (tmp_path / "metrics.json").exists(), "the failed questions are gone, so the run is not finished"
    assert run(tmp_path, model, retry_errors=True)["counts"]["errors"] == 0
    assert [one["version"] for one in json.loads((tmp_path / "run.json").read_text())["sessions"]] == [
        made["version"]
    ] * 2
    assert sorted(model.answered) == ["What is 2?", "What is 3?"]
    assert [row["id"] for row in read_lines(tmp_path / "results.jsonl")] == IDS


@pytest.mark.parametrize(
    ("failing", "most", "code"), [(0, 0.1, 0), (2, 0.1, 0), (18, 0.1, 4), (18, 0.9, 0), (20, 0.9, 1)]
)
def test_failed_questions_are_counted_beside_each_score_and_end_a_run_with_a_code(
    tmp_path, capsys, failing, most, code
):
    def suite(folder, failing):
        made = Toy(tmp_path / folder, Model([f"What is {n}?" for n in range(failing)]), QUESTIONS[:20])
        made.options.max_failed = most
        return made

    for _ in range(2):  # also where nothing is left to be asked
        assert run_suites([suite("one", failing), suite("other", 0)], plain_console()) == code
    assert json.loads((tmp_path / "one" / "metrics.json").read_text())["failed"] == failing
    rows = [re.split(r" *[│┃] *", line) for line in capsys.readouterr().out.splitlines() if line[:1] in "│┃" and line]
    at = rows[0].index("failed")
    # One table of both suites, printed twice; the suite without failures is the better one.
    assert sorted(row[at] for row in rows if row[at] != "failed") == sorted([str(failing), "0"] * 2)


def test_killed_run_goes_on_and_loses_nothing(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole)

    class Killed(Model):
        async def generate(self, sample, max_new_tokens, evidence=None):
            if len(self.answered) == 20:
                raise KeyboardInterrupt
            return await super().generate(sample, max_new_tokens, evidence)

    with pytest.raises(KeyboardInterrupt):
        run(killed, Killed(), concurrency=8)
    results = killed / "results.jsonl"
    lines = results.read_bytes().splitlines(keepends=True)
    assert 10 < len(lines) <= 20
    results.write_bytes(b"".join(lines[:-1]) + lines[-1][:25])
    done = {json.loads(line)["question"] for line in lines[:-1]}
    model = Model()
    metrics = run(killed, model)
    assert set(model.answered).isdisjoint(done)
    assert len(model.answered) == 70 - len(done)
    assert metrics["session"]["questions"] == 70 - len(done)
    assert without_times(killed) == without_times(whole)


def test_other_settings_are_refused_unless_overwritten(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match=r"version was 1 and is 2.*--overwrite"):
        ResultLog(tmp_path, {"version": 2})
    assert len(read_lines(tmp_path / "results.jsonl")) == 70
    log = ResultLog(tmp_path, {"version": 2}, overwrite=True)
    assert log.done == set()
    log.close()
    (tmp_path / "settings.json").unlink()
    with pytest.raises(FileExistsError, match="did not make"):
        ResultLog(tmp_path, {"version": 2})


@pytest.mark.parametrize(
    "files",
    [{"metrics.json": "mine"}, {"results.jsonl": "mine"}, {"notes.txt": "mine"}, {"settings.json": '{"tab": 4}'}],
    ids=lambda files: next(iter(files)),
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_are_never_replaced(tmp_path, files, overwrite):
    for name, text in {**files, "metrics.json": "mine"}.items():
        (tmp_path / name).write_text(text)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="another"):
        ResultLog(tmp_path, {"version": 1}, overwrite=overwrite)
    (tmp_path / ".lock").unlink(missing_ok=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_an_index_may_be_there_before_and_notes_be_put_beside_results(tmp_path):
    (tmp_path / "out" / "index").mkdir(parents=True)
    ResultLog(tmp_path / "out", {"version": 1}).close()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    ResultLog(tmp_path / "out", {"version": 1}).close()
    with pytest.raises(ValueError, match="in the input"):
        ResultLog(tmp_path / "out", {"version": 1}, overwrite=True, sources=[tmp_path / "out"])


def test_other_settings_are_named_in_short(tmp_path):
    settings = {f"option{number}": "x" * 1000 for number in range(20)}
    log = ResultLog(tmp_path, {**settings, "same": 1})
    log.append({"id": "q1"})
    log.close()
    with pytest.raises(ValueError, match=r"and is None; and 17 more\.") as caught:
        ResultLog(tmp_path, {"same": 1})
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("then", "now", "content", "changed"),
    [
        ({"model": "runs/a"}, {"model": "/b"}, {"weights": "f"}, []),
        ({"model": "runs/a", "weights": "f"}, {"model": "/b", "weights": "g"}, {}, ["model", "weights"]),
        ({"model": "a/b"}, {"model": "a/c"}, {"weights": ""}, ["model"]),
        ({"model.spec": "a"}, {"model.spec": "a/"}, {"model.weights": "f"}, []),
        ({"teacher": "hf:a"}, {"teacher": "hf:./a"}, {"teacher_weights": "f"}, []),
        ({"teacher": "hf:a"}, {"teacher": 'hf:a {"x":1}'}, {"teacher_weights": "f"}, ["teacher"]),
        ({"llm.a.model": "hf:a"}, {"llm.a.model": "hf:b"}, {"llm.a.model_weights": "f"}, []),
        ({"model": f"local:a {'0' * 16}"}, {"model": f"local:b {'0' * 16}"}, {}, []),
        ({"model": f"local:a {'0' * 16}"}, {"model": f"local:a {'1' * 16}"}, {}, ["model"]),
        ({"triples.extractor": "a"}, {"triples.extractor": "b"}, {"triples.weights": "f"}, []),
        ({"triples.dtype": "a"}, {"triples.dtype": "b"}, {"triples.weights": "f"}, ["triples.dtype"]),
        ({"encoder": "a"}, {"encoder": "b"}, {"encoder_weights": "f"}, []),
        ({"teacher": "oracle:w/test"}, {"teacher": "oracle:./w/test/"}, {}, []),
        ({"teacher": "oracle:w/test"}, {"teacher": "oracle:w/train"}, {}, ["teacher"]),
        ({"options.prompts": "a"}, {"options.prompts": "b"}, {"files.p": "1"}, []),
        ({"options.prompts": "a", "files.p": "1"}, {"options.prompts": "a", "files.p": "2"}, {}, ["files.p"]),
        ({"options.prompts": "a"}, {"options.prompts": "b"}, {}, ["options.prompts"]),
        ({}, {"overrides.evidence": "text, trained with triples"}, {"options.evidence": "text"}, []),
    ],
)
def test_names_of_known_contents_may_change(then, now, content, changed):
    assert changed_settings(then | content, now | content) == changed


def test_overwritten_results_are_there_until_there_are_new_ones(tmp_path):
    run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    ResultLog(tmp_path, {"version": 2}, overwrite=True).close()  # as when a model can't be loaded
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    killed = ResultLog(tmp_path, {"version": 2}, overwrite=True)
    with pytest.raises(ValueError, match="another process writes into"):
        ResultLog(tmp_path, {"version": 2})
    killed._lock.close()
    with pytest.raises(ValueError, match=r"version was 1 and is 2"):
        ResultLog(tmp_path, {"version": 2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    killed.close()
    log = ResultLog(tmp_path, {"version": 2}, overwrite=True)
    log.append({"id": "q1"})
    # At once, so that a kill loses nothing.
    assert [row["id"] for row in read_lines(tmp_path / "results.jsonl")] == ["q1"]
    log.close()
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {".lock", "results.jsonl", "run.json", "settings.json"}


def test_settings_of_a_call_without_any_answer_bind_nobody(tmp_path):
    ResultLog(tmp_path, {"dtype": "float23"}).close()
    ResultLog(tmp_path, {"dtype": "float32"}).close()
    assert json.loads((tmp_path / "settings.json").read_text()) == {"dtype": "float32"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("results.jsonl", '{"id": "q1", "scores": {"f1": NaN}}\n', r"results\.jsonl:1: not valid JSON \(NaN"),
        ("results.jsonl", '{"id": 7}\n', r"results\.jsonl:1: id must be text, found 7"),
        (
            "results.jsonl",
            '{"id": "q1", "scores": {"f1": true}}\n',
            r"scores\.f1 must be a finite number, found true",
        ),
        ("results.jsonl", '{"id": "q1"}\n{oops\n{"id": "q2"}\n', r"results\.jsonl:2: not valid JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    ResultLog(tmp_path, {"version": 1}).close()
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        ResultLog(tmp_path, {"version": 1})


def test_failed_metric_fails_the_run(tmp_path):
    broken = [Question("q0", "What is 0?", ("",), (), (), "", "toy")]
    with pytest.raises(ValueError, match="needs a gold answer that is not blank"):
        run(tmp_path, questions=broken)


SUITE = '''
"""Whether a number is even."""
from dataclasses import dataclass
from tripletune.eval.suites import Failure, Suite, SuiteMetrics, SuiteRow
from tripletune.eval.statistics import bootstrap_mean

@dataclass
class Number:
    id: str

@dataclass
class EvenRow(SuiteRow):
    id: str
    error: str
    scores: dict

@dataclass(kw_only=True)
class EvenMetrics(SuiteMetrics):
    even: dict

class Even(Suite):
    unit = "number"
    def items(self):
        return map(Number, open(self.options.data).read().split())
    def settings(self):
        return {}
    async def ask(self, batch):
        return [int(one.id) % 2 == 0 for one in batch]
    def score(self, item, reply):
        failed = isinstance(reply, Failure)
        return EvenRow(item.id, reply.error if failed else "", {"even": float(reply is True)})
    def summarise(self, log):
        return EvenMetrics(even=bootstrap_mean([row["scores"]["even"] for row in log.rows()]))
    def show(self, metrics, console):
        console.print(f"even: {metrics.even['mean']}")

SUITE = Even
'''


def test_a_new_suite_is_one_file(tmp_path, monkeypatch, capsys):
    from tripletune.eval import suites

    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "even.py").write_text(SUITE)
    (tmp_path / "numbers").write_text("1 2 x 4")
    monkeypatch.setattr(suites, "__path__", [*suites.__path__, str(tmp_path / "suites")])
    call = ["even", "--data", str(tmp_path / "numbers"), "--output", str(tmp_path / "out")]
    assert main(call) == 4
    assert "even: 0.5" in capsys.readouterr().out
    assert [bool(row["error"]) for row in read_lines(tmp_path / "out" / "results.jsonl")] == [False, False, True, False]
    assert main([*call, "--limit", "0"]) == 2


def test_other_processes_of_a_launcher_are_no_other_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    gather = lambda value=None: [set() if value is None else value]  # noqa: E731
    with watch_for_other_evaluations() as alone:
        second = SimpleNamespace(process=1, processes=2, is_first=False, is_shared=True, gather=gather)
        monkeypatch.setattr("tripletune.eval.running.Launched", lambda: second)
        assert run_suites([Toy(tmp_path / "run", Model(), QUESTIONS)]) == 0
        assert len(list((tmp_path / "run").glob("results.*.jsonl"))) == 1
        assert alone()
