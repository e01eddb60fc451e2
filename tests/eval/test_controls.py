"""Controls of scores on records: each takes away what it says, and nothing else."""

import json
import types
from dataclasses import replace

import pytest

from tests.cli import write_lines
from tripletune.core.calls import Completion
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.rendering import render
from tripletune.core.data.triples import Triple
from tripletune.eval.__main__ import main
from tripletune.eval.controls import Controls, OtherFacts, Rule, compare_controls, control_table


def of(number, steps=2):
    """A question's records: it stops after its steps, and the last object is its answer."""
    question, name = f"Where is {number}?", f"q{number}"
    history = tuple(Step(f"{name} ask {n}?", (Triple(name, "is in", f"town {number}.{n}"),)) for n in range(steps))
    plans = [
        Record(f"{name}:{n}", name, "planning", question, Action.SUBQ, history[:n], step.query if n else question)
        for n, step in enumerate(history)
    ]
    answers = (f"town {number}.{steps - 1}",)
    return [
        *plans,
        Record(f"{name}:{steps}", name, "planning", question, Action.SUFFICIENT, history),
        Record(f"{name}:a", name, "answering", question, Action.SUFFICIENT, history, answers=answers),
    ]


RECORDS = [record for number in range(6) for record in of(number)]


def pool_of(records, seed=0):
    return OtherFacts(((record.question_id, record.steps) for record in records), seed)


class Reader:
    """Stops after two steps, answers the last object it reads; says "blind" without a graph token."""

    def __init__(self, use_graph=True):
        self.use_graph, self.calls = use_graph, 0
        self.processor = types.SimpleNamespace(
            settings=types.SimpleNamespace(use_graph=use_graph),
            without_graph=lambda: types.SimpleNamespace(settings=types.SimpleNamespace(use_graph=False)),
        )

    def generate_many(self, samples, max_new_tokens, evidence=None):
        self.calls += 1
        return [Completion(self.reply(sample)) for sample in samples]

    def reply(self, sample):
        if not self.processor.settings.use_graph and self.use_graph:
            return "blind"
        if sample.task == "planning":
            return "[SUFFICIENT]" if len(sample.steps) == 2 else f"[SUBQ] {sample.question}"
        return next((triple.object for step in sample.steps[::-1] for triple in step.triples[::-1]), "nothing")


def test_the_rule_counts_steps_and_repeats_the_question():
    yes = [replace(of(number)[-1], answers=("yes",)) for number in (3, 4)]
    plans = [*of(0), *of(1), *of(2, steps=3), *yes]
    rule = Rule(iter(plans))
    assert [rule.reply(record) for record in of(9, steps=3)] == [
        "[SUBQ] Where is 9?", "[SUBQ] Where is 9?", "[SUFFICIENT]", "[SUFFICIENT]", "yes",
    ]  # fmt: skip
    assert rule.reply(of(9, steps=6)[-2]) == "[SUFFICIENT]", "six steps count as three, the nearest known number"
    assert [Rule([]).reply(record) for record in of(1, steps=1)] == ["", "", ""]


def test_facts_of_another_question_are_the_same_in_every_run():
    longest = of(0)[-1]
    found = pool_of(RECORDS).exchanged("q0", longest.steps)
    assert [step.query for step in found] == ["q0 ask 0?", "q0 ask 1?"]
    (donor,) = {triple.subject for step in found for triple in step.triples}
    assert donor != "q0"
    assert pool_of(RECORDS).exchanged("q0", longest.steps) == found
    chosen = {pool_of(RECORDS, seed).exchanged("q0", longest.steps)[0].triples for seed in range(30)}
    assert len(chosen) == 5, "every other question is chosen by some seed"


def test_a_question_with_as_many_steps_is_preferred_and_a_shorter_one_repeated():
    long = of(7, steps=3)[-1]
    pool = pool_of([*RECORDS, *of(7, steps=3), *of(8, steps=3)])
    assert {triple.subject for step in pool.exchanged("q7", long.steps) for triple in step.triples} == {"q8"}
    repeated = pool_of([*RECORDS, long]).exchanged("q7", long.steps)
    assert repeated[0].triples == repeated[2].triples != repeated[1].triples
    with pytest.raises(ValueError, match="fewer than two questions have a history"):
        pool_of(of(0))


def test_each_control_takes_away_what_it_says():
    model = Reader()
    asked = []
    model.reply = lambda sample: asked.append(sample) or "x"
    record = of(0)[-1]
    pool = pool_of(RECORDS)
    others = pool.exchanged("q0", record.steps)
    (replies,) = Controls(model, pool).ask([record], 5, None)
    assert list(replies) == ["model", "no_facts", "other_facts", "no_graph", "other_graph"]
    full, bare, changed, graph, blind = asked
    assert full == blind == record.input
    assert graph == replace(record.input, graph_of=others), "the text is the record's own"
    assert [line for line in render(bare).splitlines() if "town" in line] == []
    assert changed.steps == others
    assert [step.query for step in bare.steps] == [step.query for step in record.steps]
    first = of(0)[0]
    (replies,) = Controls(model, pool).ask([first], 5, None)
    assert len(asked) == 5 + 2, "without history only the graph token can be taken away"
    assert replies["other_facts"] is replies["model"]


