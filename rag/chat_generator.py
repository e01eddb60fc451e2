"""Answers of chat models: RAS's planner and answerer (figures 20 and 21), and the reader that all baselines share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tripletune.models.data.records import ModelInput, Passage, Step, one_line
from tripletune.models.data.rendering import render
from tripletune.models.llm import Completion, Generator
from tripletune.models.llm.question_client import QuestionClient, load_prompts
from tripletune.models.llm.replies import without_thoughts
from tripletune.rag import Trace
from tripletune.rag.retrievers import Retrieved
from tripletune.rag.systems import LoopOptions, Tools, client_of

PLAN, ANSWER = "ras_plan_chat", "ras_answer_chat"
READER, CLOSED_BOOK = "answer_passages", "answer_closed_book"
_PROMPTS = (PLAN, ANSWER, READER, CLOSED_BOOK)
REFUSAL = "Unanswerable"
_LABEL = re.compile(r"\A(?:.*\n)*?[\s*_]*(?:final )?(?:answer|reply)[ \t*_]*:[ \t*_]*(?=\S)", re.IGNORECASE)

_ANSWER = re.compile(r"\banswer[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_NEXT = re.compile(r"^[\s*_#]*(?:question|triples|sentences|passages)[ \t*_]*:", re.IGNORECASE | re.MULTILINE)
_THOUGHT = re.compile(r"^[\s*_]*thought[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_REFUSED = re.compile(rf"\W*{REFUSAL}\b(?=.*\w)", re.IGNORECASE)


class ChatGenerator(Generator):
    """A `Generator` on the chat model of `tools`: RAS with few-shot prompts (appendix F.1), no graph token."""

    def __init__(self, tools: Tools, folder: str | None, notes: Trace) -> None:
        self._client = client_of("ras", tools, notes, load_prompts(_PROMPTS, folder))

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """See `Generator`; the calls have the roles `ras.plan` and `ras.answer`."""
        plans = sample.task == "planning"
        completion = await self._client.chat(
            self._client.prompts.chat(PLAN if plans else ANSWER, render(sample, evidence or "triples")),
            role="ras.plan" if plans else "ras.answer",
            sampling=self._client.up_to(max_new_tokens),
        )
        # The examples stand after "Reply:", and some models write that, too.
        plan = _LABEL.sub("", without_thoughts(completion.text)).strip()
        return replace(completion, text=plan if plans else bare_answer(completion.text))


def prompt_files(*used: str, names: tuple[str, ...] = _PROMPTS) -> Callable[[Any], Mapping[str, str]]:
    """`System.files` of a system that sends the prompts `used`, of all `names` that a user's folder may hold."""
    return lambda options: {
        name: digest for name, digest in load_prompts(names, options.prompts).digests().items() if name in used
    }


def bare_answer(text: str) -> str:
    """The answer in the reply of a model that was asked for the answer alone.

    Behind "Answer:" its line counts, and without it what stands before the first blank line.
    """
    bare, labels = _LABEL.subn("", without_thoughts(text))
    return re.split(r"\n" if labels else r"\n\s*\n", bare.strip(), maxsplit=1)[0].strip("*_` \n")


def read_answer(text: str, cut_off: bool = False) -> tuple[str, tuple[str, ...]]:
    """Read "Thought: ... Answer: ..."; the last "Answer:" counts.

    Returns:
        The answer, and the faults: `missing_answer` (no "Answer:"; the last line counts, but not when the reply was cut
        off), `empty_answer`, `text_after_answer` (dropped; also a reason on the line of the refusal word), `runs_on`
        (another question follows the answer; it is dropped).
    """
    text = without_thoughts(text).strip()
    markers = list(_ANSWER.finditer(text))
    faults: list[str] = []
    if markers and (more := _NEXT.search(text, markers[0].end())):
        text, faults = text[: more.start()], ["runs_on"]
        markers = [marker for marker in markers if marker.end() <= more.start()]
    if markers:
        lines = [line.strip() for line in text[markers[-1].end() :].splitlines() if line.strip()]
        if len(lines) > 1:
            faults.append("text_after_answer")
        answer = lines[0] if lines else ""
    else:
        faults.append("missing_answer")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        answer = "" if cut_off or not lines else _THOUGHT.sub("", lines[-1])
    answer = answer.strip("*_` ").strip()
    if _REFUSED.match(answer):
        # "Unanswerable. The triples do not say ..." is the refusal word and a reason for it.
        answer = REFUSAL
        faults += [] if "text_after_answer" in faults else ["text_after_answer"]
    if not answer:
        faults.append("empty_answer")
    return answer, tuple(faults)


async def answer_from(question: str, passages: Iterable[Passage] | None, llm: QuestionClient, max_tokens: int) -> str:
    """Answer a question from passages, best first, or without any (None), in one call of the role `<system>.answer`."""
    asked = f"Question: {one_line(question)}"
    if passages is None:
        chat = llm.prompts.chat(CLOSED_BOOK, asked)
    else:
        chat = llm.prompts.chat(READER, f"{show_passages(passages)}\n\n{asked}")
    completion = await llm.chat(chat, role=f"{llm.system}.answer", sampling=llm.up_to(max_tokens))
    return bare_answer(completion.text)


def show_passages(passages: Iterable[Passage]) -> str:
    """Passages as all prompts show them: under their titles, with blank lines between them."""
    return "Passages:\n" + ("\n\n".join(passage.content for passage in passages) or "(nothing was found)")


async def answer_once(
    system: str,
    question: str,
    tools: Tools,
    options: LoopOptions,
    hits: Sequence[Retrieved] | None = None,
    query: str = "",
) -> Trace:
    """A system of one call: the Graph-LLM or the chat model answers, from `hits` or from its own knowledge."""
    trace = Trace(question, stop_reason="retrieval_off" if hits is None else "single_pass")
    steps: tuple[Step, ...] = ()
    if hits is not None:
        steps = (Step(query, (), "\n".join(hit.passage.content for hit in hits)),)
        trace.add_step(steps[0], hits)
    if tools.answerer is not None:
        sample = ModelInput("answering", question, steps)
        completion = await tools.answerer.generate(sample, options.max_answer_tokens, "text" if steps else None)
        trace.count(completion)
        trace.answer = completion.text.strip()
    else:
        llm = client_of(system, tools, trace, load_prompts(_PROMPTS, options.prompts))
        passages = None if hits is None else [hit.passage for hit in hits]
        trace.answer = await answer_from(question, passages, llm, options.max_answer_tokens)
    return trace
