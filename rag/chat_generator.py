"""Plan and answer with chat models: RAS's planner and answerer (figures 20, 21), and the baselines' common reader."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from tripletune.core.calls import Generator, Message, UnusableReply
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Action, ModelInput, Step, Task, one_line
from tripletune.core.data.rendering import Plan, render
from tripletune.core.data.triples import Triple
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reading.answers import (
    json_answer,
    marked_answer,
    phrased_answer,
    unlabelled_answer,
    without_explanation,
)
from tripletune.llm.reading.lines import answer_line, plain_text, unquoted
from tripletune.llm.reading.plans import read_plan
from tripletune.llm.refusals import is_refusal
from tripletune.llm.reply_json import without_thoughts
from tripletune.rag import Trace
from tripletune.rag.evidence import Evidence, Found
from tripletune.rag.search.retrievers import Retrieved, passages_of_hits
from tripletune.rag.systems import AnswerOptions, LoopOptions, RetrievalOptions, Tools, client_of, need
from tripletune.rag.systems._confidence import note_confidence

PLAN, ANSWER = "ras_plan_chat", "ras_answer_chat"
READER, CLOSED_BOOK = "answer_passages", "answer_closed_book"
# The prompts of the reader that all systems can share; the second is for questions that were not searched.
COMMON_READER = (READER, CLOSED_BOOK)
PROMPTS = (PLAN, ANSWER, *COMMON_READER)
REFUSAL = "Unanswerable"
COMMON = "reader.answer"
# What a chat model is told that stops although another search will be made.
_GO_ON = "Another search will be made in any case: reply [SUBQ] and what should be searched next."
# The prompt itself does not name facts, because most systems have none.
FACTS_HEADING = "Facts, as stated in passages that were found:\n"
_LABEL = re.compile(r"\A(?:.*\n)*?[\s*_]*(?:final |short )?(?:answer|reply)[ \t*_]*:[\s*_]*(?=\S)", re.IGNORECASE)
_LEADING_LABEL = re.compile(r"\A[\s*_]*(?:final )?(?:answer|reply)[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_ANSWER = re.compile(r"\banswer[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_NEXT = re.compile(r"^[\s*_#]*(?:question|triples|sentences|passages)[ \t*_]*:", re.IGNORECASE | re.MULTILINE)
_QUESTION = re.compile(r"^[\s*_#]*question[ \t*_]*:", re.IGNORECASE | re.MULTILINE)
_THOUGHT = re.compile(r"^[\s*_]*thought[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_REFUSED = re.compile(rf"\W*{REFUSAL}\b(?=.*\w)", re.IGNORECASE)


class PromptOptions(Protocol):
    """The options that decide which prompts a system sends; `AnswerOptions` with `prompts` has them."""

    @property
    def reader(self) -> str:
        """Whose prompt answers: "paper" or "common"."""

    @property
    def prompts(self) -> str | None:
        """Folder of custom prompts."""


class ReadPlan(NamedTuple):
    """A planning reply and what was read in it."""

    reply: str
    plan: Plan


class ChatGenerator:
    """The chat model of `tools` as RAS's planner and answerer, with few-shot prompts (appendix F.1), no graph token.

    Its client records the calls in `trace`; their roles are `ras.plan` and `ras.answer`.
    """

    def __init__(self, tools: Tools, options: LoopOptions, trace: Trace) -> None:
        self.client = client_of("ras", tools, trace, load_prompts(PROMPTS, options.prompts))
        self._options = options

    async def plan(self, question: str, steps: Sequence[Step]) -> ReadPlan:
        """Ask for the next action.

        A chat model was not trained on the bare form, so its plan is read in any form, with a repair turn. `Plan(None)`
        if that fails. If the number of searches is fixed, a plan that stops gets the repair turn, too.
        """
        replies: list[str] = []

        def read(reply: str) -> Plan:
            """Keep a reply, which becomes the recorded action, and read its plan."""
            replies.append(reply)
            plan = read_plan(reply)
            if self._options.stop == "fixed" and plan.action is not Action.SUBQ:
                raise UnusableReply("stops", _GO_ON)
            return plan

        chat = self._chat_of_steps(PLAN, "planning", question, steps)
        try:
            plan = await self.client.ask("plan", chat, read, self._options.max_plan_tokens)
        except UnusableReply:
            plan = Plan(None)
        return ReadPlan(replies[-1], plan)

    async def answer(self, question: str, steps: Sequence[Step]) -> str:
        """Ask for the answer to a question after some steps, in the role `ras.answer`."""
        chat = self._chat_of_steps(ANSWER, "answering", question, steps)
        sampling = self.client.for_answer(self._options)
        completion = await self.client.chat(chat, role="ras.answer", sampling=sampling)
        return bare_answer(completion.text, self._options.answer == "long")

    def _chat_of_steps(self, prompt: str, task: Task, question: str, steps: Sequence[Step]) -> list[Message]:
        """The prompt and the steps as a Graph-LLM reads them, but with each triple only where it was read first.

        A passage that is found again brings no new facts; a Graph-LLM reads them again because it was trained so.
        """
        model_input = ModelInput(task, question, without_repeats(steps))
        return self.client.prompts.chat(prompt, render(model_input, self._options.evidence))


def without_repeats(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps without triples that an earlier step has: a chat model reads all steps, so repeats only cost tokens."""
    seen: set[Triple] = set()
    shortened = []
    for step in steps:
        new = tuple(triple for triple in step.triples if triple not in seen)
        seen.update(new)
        shortened.append(replace(step, triples=new))
    return tuple(shortened)


