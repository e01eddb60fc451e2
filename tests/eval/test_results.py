"""What output folders hold: each type writes what it reads, and a folder of revision b3f73d5 still opens."""

import argparse
import io
import json
import os
import re
import shutil
import signal

import pytest
from rich.console import Console

from tests.cli import read_lines, write_lines
from tests.test_goldens import STORES
from tripletune.eval import Task
from tripletune.eval import __main__ as program
from tripletune.eval.__main__ import main
from tripletune.eval.report.compare import compare
from tripletune.eval.report.figures import figures_of
from tripletune.eval.report.runs import read_run
from tripletune.eval.result_log import _change
from tripletune.eval.results import (
    AddedScores,
    ChatModel,
    LocalModel,
    RunAbout,
    RunMetrics,
    RunSettings,
    SamplingSettings,
    Session,
    read_rows_with_added_scores,
    read_run_files,
)
from tripletune.eval.running import run_suites
from tripletune.eval.suites._run_tables import show_run, show_runs
from tripletune.eval.suites.questions import suites_of
from tripletune.eval.systems import QuestionOptions
from tripletune.rag.results import ResultRow, kept_facts

OLD = STORES / "run"
STUDENT = LocalModel("runs/student", "w", "float32")
SETTINGS = RunSettings(
    system="cirag",
    task=Task("hotpotqa", "hotpotqa", ("f1",)),
    data="d",
    dtype="float32",
    model=LocalModel("runs/a", "w"),
    student_seed=0,
    sampling=SamplingSettings(0.0, 1.0, 7),
    teacher=ChatModel("hf:m", "v"),
    llm={"cirag.answer": ChatModel("openai:n")},
    integrator=STUDENT,
    files={"p": "digest"},
    gold="g",
    triples={"extractor": "runs/extractor"},
    options={"top_k": 5},
)


@pytest.fixture
def old(tmp_path):
    """The old folder; its files are not changed."""
    return shutil.copytree(OLD, tmp_path / "old")


def stored(value):
    """A value as its file holds it."""
    return json.loads(json.dumps(value))


def test_settings_are_read_as_they_were_written():
    values = stored(SETTINGS.to_json())
    assert RunSettings.from_json(values) == SETTINGS
    assert SETTINGS.reads_passages
    assert list(values)[:5] == ["system", "task", "data", "limit", "dtype"]
    assert values["corpus"] is values["limit"] is None
    assert "planner" not in values
    assert (values["teacher"], values["teacher_weights"]) == ("hf:m", "v")
    assert values["model"] == {"spec": "runs/a", "weights": "w"}
    another = {"data": ["x"], "model": "runs/a", "weights": "w", "limit": None}
    assert RunSettings.from_json(another).to_json() == another
    assert stored(RunSettings.from_json(values | {"tomorrow": 1}).to_json())["tomorrow"] == 1


def test_facts_metrics_and_added_scores_are_read_as_they_were_written():
    about = RunAbout(command=["a", "b"], questions=3, sessions=[Session("2026", alone=False, embedded=4)])
    assert RunAbout.from_json(stored(about.to_json())) == about
    assert about.to_json()["sessions"] == [{"began": "2026", "alone": False, "embedded": 4}]
    metrics = RunMetrics(system="ras", task="t", primary="f1", questions=3, cost={"calls": 2})
    assert RunMetrics.from_json(stored(metrics.to_json())) == metrics
    added = AddedScores("q", {"f1": 1.0}, {"recall@5": "digest"})
    assert AddedScores.from_json(stored(added.to_json())) == added


def test_an_old_folder_is_read_as_it_stands(old):
    files = read_run_files(old)
    settings = json.loads((OLD / "settings.json").read_text())
    # A field of tasks that is younger than the folder has its default.
    assert stored(files.settings.to_json()) == settings | {"task": settings["task"] | {"answer": "short"}}
    assert (files.about.questions, files.about.sessions, files.gold) == (3, [], "")
    metrics = RunMetrics.from_json(files.metrics)
    assert (metrics.system, metrics.questions, metrics.counts.errors) == ("cirag", 3, 0)
    assert metrics.session.items == 3
    for values, row in zip(read_lines(OLD / "results.jsonl"), read_rows_with_added_scores(old), strict=True):
        # What the file does not note is not written either.
        assert row.to_json() == {**row.to_json(), **values}
        assert ResultRow.from_json(row.to_json()) == row
        assert "shown" in row.trace.not_noted
        assert kept_facts(row).number > 0


