"""A Graph-LLM's loop reads the prompts of its training; an option that differs is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli import read_lines, write_lines
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple
from tripletune.core.files import read_json, write_json
from tripletune.eval.__main__ import main as evaluate
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.rag.ask import ask_question
from tripletune.rag.graph_models import folder_or_base_model
from tripletune.rag.system_options import SystemOptions
from tripletune.rag.systems import LoopOptions, find_system
from tripletune.rag.trained import (
    _is_unlike_training,
    loop_options,
    options_of_training,
    overridden_options,
    warn_of_overrides,
)
from tripletune.serve.models import open_shelf
from tripletune.train import train
from tripletune.train.tasks.ras import GraphTask

QUESTION = "Who wrote Glass Harbour?"
PASSAGE = {"id": "p1", "title": "Glass Harbour", "text": "A novel by Ida Morn."}
TEXT = {"data.evidence": "text", "model.use_graph": False, "train.epochs": 1}


def rows_of(query, text, triples=()):
    step = Step(query, triples, text)
    plan = Record("p0", "q", "planning", QUESTION, Action.SUBQ, (), query)
    enough = Record("p1", "q", "planning", QUESTION, Action.SUFFICIENT, (step,))
    answer = Record("a", "q", "answering", QUESTION, Action.SUFFICIENT, (step,), answers=("Ida Morn",))
    return [plan, enough, answer]


@pytest.fixture
def trained(make_config, tmp_path, write_records):
    """Trains on the records of one question, and returns the run's folder."""

    def run(records, settings):
        folder = write_records(records, folder=tmp_path / "own")
        train(GraphTask(make_config({"data.train": str(folder)} | settings)))
        return tmp_path / "run" / "final"

    return run


@pytest.fixture
def prompts(monkeypatch):
    """The tokens of all prompts that a processor encodes."""
    seen = []
    encode = GraphLLMProcessor.encode_input

    def note(self, *args, **options):
        encoded = encode(self, *args, **options)
        seen.append(bytes(str(encoded.input_ids), "ascii"))
        return encoded

    monkeypatch.setattr(GraphLLMProcessor, "encode_input", note)
    return seen


def test_a_text_trained_model_reads_the_prompts_of_training_without_any_option(trained, prompts, tmp_path, capsys):
    content = Passage(**PASSAGE).content
    model = trained(rows_of(QUESTION, content, (Triple("Glass Harbour", "author", "Ida Morn"),)), TEXT)
    of_training = set(prompts)
    assert len(of_training) == 3
    write_lines(tmp_path / "corpus.jsonl", [PASSAGE])
    write_lines(tmp_path / "q.jsonl", [{"id": "q", "question": QUESTION, "answers": ["Ida Morn"]}])
    given = ["--model", str(model), "--corpus", str(tmp_path / "corpus.jsonl")]

    def run_evaluation():
        task = ["--system", "ras", "--task", "qa", "--data", str(tmp_path / "q.jsonl")]
        assert evaluate(["run", *task, *given, "--output", str(tmp_path / "out")]) == 0

    def run_ask():
        ask_question(QUESTION, SystemOptions.of(model=given[1], corpus=given[3]), None, {})

    def run_server():
        with open_shelf(SystemOptions.of(model=given[1], corpus=given[3]), None, ("ras",)).loops["ras"] as system:
            system.answer(QUESTION)

    for program in (run_evaluation, run_ask, run_server):
        prompts.clear()
        program()
        assert set(prompts) == of_training, program
    settings = read_json(tmp_path / "out" / "settings.json")
    assert settings["options"]["evidence"] == "text"
    assert "overrides" not in settings


def test_what_the_data_show_is_part_of_the_model(trained):
    long = "the author of the novel Glass Harbour " * 12
    model = trained(rows_of(f"Who is {long}?", "A text."), TEXT)
    recorded = options_of_training(str(model))
    assert (recorded["evidence"], recorded["first_query"], recorded["graph"]) == ("text", "generated", False)
    assert recorded["max_plan_tokens"] > LoopOptions().max_plan_tokens
    assert recorded["max_answer_tokens"] == LoopOptions().max_answer_tokens


