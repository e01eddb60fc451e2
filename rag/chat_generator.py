"""Plan and answer with chat models: RAS's planner and answerer (figures 20, 21), and the baselines' common reader."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from tripletune.core.calls import Completion, Generator
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import ModelInput, Step, one_line
from tripletune.core.data.rendering import render
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reading import marked_answer, phrased_answer, unlabelled_answer, unquoted
from tripletune.llm.refusals import is_refusal
from tripletune.llm.replies import REPAIR_ROLE, repair_turns
from tripletune.llm.reply_json import without_thoughts
from tripletune.rag import Trace
from tripletune.rag.search.retrievers import Retrieved, passages_of_hits
from tripletune.rag.systems import AnswerOptions, LoopOptions, Tools, client_of, need

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
        user = render(sample, evidence or "triples")
        sampling = self.client.up_to(max_new_tokens)
        if sample.task == "planning":
            chat = self.client.prompts.chat(PLAN, user)
            return await self.client.chat(chat, role="ras.plan", sampling=sampling)
        chat = self.client.prompts.chat(ANSWER, user)
        completion = await self.client.chat(chat, role="ras.answer", sampling=sampling)
        return replace(completion, text=bare_answer(completion.text, self._long))

    async def repair_plan(
        self, sample: ModelInput, max_new_tokens: int, evidence: str | None, reply: str, fault: str
    ) -> Completion:
        """Ask once more for a plan (role `ras.plan.repair`), with the unreadable reply and its fault."""
        chat = self.client.prompts.chat(PLAN, render(sample, evidence or "triples"))
        turns = repair_turns(chat, reply, fault)
        return await self.client.chat(turns, role=f"ras.plan{REPAIR_ROLE}", sampling=self.client.up_to(max_new_tokens))


def prompt_files(*used: str, names: tuple[str, ...] = PROMPTS) -> Callable[[Any], Mapping[str, str]]:
    """Make `System.files` for a system: the digests of the prompts that it sends.

    Args:
        used: Prompts that the system sends with any options.
        names: Prompts that a folder of custom prompts may replace.
    """
    names = tuple(dict.fromkeys((*names, READER)))

    def files(options: Any) -> Mapping[str, str]:
        sent = set(used)
        if options.reader == "common":
            sent.add(READER)
        digests = load_prompts(names, options.prompts).digests()
        return {name: digest for name, digest in digests.items() if name in sent}

    return files


def _own(text: str) -> str:
    """A reply without thoughts and without the example that some models invent after it."""
    text = without_thoughts(text).strip()
    if _NEXT.match(text):
        return text
    example = _QUESTION.search(text, 1)
    return text[: example.start()] if example else text


def bare_answer(text: str, long: bool = False) -> str:
    """Read the answer in a reply to a prompt that asks only for the answer.

    The answer stands in `\\boxed{…}`, after "Answer:" or "The answer is"; else it is the first text of the reply that
    is neither a remark nor an explanation. If `long`, it is the whole text.
    """
    own = _own(text)
    if long:
        return _LEADING_LABEL.sub("", own).strip()
    marked = marked_answer(own)
    if marked:
        return marked
    bare, labels = _LABEL.subn("", own)
    if labels:
        answer = bare.strip().split("\n", 1)[0]
    else:
        answer = unlabelled_answer(own)
        phrased = phrased_answer(own)
        # "The answer is not in the passages" has no answer after the phrase.
        if phrased and not is_refusal(own):
            answer = phrased
    return unquoted(answer.strip("*_` \n"))


class ReadAnswer(NamedTuple):
    """An answer that was read in a reply, and the names of what was wrong with the reply's form."""

    answer: str
    faults: tuple[str, ...]


def read_answer(text: str, cut_off: bool = False, long: bool = False) -> ReadAnswer:
    """Read "Thought: ... Answer: ..."; the answer follows the last "Answer:", or if `long` the first.

    Returns:
        The answer and the faults. `missing_answer`: the reply has no "Answer:", so its last line is used unless it was
        cut off. `empty_answer`. `text_after_answer`: more text, which is dropped, follows the answer or the refusal
        word. `runs_on`: another question, which is dropped, follows the answer.
    """
    text = without_thoughts(text).strip()
    faults: list[str] = []
    labels = list(_ANSWER.finditer(text))
    first = _first_answer(text, labels)
    if first:
        next_question = (_QUESTION if long else _NEXT).search(text, first.end())
        if next_question:
            faults.append("runs_on")
            text = text[: next_question.start()]
            labels = [label for label in labels if label.end() <= next_question.start()]
        label = first if long else labels[-1]
        following = text[label.end() :].strip()
        lines = [following] if long else _lines(following)
        if len(lines) > 1:
            faults.append("text_after_answer")
        answer = lines[0] if lines else ""
    else:
        faults.append("missing_answer")
        answer = _THOUGHT.sub("", _without_label(text, cut_off, long))
    answer = answer.strip("*_` ").strip()
    if _REFUSED.match(answer):
        # "Unanswerable. The triples do not say ..." is the refusal word with a reason.
        answer = REFUSAL
        if "text_after_answer" not in faults:
            faults.append("text_after_answer")
    if not answer:
        faults.append("empty_answer")
    return ReadAnswer(answer, tuple(faults))