def test_an_old_folder_is_scored_compared_and_reported(old, tmp_path, capsys):
    figures = figures_of(read_run(str(old)))
    assert figures.latency.unknown.startswith("it is not known whether another evaluation")
    assert figures.scores["f1"]["n"] == 3
    assert {name.split("@")[0] for name in figures.recall} == {"first", "retrieved"}, "the shown are not known"
    assert main(["score", str(old), "--metrics", "mrr"]) == 0
    other = shutil.copytree(old, tmp_path / "other")
    assert main(["compare", str(old), str(other), "--metric", "mrr"]) == 0
    assert "no difference shown" in capsys.readouterr().out
    assert main(["report", str(old), str(other), "--output", str(tmp_path / "report")]) == 0
    (group,) = json.loads((tmp_path / "report" / "report.json").read_text())["groups"]
    assert group["metrics"] == ["f1_hotpotqa", "exact_match", "f1", "mrr"]


def test_equal_recalls_share_a_row_of_the_printed_table():
    same, more = {"mean": 0.5, "low": 0.25, "high": 1.0}, {"mean": 0.75, "low": 0.5, "high": 1.0}
    recall = {"first@2": same, "first@5": same, "first@15": same, "retrieved@2": same, "retrieved@5": more}
    metrics = RunMetrics(system="ras", task="t", primary="f1", questions=3, recall=recall)
    console = Console(width=200, record=True, file=io.StringIO())
    show_run(metrics, {}, console, with_oracle=False)
    rows = [line.split("│")[1:3] for line in console.export_text().splitlines() if "recall of" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["first@2,5,15", "50.0"], ["retrieved@2", "50.0"], ["retrieved@5", "75.0"],
    ]  # fmt: skip


def test_the_table_of_several_systems_has_dollars_where_a_price_is_known():
    costs = {"calls": 2, "prompt_tokens": 100, "completion_tokens": 5}
    free = RunMetrics(system="ras", task="t", primary="", questions=3, cost_per_question=costs)
    indexing = {**costs, "calls": 7, "dollars": 0.25}
    paid = RunMetrics(
        system="thrag", task="t", primary="", questions=3, indexing=indexing,
        cost_per_question={**costs, "dollars": 0.0125},
    )  # fmt: skip
    console = Console(width=200, record=True, file=io.StringIO())
    show_runs([free, paid], console, with_oracle=False)
    shown = console.export_text()
    cells = [line.split("│")[5].strip() for line in shown.splitlines() if line.startswith("│")]
    assert cells == ["-", "0.0125"]
    assert "Calls, tokens and dollars are per question." in shown
    assert "thrag, indexing: 7 calls, 100 tokens read, 5 written, $0.25" in shown


class _ClosedPipe(Console):
    """A console whose reader, such as `head`, has closed the pipe."""

    def print(self, *texts):
        raise BrokenPipeError


def test_files_are_written_before_the_output(tmp_path):
    data = write_lines(tmp_path / "qa.jsonl", [{"id": "a", "question": "Which river?", "answers": ["Rhine"]}])
    answers = write_lines(tmp_path / "answers.jsonl", [{"id": "a", "answer": "Rhine"}])
    values = {"system": "answers", "answers": str(answers), "task": "qa", "data": str(data)}
    folder = tmp_path / "out"
    options = QuestionOptions.of(**values, output=str(folder))
    with pytest.raises(BrokenPipeError):
        run_suites(suites_of(options), _ClosedPipe())
    assert (folder / "metrics.json").is_file()
    (session,) = json.loads((folder / "run.json").read_text())["sessions"]
    assert session["alone"] is not None
    compared = argparse.Namespace(
        folders=[str(folder), str(folder)],
        metric=None,
        across=None,
        baseline=None,
        output=str(tmp_path / "compared.json"),
    )
    with pytest.raises(BrokenPipeError):
        compare(compared, _ClosedPipe())
    assert json.loads((tmp_path / "compared.json").read_text())["items"] == 1


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch, capsys):
    def stopped(args, words):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(program, "_run_command", stopped)
    assert main(["report", "folder"]) == 130
    assert "stopped; run the same command again to continue" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_changed_setting_is_named_with_whole_quotes():
    before = {"files.old": "a1", "files.both": "b1", "model": "m" * 100}
    now = {"files.new": "c1", "files.both": "b2", "model": "n" * 100}
    assert _change("files.new", before, now) == "files.new was not read then"
    assert _change("files.old", before, now) == "files.old is no longer read"
    assert _change("files.both", before, now) == "files.both has changed"
    assert re.fullmatch(r"model was 'm+\.\.\.m+' and is 'n+\.\.\.n+'", _change("model", before, now))