def test_a_student_that_always_searches_learns_no_stop_and_is_run_so(trained, tmp_path, capsys, caplog):
    content = Passage(**PASSAGE).content
    rows = rows_of("Who wrote it?", content)
    unread = Record("b", "q", "answering", QUESTION, Action.NO_RETRIEVAL, (), answers=("Ida Morn",))
    third = Record("c", "q", "planning", QUESTION, Action.SUBQ, rows[1].steps * 2, "Who is she?")
    with caplog.at_level("INFO"):
        model = trained([*rows, unread, third], {**TEXT, "data.stop": "fixed", "data.searches": 2})
    assert "left out: they stop or answer unread 2" in caplog.text
    assert "planning [SUBQ] 2" in caplog.text, "a plan after more searches still teaches sub-queries"
    recorded = options_of_training(str(model))
    assert (recorded["stop"], recorded["max_rounds"]) == ("fixed", 2)
    write_lines(tmp_path / "corpus.jsonl", [PASSAGE])
    write_lines(tmp_path / "q.jsonl", [{"id": "q", "question": QUESTION, "answers": ["Ida Morn"]}])
    given = {"model": str(model), "corpus": str(tmp_path / "corpus.jsonl")}
    task = ["--system", "ras", "--task", "qa", "--data", str(tmp_path / "q.jsonl"), "--output", str(tmp_path / "out")]
    assert evaluate(["run", *task, "--model", given["model"], "--corpus", given["corpus"]]) == 0
    settings = read_json(tmp_path / "out" / "settings.json")
    assert (settings["options"]["stop"], settings["options"]["max_rounds"]) == ("fixed", 2)
    assert "overrides" not in settings
    (row,) = read_lines(tmp_path / "out" / "results.jsonl")
    assert row["trace"]["stop_reason"] in ("max_rounds", "repeated_subquery", "malformed")
    assert all(action["reply"].startswith("[SUBQ]") for action in row["trace"]["actions"])
    ask_question(QUESTION, SystemOptions.of(**given), None, {})
    assert "plan      [SUBQ]" in capsys.readouterr().out
    with open_shelf(SystemOptions.of(**given), None, ("ras",)).loops["ras"] as system:
        assert (system.options.stop, system.options.max_rounds) == ("fixed", 2)
    ras = find_system("ras")
    other = SystemOptions.of(**given, stop="adaptive")
    assert overridden_options(ras, other, loop_options(ras, other)) == {"stop": "adaptive, trained with fixed"}


def test_a_fixed_number_of_searches_needs_its_number(make_config):
    with pytest.raises(ValueError, match=r"data\.stop fixed and data.searches need each other"):
        GraphTask(make_config({"data.stop": "fixed"}))


def test_what_a_step_shows_is_part_of_the_model(trained, make_config, tmp_path):
    facts = tuple(Triple(f"s{number}", "p", "o") for number in range(7))
    model = Path(trained(rows_of("Who?", "A text.", facts), {"train.epochs": 1}))
    assert options_of_training(str(model))["triples_per_step"] == 7
    assert "top_k" not in options_of_training(str(model)), "who made the records did not say"
    statistics = {"statistics": {"records": 3}, "build": {"options": {"distractors": 2, "retriever": None, "top_k": 1}}}
    write_json(tmp_path / "own" / "statistics.json", statistics)
    train(
        GraphTask(
            make_config({"data.train": str(tmp_path / "own"), "train.epochs": 1, "output_dir": str(tmp_path / "b")})
        )
    )
    ras = find_system("ras")
    options = SystemOptions.of(model=str(tmp_path / "b/final"))
    loop = loop_options(ras, options)
    assert (loop.top_k, loop.triples_per_step) == (3, 7)
    assert overridden_options(ras, options, loop) == {}
    other = replace(options, set=["top_k=5", "triples_per_step=none"])
    assert overridden_options(ras, other, loop_options(ras, other)) == {
        "top_k": "5, trained with 3",
        "triples_per_step": "none, trained with 7",
    }


def test_the_papers_five_passages_are_named_for_a_model_of_one_passage_per_step(tmp_path):
    write_json(tmp_path / "processor_config.json", {"loop": {"top_k": 1, "triples_per_step": 9}})
    ras = find_system("ras")
    options = SystemOptions.of(model=str(tmp_path))
    loop = loop_options(ras, options)
    assert (loop.top_k, loop.triples_per_step) == (5, None)
    assert overridden_options(ras, options, loop) == {"top_k": "5, trained with 1"}


@pytest.fixture
def model(tmp_path):
    write_json(
        tmp_path / "processor_config.json",
        {"evidence": "text", "use_graph": True, "loop": {"first_query": "generated", "max_plan_tokens": 90}},
    )
    return str(tmp_path)


