"""Plan and answer with chat models: RAS's planner and answerer (figures 20, 21), and the baselines' common reader."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from tripletune.core.calls import Completion, Generator
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import ModelInput, Step, one_line
from tripletune.core.data.rendering import render
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reply_json import without_thoughts
from tripletune.rag import Trace
from tripletune.rag.search.retrievers import Retrieved
from tripletune.rag.systems import AnswerOptions, LoopOptions, Tools, client_of

T = TypeVar("T")
PLAN, ANSWER = "ras_plan_chat", "ras_answer_chat"
READER, CLOSED_BOOK = "answer_passages", "answer_closed_book"
PROMPTS = (PLAN, ANSWER, READER, CLOSED_BOOK)
REFUSAL = "Unanswerable"
COMMON = "reader.answer"
_LABEL = re.compile(r"\A(?:.*\n)*?[\s*_]*(?:final )?(?:answer|reply)[ \t*_]*:[ \t*_]*(?=\S)", re.IGNORECASE)
_LEADING_LABEL = re.compile(r"\A[\s*_]*(?:final )?(?:answer|reply)[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_ANSWER = re.compile(r"\banswer[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_NEXT = re.compile(r"^[\s*_#]*(?:question|triples|sentences|passages)[ \t*_]*:", re.IGNORECASE | re.MULTILINE)
_QUESTION = re.compile(r"^[\s*_#]*question[ \t*_]*:", re.IGNORECASE | re.MULTILINE)
_THOUGHT = re.compile(r"^[\s*_]*thought[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_REFUSED = re.compile(rf"\W*{REFUSAL}\b(?=.*\w)", re.IGNORECASE)


class ChatGenerator(Generator):
    """A `Generator` that calls the chat model of `tools`: RAS with few-shot prompts (appendix F.1), no graph token."""

    def __init__(self, tools: Tools, options: LoopOptions, notes: Trace) -> None:
        self.client = client_of("ras", tools, notes, load_prompts(PROMPTS, options.prompts))
        self._long = options.answer == "long"

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to an input (see `Generator`); the calls have the roles `ras.plan` and `ras.answer`."""
        plans = sample.task == "planning"
        completion = await self.client.chat(
            self.client.prompts.chat(PLAN if plans else ANSWER, render(sample, evidence or "triples")),
            role="ras.plan" if plans else "ras.answer",
            sampling=self.client.up_to(max_new_tokens),
        )
        # In the prompt, replies come after "Reply:", which some models repeat.
        plan = _LABEL.sub("", _own(completion.text)).strip()
        return replace(completion, text=plan if plans else bare_answer(completion.text, self._long))


def prompt_files(*used: str, names: tuple[str, ...] = PROMPTS) -> Callable[[Any], Mapping[str, str]]:
    """Make `System.files` for a system that uses the prompts `used` out of the replaceable prompts `names`."""
    names = tuple(dict.fromkeys((*names, READER)))

    def files(options: Any) -> Mapping[str, str]:
        sent = (*used, READER) if options.reader == "common" else used
        return {name: one for name, one in load_prompts(names, options.prompts).digests().items() if name in sent}

    return files


def _own(text: str) -> str:
    """A reply without thoughts and without the example that some models invent after it."""
    text = without_thoughts(text).strip()
    more = None if _NEXT.match(text) else _QUESTION.search(text, 1)
    return text[: more.start()] if more else text


def bare_answer(text: str, long: bool = False) -> str:
    """Read the answer in a reply to a prompt that asks only for the answer.

    The answer is the line after "Answer:", or else the text before the first blank line; if `long`, the whole text.
    """
    if long:
        return _LEADING_LABEL.sub("", _own(text)).strip()
    bare, labels = _LABEL.subn("", _own(text))
    return re.split(r"\n" if labels else r"\n\s*\n", bare.strip(), maxsplit=1)[0].strip("*_` \n")


def read_answer(text: str, cut_off: bool = False, long: bool = False) -> tuple[str, tuple[str, ...]]:
    """Read "Thought: ... Answer: ..."; the answer follows the last "Answer:", or if `long` the first.

    Returns:
        The answer and the faults. `missing_answer`: the reply has no "Answer:", so its last line is used unless it was
        cut off. `empty_answer`. `text_after_answer`: more text, which is dropped, follows the answer or the refusal
        word. `runs_on`: another question, which is dropped, follows the answer.
    """
    text = without_thoughts(text).strip()
    markers = list(_ANSWER.finditer(text))
    faults: list[str] = []
    # A thought may contain "the answer:", so prefer "Answer:" at the beginning of a line.
    own = [marker for marker in markers if not text[: marker.start()].rpartition("\n")[2].strip(" *_#")]
    first = next(iter(markers), None)
    if first and own and not _QUESTION.search(text, first.end(), own[0].start()):
        first = own[0]
    if first and (more := (_QUESTION if long else _NEXT).search(text, first.end())):
        text, faults = text[: more.start()], ["runs_on"]
        markers = [marker for marker in markers if marker.end() <= more.start()]
    if first:
        rest = text[(first if long else markers[-1]).end() :].strip()
        lines = [rest] if long else [line.strip() for line in rest.splitlines() if line.strip()]
        if len(lines) > 1:
            faults.append("text_after_answer")
        answer = lines[0] if lines else ""
    else:
        faults.append("missing_answer")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        whole = text if long else "" if cut_off or not lines else lines[-1]
        answer = _THOUGHT.sub("", whole)
    answer = answer.strip("*_` ").strip()
    if _REFUSED.match(answer):
        # "Unanswerable. The triples do not say ..." is the refusal word with a reason.
        answer = REFUSAL
        faults += [] if "text_after_answer" in faults else ["text_after_answer"]
    if not answer:
        faults.append("empty_answer")
    return answer, tuple(faults)