def prompt_files(
    *used: str, names: tuple[str, ...] = PROMPTS, home: Path | None = None
) -> Callable[[PromptOptions], Mapping[str, str]]:
    """Make `System.files` for a system: a function that gives the digests of the prompts that it sends, by name.

    Args:
        used: Prompts that the system sends with any options.
        names: Prompts that a folder of custom prompts may replace.
        home: The folder of the system's own prompts; see `load_prompts`.
    """
    names = tuple(dict.fromkeys((*names, *COMMON_READER)))

    def files(options: PromptOptions) -> Mapping[str, str]:
        """Digests of the prompts that a run with these options sends; a change of another prompt changes no result."""
        sent = set(used)
        if options.reader == "common":
            sent.update(COMMON_READER)
        digests = load_prompts(names, options.prompts, home=home).digests()
        return {name: digest for name, digest in digests.items() if name in sent}

    return files


def _without_invented_example(text: str) -> str:
    """A reply without thoughts, and without the next example (from "Question:" on) that some models invent after it."""
    text = plain_text(text).strip()
    if _NEXT.match(text):
        return text
    example = _QUESTION.search(text, 1)
    return text[: example.start()] if example else text


def bare_answer(text: str, long: bool = False) -> str:
    """Read the answer in a reply to a prompt that asks only for the answer.

    The answer stands in `\\boxed{…}`, after "Answer:" or "The answer is"; else it is the first text of the reply that
    is neither a remark nor an explanation. If `long`, it is the whole text.
    """
    if long:
        return _LEADING_LABEL.sub("", _without_invented_example(text)).strip()
    if marked := marked_answer(text) or json_answer(text):
        return without_explanation(marked)
    own_reply = _without_invented_example(text)
    bare, labels = _LABEL.subn("", own_reply)
    if labels:
        answer = bare.strip().split("\n", 1)[0]
    else:
        answer = unlabelled_answer(own_reply)
        phrased = phrased_answer(own_reply)
        # "The answer is not in the passages" has no answer after the phrase.
        if phrased and not is_refusal(own_reply):
            answer = phrased
    answer = answer.strip("` \n")
    if "\n" in answer:
        return unquoted(answer.strip("*_"))
    return without_explanation(answer_line(answer) or answer).strip("*_")


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
    first = _label_of_first_answer(text, labels)
    if first:
        next_question = (_QUESTION if long else _NEXT).search(text, first.end())
        if next_question:
            faults.append("runs_on")
            text = text[: next_question.start()]
            labels = [label for label in labels if label.end() <= next_question.start()]
        label = first if long else labels[-1]
        following = text[label.end() :].strip()
        lines = [following] if long else _nonblank_lines(following)
        if len(lines) > 1:
            faults.append("text_after_answer")
        answer = lines[0] if lines else ""
    else:
        faults.append("missing_answer")
        answer = _THOUGHT.sub("", _answer_without_label(text, cut_off, long))
    answer = answer.strip("*_` ").strip()
    if _REFUSED.match(answer):
        # "Unanswerable. The triples do not say ..." is the refusal word with a reason.
        answer = REFUSAL
        if "text_after_answer" not in faults:
            faults.append("text_after_answer")
    if not answer:
        faults.append("empty_answer")
    return ReadAnswer(answer, tuple(faults))


