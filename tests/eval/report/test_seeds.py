"""Runs that differ in a seed alone are one row, over seeds and questions."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from tests.cli import write_lines
from tripletune.eval.__main__ import main
from tripletune.eval.report.contents import _have_trainings
from tripletune.eval.report.groups import group_runs
from tripletune.eval.report.runs import Run
from tripletune.eval.report.seeds import seed_rows
from tripletune.eval.results import RunAbout, RunSettings
from tripletune.models.run_folders import Training, training_of


def run(folder, right, config="", seed=0, model="", **options):
    """A run on four questions, of which `right` (such as "1100") says which it answered."""
    settings = {
        "system": "ras", "task": {"name": "t", "metrics": ["exact_match"]}, "data": "d", "options": options,
        "model": {"spec": model or folder, "weights": f"w-{model or folder}"},
    }  # fmt: skip
    about = RunAbout(questions=4, trainings={"model": Training(config, seed)} if config else {})
    table = {"id": [f"q{n}" for n in range(4)], "exact_match": list(map(float, right)), "hops": None}
    return Run(folder, folder, RunSettings.from_json(settings), about, {}, rows=pd.DataFrame(table))


def rows_of(*runs, across=("model",)):
    (group,) = group_runs(runs, across)
    return seed_rows(group)


def test_seeds_of_one_training_are_one_row_and_other_trainings_another():
    rows = rows_of(
        run("a1", "1100", "adaptive", 1), run("f1", "1110", "fixed", 1),
        run("a2", "1000", "adaptive", 2), run("f2", "1111", "fixed", 2), run("a3", "0000", "adaptive", 3),
    )  # fmt: skip
    assert [(row.name, row.runs, row.seeds) for row in rows] == [
        ("a1", ["a1", "a2", "a3"], [1, 2, 3]), ("f1", ["f1", "f2"], [1, 2]),
    ]  # fmt: skip
    adaptive, fixed = rows
    # (2 + 1 + 0) of 12 and (3 + 4) of 8 answers.
    assert adaptive.scores["exact_match"]["mean"] == pytest.approx(0.25)
    assert adaptive.of_seeds["exact_match"] == [0.5, 0.25, 0.0]
    assert fixed.scores["exact_match"]["mean"] == pytest.approx(0.875)
    assert adaptive.differences["exact_match"] is None
    assert fixed.differences["exact_match"]["mean"] == pytest.approx(0.625)
    assert fixed.differences["exact_match"]["test"] == "two-level bootstrap"
    assert "verdict" in fixed.differences["exact_match"]


def test_one_training_run_in_two_ways_is_paired_by_model():
    # Both models answer the second question only with two passages. The runs with two come in the other order.
    _, with_two = rows_of(
        run("a1", "1000", "c", 1, top_k=1), run("a2", "1010", "c", 2, top_k=1),
        run("b2", "1110", "c", 2, model="a2", top_k=2), run("b1", "1100", "c", 1, model="a1", top_k=2),
        across=("model", "top_k"),
    )  # fmt: skip
    difference = with_two.differences["exact_match"]
    # The second of four questions is drawn 0 to 4 times, and at most 3 times in 97.5 % of the samples.
    assert (difference["low"], difference["mean"], difference["high"]) == pytest.approx((0, 0.25, 0.75))


def test_only_the_seed_may_differ():
    other_option = run("b", "1111", "adaptive", 2, top_k=9)
    again = run("c", "1111", "adaptive", 1)
    unknown = run("d", "1111")
    first = run("a", "1100", "adaptive", 1)
    for other in (other_option, again, unknown):
        assert rows_of(first, other, across=("model", "top_k")) == [], "as before, each is a run of its own"


def drawn(folder, right, seed, system="ircot", temperature=0.7, **settings):
    """A run of a chat model, whose replies are drawn with a seed."""
    values = {
        "system": system, "task": {"name": "t", "metrics": ["exact_match"]}, "data": "d", "options": {},
        "teacher": "openai:m", "sampling": [temperature, 1.0, seed], **settings,
    }  # fmt: skip
    table = {"id": [f"q{n}" for n in range(4)], "exact_match": list(map(float, right)), "hops": None}
    return Run(folder, "", RunSettings.from_json(values), RunAbout(questions=4), {}, rows=pd.DataFrame(table))


def test_seeds_of_replies_are_one_row_too():
    ircot, standard = rows_of(
        drawn("i1", "1100", 1), drawn("s1", "1111", 1, "standard"), drawn("i2", "1000", 2),
        drawn("s2", "1110", 2, "standard"), drawn("i3", "0000", 3),
    )  # fmt: skip
    assert ircot.runs == ["ircot", "ircot, sampling.seed=2", "ircot, sampling.seed=3"]
    assert (ircot.seeds, standard.seeds) == ([1, 2, 3], [1, 2])
    # (2 + 1 + 0) of 12 and (4 + 3) of 8 answers.
    assert ircot.scores["exact_match"]["mean"] == pytest.approx(0.25)
    assert standard.differences["exact_match"]["mean"] == pytest.approx(0.625)
    assert standard.differences["exact_match"]["test"] == "two-level bootstrap"


def test_only_the_seed_of_replies_may_differ():
    first = drawn("a", "1100", 1)
    others = {
        "the same seed": drawn("b", "1111", 1),
        "no seed, so maybe a copy": drawn("b", "1111", None),
        "nothing is drawn": drawn("b", "1111", 2, temperature=0.0),
        "another option": drawn("b", "1111", 2, options={"candidates": 9}),
        "another model": drawn("b", "1111", 2, teacher="openai:n"),
    }
    for why, other in others.items():
        assert rows_of(first, other, across=("model", "sampling")) == [], why


def test_seeds_of_trainings_and_of_replies_are_not_mixed():
    def twice(folder, training_seed, seed):
        one = run(folder, "1100", "c", training_seed, model=f"m{training_seed}")
        return replace(one, settings=replace(one.settings, student_seed=seed))

    rows = rows_of(twice("a", 1, 1), twice("b", 1, 2), twice("c", 2, 1))
    assert [row.runs for row in rows] == [["a", "b"], ["c"]]
    assert rows[0].seeds == [1, 2], "of the replies, since the training is one"
    # Replies of one training say nothing about another training.
    groups = group_runs([twice("a", 1, 1), twice("b", 1, 2)], ("model",))
    assert not _have_trainings(seed_rows(groups[0]), groups[0])


def test_seeds_need_no_permission_to_differ_in_their_weights():
    (row,) = rows_of(run("a", "1100", "adaptive", 1), run("b", "1000", "adaptive", 2), across=())
    assert row.scores["exact_match"]["mean"] == pytest.approx(0.375)


def test_only_questions_that_all_runs_have_are_compared():
    part = run("b", "1111", "adaptive", 2)
    part.rows.drop(index=[0, 1], inplace=True)
    (row,) = rows_of(run("a", "1100", "adaptive", 1), part)
    assert row.of_seeds["exact_match"] == [0.0, 1.0]


def test_how_a_model_was_trained_is_read_from_its_run(tmp_path):
    def folder(name, seed, rate, model="final"):
        home = tmp_path / name
        (home / model).mkdir(parents=True)
        (home / model / "config.json").write_text("{}")
        (home / "config.yaml").write_text(f"seed: {seed}\noutput_dir: {home}\ntrain: {{rate: {rate}}}\n")
        return home

    first = training_of(folder("a", 1, 0.1))
    assert first == training_of(tmp_path / "a" / "final")
    assert (first.seed, first.config) == (1, training_of(folder("b", 2, 0.1)).config)
    assert first.config != training_of(folder("c", 1, 0.2)).config
    checkpoint = training_of(folder("d", 1, 0.1, "checkpoint-5") / "checkpoint-5")
    assert first.config != checkpoint.config, "another step has other weights"
    assert training_of(tmp_path / "nowhere") is None
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    assert training_of(tmp_path / "export") is None


def test_a_report_has_the_row(tmp_path, capsys):
    for name, right, seed in (("s1", (1, 1, 0), 1), ("s2", (1, 0, 0), 2)):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"system": "ras", "task": {"name": "t", "metrics": ["exact_match"]}, "data": "d", "options": {}}
        settings["model"] = {"spec": name, "weights": name}
        about = {"questions": 3, "trainings": {"model": {"config": "c", "seed": seed}}}
        (folder / "settings.json").write_text(json.dumps(settings))
        (folder / "run.json").write_text(json.dumps(about))
        (folder / "metrics.json").write_text('{"session": {}}')
        rows = []
        for number, score in enumerate(right):
            trace = {"steps": [], "actions": [], "stop_reason": "", "malformed": 0, "unexpected": 0, "calls": 1,
                     "question": "Q", "prompt_tokens": 1, "completion_tokens": 1, "seconds": 1.0, "tallies": {},
                     "details": {}}  # fmt: skip
            rows.append({"id": f"q{number}", "question": "Q", "prediction": "x", "error": "", "type": "",
                         "answers": ["x"], "scores": {"exact_match": float(score)}, "trace": trace})  # fmt: skip
        write_lines(folder / "results.jsonl", rows)
    assert main(["report", str(tmp_path / "s1"), str(tmp_path / "s2"), "--output", str(tmp_path / "page")]) == 0
    tables = (tmp_path / "page" / "report.md").read_text()
    assert "Seeds together" in tables
    assert "| 1, 2 | 50.0 (" in tables
    assert "66.7, 33.3" in tables
    assert "one set of trained weights" not in capsys.readouterr().err
    assert main(["report", f"x={tmp_path}/s1,{tmp_path}/s2", "--output", str(tmp_path / "page")]) == 2
    assert "name each folder as an argument of its own" in capsys.readouterr().err
