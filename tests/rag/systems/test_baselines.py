from __future__ import annotations

import asyncio

import pytest

from tripletune.models.data.records import ModelInput, Passage, Step
from tripletune.models.llm import Completion
from tripletune.rag.retrievers import Retrieved
from tripletune.rag.systems import LoopOptions, Tools, load_system
from tripletune.rag.systems.no_retrieval import no_retrieval
from tripletune.rag.systems.standard import standard


class Model:
    def __init__(self) -> None:
        self.inputs: list[tuple[ModelInput, int, str | None]] = []

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        self.inputs.append((sample, max_new_tokens, evidence))
        return Completion(" Oslo ", 7, 1)


class Shelf:
    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        return [Retrieved(Passage(f"T{n}", f"{query} text {n}"), 1.0, n) for n in range(k)]


def test_no_retrieval_shows_the_question_alone():
    model = Model()
    trace = asyncio.run(no_retrieval("Q?", "Q?", Tools(answerer=model), LoopOptions(max_answer_tokens=9)))
    assert model.inputs == [(ModelInput("answering", "Q?"), 9, None)]
    assert (trace.answer, trace.stop_reason, trace.calls, trace.steps) == ("Oslo", "retrieval_off", 1, [])


def test_standard_shows_the_text_of_the_passages():
    model = Model()
    tools = Tools(model, model, Shelf())
    trace = asyncio.run(standard("Q? Pick one.", "Q?", tools, LoopOptions(top_k=2)))
    step = Step("Q?", (), "T0\nQ? text 0\nT1\nQ? text 1")
    assert model.inputs == [(ModelInput("answering", "Q? Pick one.", (step,)), 100, "text")]
    assert [passage["title"] for passage in trace.steps[0].passages] == ["T0", "T1"]
    assert (trace.stop_reason, trace.calls, trace.prompt_tokens) == ("single_pass", 1, 7)


def test_a_missing_tool_is_named():
    assert load_system("standard").run is standard
    with pytest.raises(ValueError, match="no retriever was given"):
        asyncio.run(standard("Q?", "Q?", Tools(Model(), Model()), LoopOptions()))