async def answer_from(
    question: str, passages: Iterable[Passage] | None, llm: QuestionClient, options: AnswerOptions,
    facts: Sequence[str] = (), role: str = "",
) -> str:  # fmt: skip
    """Answer a question in one call (`<system>.answer`), from passages, best first, or without passages (None)."""
    parts = [f"Question: {one_line(question)}"]
    if passages is not None:
        parts = [*(["Facts:\n" + "\n".join(facts)] if facts else []), show_passages(passages), *parts]
    chat = llm.prompts.chat(CLOSED_BOOK if passages is None else READER, "\n\n".join(parts))
    completion = await llm.chat(
        chat, role=role or f"{llm.system}.answer", sampling=llm.up_to(options.max_answer_tokens)
    )
    return bare_answer(completion.text, options.answer == "long")


@dataclass(frozen=True, slots=True)
class Found:
    """Evidence that a system found for its last call: passages, best first, and facts or notes, one per line."""

    passages: Sequence[Passage] = ()
    facts: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.passages) + len(self.facts)

    def within(self, tokens: int) -> Found:
        """The part that fits a budget of tokens (4 bytes each): facts up to half of the budget, then passages."""
        left = 4 * tokens
        facts = _fitting(self.facts, left // 2, lambda text: text)
        left -= sum(len(text.encode()) for text in facts)
        passages = _fitting(self.passages, left, lambda passage: passage.content)
        if self.passages and not passages:  # the first passage is longer than the budget: keep its beginning
            cut = self.passages[0].text.encode()[:left].decode(errors="ignore")
            passages = [replace(self.passages[0], text=cut)]
        return Found(passages, facts)


def _fitting(items: Sequence[T], room: int, text_of: Callable[[T], str]) -> Sequence[T]:
    """The first items whose texts together have at most `room` bytes."""
    ends = accumulate(len(text_of(item).encode()) for item in items)
    return [item for item, end in zip(items, ends) if end <= room]


async def finish(
    trace: Trace, options: AnswerOptions, llm: QuestionClient, found: Found, own: Callable[[], Awaitable[str]]
) -> Trace:
    """End a question with the system's `own` last call, or with the common reader, which all systems share."""
    if options.reader == "common":
        whole, found = found, found.within(options.reader_tokens)
        trace.tally("evidence_left_out", len(whole) - len(found))
        trace.answer = await answer_from(trace.question, found.passages, llm, options, found.facts, COMMON)
    else:
        trace.answer = await own()
    sent = getattr(llm, "sent", None)  # a Graph-LLM reads all evidence
    texts = [*((passage.content, [passage.id]) for passage in found.passages), *trace.origins.items()]
    shown = (one for text, ids in texts if sent is None or " ".join(text.split()) in sent for one in ids)
    trace.shown = list(dict.fromkeys(shown))
    if sent is None and trace.truncated_words:  # which passages lost words is not known
        trace.shown = []
    if trace.found and len(found) and not trace.shown:
        trace.details["unknown"] = ["shown"]
    return trace


def show_passages(passages: Iterable[Passage]) -> str:
    """Write passages as in all prompts: each under its title, separated by blank lines."""
    return "Passages:\n" + ("\n\n".join(passage.content for passage in passages) or "(nothing was found)")


async def answer_once(
    system: str,
    question: str,
    tools: Tools,
    options: LoopOptions,
    hits: Sequence[Retrieved] | None = None,
    query: str = "",
) -> Trace:
    """Answer with one call to the Graph-LLM or the chat model, from `hits` or from the model's own knowledge."""
    trace = Trace(question, stop_reason="retrieval_off" if hits is None else "single_pass")
    llm: Any = None
    if tools.answerer is None or options.reader == "common":
        llm = client_of(system, tools, trace, load_prompts(PROMPTS, options.prompts))
    steps: tuple[Step, ...] = ()
    passages = None if hits is None else [hit.passage for hit in hits]
    if hits is not None:
        steps = (Step(query, (), "\n".join(hit.passage.content for hit in hits)),)
        trace.add_step(steps[0], hits)

    async def own() -> str:
        if tools.answerer is None:
            return await answer_from(question, passages, llm, options)
        sample = ModelInput("answering", question, steps)
        completion = await tools.answerer.generate(sample, options.max_answer_tokens, "text" if steps else None)
        trace.count(completion)
        if completion.finish_reason == "length":
            trace.tally(f"cut_off.{system}.answer")
        return completion.text.strip()

    return await finish(trace, options, llm, Found(passages or ()), own)