def test_an_option_that_differs_is_named(model, caplog):
    ras = find_system("ras")
    options = SystemOptions.of(model=model)
    loop = loop_options(ras, options)
    assert loop == LoopOptions(evidence="text", first_query="generated", max_plan_tokens=90)
    assert overridden_options(ras, options, loop) == {}
    other = replace(options, set=["evidence=triples", "max_plan_tokens=20", "graph=no"])
    assert overridden_options(ras, other, loop_options(ras, other)) == {
        "evidence": "triples, trained with text",
        "graph": "no, trained with yes",
        "max_plan_tokens": "20, trained with 90",
    }
    assert overridden_options(ras, replace(other, untrained=True), loop_options(ras, other)) == {}
    with caplog.at_level("INFO"):
        warn_of_overrides(overridden_options(ras, other, loop_options(ras, other)))
    # Our own recipes shorten replies, which is no reason to worry.
    unlike = "the model reads prompts that it did not learn; run it as trained"
    assert {record.getMessage(): record.levelname for record in caplog.records} == {
        f"evidence triples, trained with text: {unlike}": "WARNING",
        f"graph no, trained with yes: {unlike}": "WARNING",
        "max_plan_tokens 20, trained with 90: longer replies are cut": "INFO",
    }


@pytest.mark.parametrize(
    ("name", "own", "recorded", "is_unlike"),
    [
        ("max_plan_tokens", 64, {"max_plan_tokens": 40}, False),
        ("max_plan_tokens", 30, {"max_plan_tokens": 40}, True),
        # More triples than of one passage follow from `top_k`.
        ("triples_per_step", None, {"triples_per_step": 9, "top_k": 1}, False),
        ("triples_per_step", None, {"triples_per_step": 9, "top_k": 3}, True),
        ("triples_per_step", 9, {"triples_per_step": 9}, False),
        # A model without a graph token has none with the option either.
        ("graph", True, {"graph": False}, False),
        ("graph", False, {"graph": True}, True),
        ("stop", "adaptive", {"stop": "fixed"}, True),
    ],
)
def test_which_options_are_unlike_the_training(name, own, recorded, is_unlike):
    assert _is_unlike_training(name, own, recorded) is is_unlike


def test_a_task_sets_the_length_of_answers(model):
    assert loop_options(find_system("ras"), SystemOptions.of(model=model), max_answer_tokens=50).max_answer_tokens == 50


def test_a_planner_that_differs_from_the_answerer_is_named(model, tmp_path):
    (tmp_path / "planner").mkdir()
    write_json(tmp_path / "planner" / "processor_config.json", {"evidence": "triples"})
    options = SystemOptions.of(model=model, planner_model=str(tmp_path / "planner"))
    ras = find_system("ras")
    assert overridden_options(ras, options, loop_options(ras, options)) == {"evidence": "text, trained with triples"}


def test_a_model_of_an_earlier_version_keeps_the_papers_options():
    export = str(Path(__file__).parents[1] / "stores/export_a95bc5e4/export")
    assert options_of_training(export) == {"evidence": "triples", "graph": True}
    assert loop_options(find_system("ras"), SystemOptions.of(model=export)) == LoopOptions()


@pytest.mark.parametrize(
    ("evidence", "text", "triples", "message"),
    [
        ("text", "", (Triple("a", "b", "c"),), "data.evidence text: 2 of 2 steps in .* have no text"),
        ("text", "", (), "2 of 2 steps"),
        ("triples", "A text.", (), "none of the 2 steps in .* has triples"),
    ],
)
def test_evidence_that_the_rows_do_not_have_is_an_error(trained, evidence, text, triples, message):
    settings = {"data.evidence": evidence, "model.use_graph": False}
    with pytest.raises(ValueError, match=message):
        trained(rows_of("Who?", text, triples), settings)


def test_overrides_are_on_the_page(model):
    from tripletune.eval.results import RunSettings

    written = RunSettings(system="ras", overrides={"evidence": "triples, trained with text"}).to_json()
    assert json.loads(json.dumps(written))["overrides"] == {"evidence": "triples, trained with text"}
    assert RunSettings.from_json(written).overrides == written["overrides"]


def test_a_chat_model_is_answered_with_the_option_that_takes_it(tmp_path):
    write_json(tmp_path / "student.json", {"task": "chat", "roles": ["chat"]})
    with pytest.raises(ValueError, match=f"is a trained chat model, not a Graph-LLM: give it as --llm hf:{tmp_path}"):
        folder_or_base_model(str(tmp_path), untrained=False)