def _label_of_first_answer(text: str, labels: Sequence[re.Match[str]]) -> re.Match[str] | None:
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


def _answer_without_label(text: str, cut_off: bool, long: bool) -> str:
    """The answer in a reply without "Answer:": all of it if `long`, else its last line unless that was cut off."""
    if long:
        return text
    lines = _nonblank_lines(text)
    return lines[-1] if lines and not cut_off else ""


def _nonblank_lines(text: str) -> list[str]:
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
            sections.insert(0, FACTS_HEADING + "\n".join(facts))
        chat = llm.prompts.chat(READER, "\n\n".join(sections))
    sampling = llm.for_answer(options)
    completion = await llm.chat(chat, role=role or f"{llm.system}.answer", sampling=sampling)
    return bare_answer(completion.text, options.answer == "long")


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
    evidence = found.everything()
    answer = answer_by_system
    if options.reader == "common" and llm is not None:
        shortened = found.within(options.reader_tokens)
        trace.tally("evidence_left_out", evidence.size - shortened.size)
        evidence = shortened
        passages = evidence.passages if trace.steps else None
        answer = partial(answer_from, trace.question, passages, llm, options, evidence.facts, COMMON)
    # Answers of sub-questions may have noted theirs.
    trace.confidence.clear()
    trace.answer = await answer()
    trace.shown = _shown_passages(trace, evidence, llm)
    if trace.found and evidence.size and not trace.shown:
        trace.details["unknown"] = ["shown"]
    await note_confidence(trace, options, evidence, answer)
    return trace


def _shown_passages(trace: Trace, evidence: Evidence, llm: QuestionClient | None) -> list[str]:
    """Ids of the passages whose text or facts were in the prompt of the answer; empty if that is not known.

    Only what was shown can be blamed on the answerer, so the report divides scores by it. A prompt that was too long
    lost some of the evidence, so a text counts only if it stands in the prompt that was sent.

    Args:
        trace: The trace so far, whose `origins` say which passages a fact came from.
        evidence: What the system chose to show.
        llm: The client of the answer; None for a Graph-LLM, which reads all evidence.
    """
    sent = llm.sent if llm is not None else None
    if sent is None and trace.truncated_words:  # which passages lost words is not known
        return []

    def was_sent(text: str) -> bool:
        """Whether the prompt that was sent shows a text, apart from white space."""
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
    options: RetrievalOptions | LoopOptions,
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
        """The answer of a chat model, or of a Graph-LLM that reads the passages as the text of a step."""
        if tools.answerer is None and llm is not None:
            return await answer_from(question, passages, llm, options)
        answerer: Generator = need(tools.answerer, "answerer", system)
        sample = ModelInput("answering", question, steps)
        completion = await answerer.generate(sample, options.max_answer_tokens, "text" if steps else None)
        trace.count(completion)
        if not completion.is_whole:
            trace.tally(f"cut_off.{system}.answer")
        return completion.text.strip()

    return await finish(trace, options, llm, Found([passages or ()]), answer)
