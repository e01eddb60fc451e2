import asyncio

import pytest

from tests.fakes import Model, Shelf
from tripletune.models.data.records import ModelInput, Step
from tripletune.rag.systems import LoopOptions, Tools, find_system


def run(name, model, shelf=None, **options):
    tools = Tools(model, model, shelf)
    return asyncio.run(find_system(name).run("Q? Pick one.", "Q?", tools, LoopOptions(**options)))


def test_no_retrieval_shows_the_question_alone():
    model = Model(answer=" Oslo ")
    trace = run("no_retrieval", model, max_answer_tokens=9)
    assert model.inputs == [(ModelInput("answering", "Q? Pick one."), 9, None)]
    assert (trace.answer, trace.stop_reason, trace.calls, trace.steps) == ("Oslo", "retrieval_off", 1, [])


def test_standard_shows_the_text_of_the_passages():
    model = Model()
    trace = run("standard", model, Shelf(), top_k=2)
    step = Step("Q?", (), "Q? 1\ntext 1 of Q?\nQ? 2\ntext 2 of Q?")
    assert model.inputs == [(ModelInput("answering", "Q? Pick one.", (step,)), 100, "text")]
    assert [passage["title"] for passage in trace.steps[0].passages] == ["Q? 1", "Q? 2"]
    assert (trace.stop_reason, trace.calls, trace.prompt_tokens) == ("single_pass", 1, 10)
    with pytest.raises(ValueError, match="needs 'retriever'"):
        run("standard", model)