def test_differences_are_control_minus_model_and_paired():
    def row(question, history, full, control):
        scores = {"action_accuracy": full, "malformed": 0.0}
        other = {"no_facts": {"scores": {"action_accuracy": control, "malformed": 1.0}}}
        return {"question_id": question, "task": "planning", "history": history, "scores": scores, "controls": other}

    rows = [row("a", 0, 1.0, 1.0), row("a", 1, 1.0, 0.0), row("b", 0, 1.0, 1.0), row("b", 1, 0.0, 0.0)]
    found = compare_controls(rows)
    assert list(found) == ["model", "no_facts"]
    assert list(found["no_facts"]) == ["action_accuracy", "action_accuracy_with_history"]
    gap = found["no_facts"]["action_accuracy"]["difference"]
    assert (gap["mean"], gap["low"], gap["high"], gap["n"]) == (-0.25, -0.5, 0.0, 2)
    assert (gap["p_value"], gap["p_holm"]) == (pytest.approx(1.0), pytest.approx(1.0)), "one of two questions differs"
    assert found["no_facts"]["action_accuracy_with_history"]["score"]["mean"] == 0.0
    assert found["model"]["action_accuracy"]["score"]["mean"] == 0.75
    heads, table = control_table(found)
    assert heads == ["what is read", "action_accuracy", "minus model"]
    assert table == [
        ["the model, reading everything", "75.0", ""],
        ["no facts", "50.0", "-25.0 (-50.0 to +0.0), p 1.000: no difference shown"],
    ]


def test_few_questions_show_the_p_value_by_which_nothing_is_shown():
    rows = []
    for number in range(5):
        scores = {"scores": {"action_accuracy": float(number == 0)}}
        row = {"question_id": str(number), "task": "planning", "history": 0, "controls": {"no_facts": scores}}
        rows.append({**row, "scores": {"action_accuracy": 1.0}})
    cell = control_table(compare_controls(rows)).rows[1][2]
    assert cell == "-80.0 (-100.0 to -40.0), p 0.125: no difference shown"


@pytest.fixture
def data(tmp_path):
    """A data set whose training questions have two steps, and one of its validation questions three."""
    train = [record for number in range(10, 14) for record in of(number)]
    for split, rows in (("train", train), ("validation", [*RECORDS, *of(6, steps=3)])):
        write_lines(tmp_path / "subq" / f"{split}-00000.jsonl", [one.to_json() for one in rows])
    return tmp_path / "subq"


@pytest.fixture
def call(data, tmp_path):
    """Runs the command and gives its exit code."""
    model, output = tmp_path / "model", tmp_path / "out"
    given = ["records", "--model", str(model), "--output", str(output), "--controls"]
    return lambda *more, file=data: main([*given, "--data", str(file), *more])


def test_the_command_scores_controls_beside_the_model(serve, call, tmp_path, capsys):
    serve(Reader())
    assert call() == 0
    printed = capsys.readouterr().out
    assert "the same records without reading" in printed
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    controls = found["controls"]
    assert list(controls) == ["model", "rule", "no_facts", "other_facts", "no_graph", "other_graph"]
    means = {name: one["exact_match"]["score"]["mean"] for name, one in controls.items()}
    assert [name for name, mean in means.items() if mean] == ["model", "other_graph"]
    gaps = {name: one["action_accuracy"]["difference"]["mean"] for name, one in controls.items()}
    assert (gaps["no_facts"], gaps["other_facts"], gaps["other_graph"]) == (0.0, 0.0, 0.0), "this model only counts"
    assert gaps["rule"] == pytest.approx(1 / 22), "the rule stops after three steps too"
    assert controls["model"]["action_accuracy"]["score"] == found["planning"]["action_accuracy"]
    assert main(["report", str(tmp_path / "out"), "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| no facts | " in page
    assert "-100.0 (-100.0 to " in page
    assert "controls/" not in page


def test_a_model_without_graph_has_no_controls_of_it(serve, call, tmp_path):
    serve(Reader(use_graph=False))
    assert call() == 0
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert list(found["controls"]) == ["model", "rule", "no_facts", "other_facts"]


def test_the_rule_needs_training_records(serve, call, data, tmp_path, error_of):
    serve(Reader())
    (data / "train-00000.jsonl").rename(tmp_path / "elsewhere.jsonl")
    assert call() == 2
    assert "name the data set of the model's training with --training-data" in error_of()
    assert call(file=data / "validation-00000.jsonl") == 2
    assert "is one shard" in error_of()
    assert call("--training-data", str(tmp_path / "elsewhere.jsonl")) == 0
    assert call("--training-data", str(tmp_path / "elsewhere.jsonl"), "--seed", "1") == 2
    assert "results of another run: controls was" in error_of()


def test_a_failed_record_scores_0_in_every_row(serve, call, tmp_path):
    model = serve(Reader())
    reply = model.reply

    def fail(sample):
        if sample.question == "Where is 3?":
            raise RuntimeError("no")
        return reply(sample)

    model.reply = fail
    assert call() == 4
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())["controls"]
    assert found["model"]["exact_match"]["score"]["mean"] == pytest.approx(6 / 7)
    assert found["other_graph"]["exact_match"]["difference"]["mean"] == 0.0
    assert found["rule"]["action_accuracy"]["difference"]["mean"] > 0


def test_a_real_model_reads_the_graph_it_is_given(make_graph_llm, monkeypatch):
    from tripletune.llm.graph_generator import LocalGenerator

    generator, read = LocalGenerator(*make_graph_llm()), []
    graphs_of = generator._graph_arguments

    def spied(graphs):
        read.extend(graph.nodes for graph in graphs)
        return graphs_of(graphs)

    monkeypatch.setattr(generator, "_graph_arguments", spied)
    record = of(0)[-1]
    (replies,) = Controls(generator, pool_of(RECORDS)).ask([record], 4, None)
    own, changed, other = filter(None, read)
    assert own == ["q0", "town 0.0", "q0", "town 0.1"]
    assert changed == other
    assert other[0] != "q0"
    assert replies["no_graph"].prompt_tokens == replies["model"].prompt_tokens - 1