def _first_answer(text: str, labels: Sequence[re.Match[str]]) -> re.Match[str] | None:
    """The label "Answer:" of the first answer in a reply; later ones belong to examples that the model invents.

    A thought may contain "the answer:", so a label at the beginning of a line is preferred, unless another question
    comes before it.
    """
    if not labels:
        return None
    first = labels[0]
    for label in labels:
        line_before = text[: label.start()].rpartition("\n")[2]
        if not line_before.strip(" *_#"):
            is_own = not _QUESTION.search(text, first.end(), label.start())
            return label if is_own else first
    return first


def _without_label(text: str, cut_off: bool, long: bool) -> str:
    """The answer in a reply without "Answer:": all of it if `long`, else its last line unless that was cut off."""
    if long:
        return text
    lines = _lines(text)
    return lines[-1] if lines and not cut_off else ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


async def answer_from(
    question: str,
    passages: Iterable[Passage] | None,
    llm: QuestionClient,
    options: AnswerOptions,
    facts: Sequence[str] = (),
    role: str = "",
) -> str:
    """Answer a question in one call.

    Args:
        passages: The evidence, best first; None: from the model's own knowledge.
        facts: More evidence, one fact per line.
        role: The role of the call; "": `<system>.answer`.
    """
    asked = f"Question: {one_line(question)}"
    if passages is None:
        chat = llm.prompts.chat(CLOSED_BOOK, asked)
    else:
        sections = [show_passages(passages), asked]
        if facts:
            sections.insert(0, "Facts:\n" + "\n".join(facts))
        chat = llm.prompts.chat(READER, "\n\n".join(sections))
    sampling = llm.up_to(options.max_answer_tokens)
    completion = await llm.chat(chat, role=role or f"{llm.system}.answer", sampling=sampling)
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
        left -= len("".join(facts).encode())
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
    trace: Trace,
    options: AnswerOptions,
    llm: QuestionClient | None,
    found: Found,
    answer_by_system: Callable[[], Awaitable[str]],
) -> Trace:
    """End a question with its answer, by the system's own last call or by the common reader, which all systems share.

    Args:
        llm: The client of the last call; None if a Graph-LLM answers.
        found: The evidence for the answer.
        answer_by_system: The system's own last call.
    """
    if options.reader == "common" and llm is not None:
        evidence = found.within(options.reader_tokens)
        trace.tally("evidence_left_out", len(found) - len(evidence))
        trace.answer = await answer_from(trace.question, evidence.passages, llm, options, evidence.facts, COMMON)
    else:
        evidence = found
        trace.answer = await answer_by_system()
    trace.shown = _shown_passages(trace, evidence, llm)
    if trace.found and len(evidence) and not trace.shown:
        trace.details["unknown"] = ["shown"]
    return trace


def _shown_passages(trace: Trace, evidence: Found, llm: QuestionClient | None) -> list[str]:
    """Ids of the passages whose text or facts were in the prompt of the answer; empty if that is not known."""
    sent = llm.sent if llm is not None else None
    if sent is None and trace.truncated_words:  # which passages lost words is not known
        return []

    def was_sent(text: str) -> bool:
        # A Graph-LLM reads all evidence; a client may have shortened the prompt.
        return sent is None or " ".join(text.split()) in sent

    shown: dict[str, None] = {}
    for passage in evidence.passages:
        if was_sent(passage.content):
            shown[passage.id] = None
    for fact, ids in trace.origins.items():
        if was_sent(fact):
            shown |= dict.fromkeys(ids)
    return list(shown)


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
    """Answer with one call to the Graph-LLM or the chat model.

    Args:
        system: The name of the system, for the role of the call.
        hits: The evidence, best first; None: from the model's own knowledge.
        query: The query that found `hits`.
    """
    trace = Trace(question, stop_reason="single_pass")
    llm: QuestionClient | None = None
    if tools.answerer is None or options.reader == "common":
        llm = client_of(system, tools, trace, load_prompts(PROMPTS, options.prompts))
    steps: tuple[Step, ...] = ()
    passages: list[Passage] | None = None
    if hits is None:
        trace.stop_reason = "retrieval_off"
    else:
        passages = passages_of_hits(hits)
        steps = (Step(query, (), "\n".join(passage.content for passage in passages)),)
        trace.add_step(steps[0], hits)

    async def answer() -> str:
        if tools.answerer is None and llm is not None:
            return await answer_from(question, passages, llm, options)
        answerer: Generator = need(tools, "answerer", system)
        sample = ModelInput("answering", question, steps)
        completion = await answerer.generate(sample, options.max_answer_tokens, "text" if steps else None)
        trace.count(completion)
        if not completion.is_whole:
            trace.tally(f"cut_off.{system}.answer")
        return completion.text.strip()

    return await finish(trace, options, llm, Found(passages or ()), answer)
