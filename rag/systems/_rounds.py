"""Common parts of loops in which a chat model thinks and searches: options, searches, reasons to stop.

IRCoT, ReAct and Self-Ask run with the same retriever, k, reader and budget, so that only the loop differs. If a loop
ends without an answer, the reader answers from all retrieved passages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tripletune.core.calls import Message, UnusableReply
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Step
from tripletune.core.options import setting
from tripletune.llm.question_client import load_prompts
from tripletune.llm.reading.answers import ANSWER_PHRASE, without_period
from tripletune.llm.reading.lines import ANSWER_LABELS, Line
from tripletune.llm.refusals import asks_nothing, is_refusal
from tripletune.llm.reply_json import without_thoughts
from tripletune.rag import Trace
from tripletune.rag.chat_generator import COMMON_READER, answer_from, bare_answer, finish
from tripletune.rag.evidence import Found, best_passages, passages_by_round
from tripletune.rag.search.retrievers import Retriever, passages_of_hits
from tripletune.rag.systems import AnswerOptions, Tools, client_of, need


@dataclass(frozen=True, slots=True)
class RoundOptions(AnswerOptions):
    """Options that these loops have in common."""

    max_rounds: int = setting(4, "maximum searches", at_least=1)
    top_k: int = setting(5, "passages per search", at_least=1)
    max_passages: int = setting(15, "maximum passages in a prompt: the best of each search", at_least=1)
    repairs: int = setting(1, "maximum repair turns for an unusable reply; 0 in the papers", at_least=0)
    prompts: str | None = setting(None, "folder of custom prompts")
    max_thought_tokens: int = setting(256, "maximum tokens of a reply", at_least=1)

    def answers_in_loop(self) -> bool:
        """Whether the answer is a part of the loop's last reply, so that no call of its own says how sure it is."""
        return self.reader == "paper" and self.answer == "short"

    def check(self) -> list[str]:
        """Problems of options that need each other."""
        problems = AnswerOptions.check(self)
        if self.abstain is not None and self.confidence != "support" and self.answers_in_loop():
            problems.append(
                f"abstain cannot compare the {self.confidence} of an answer that is a part of a longer reply: set "
                "confidence to support, or reader to common"
            )
        return problems


@dataclass(frozen=True, slots=True)
class Move:
    """A reply's next search (`query`) or its `answer`, and the reply's `text` for later prompts."""

    query: str = ""
    answer: str = ""
    text: str = ""


class Rounds:
    """The searches and calls of one question, recorded in its trace; roles of calls begin with the system's name.

    Args:
        system: The system's name.
        question: The question as the model reads it.
        query: The question alone, the first search.
        tools: Models and indexes.
        options: The options of the loop.
    """

    def __init__(self, system: str, question: str, query: str, tools: Tools, options: RoundOptions) -> None:
        self.trace = Trace(question)
        self.retriever: Retriever = need(tools.retriever, "retriever", system)
        prompts = load_prompts((system, *COMMON_READER), options.prompts)
        self.llm = client_of(system, tools, self.trace, prompts, options.repairs)
        self._options = options
        self._first_query = query
        # Normalised queries that were searched.
        self._searched: set[str] = set()

    def chat(self, user: str) -> list[Message]:
        """A chat with the system's prompt and one user turn."""
        return self.llm.prompts.chat(self.llm.system, user)

    async def search(self, query: str) -> list[Passage]:
        """Search, record the search as a step, and return the passages that were found, best first."""
        self._searched.add(normalize_answer(query))
        hits = await self.retriever.retrieve(query, self._options.top_k)
        self.trace.add_step(Step(query), hits)
        return passages_of_hits(hits)

    @property
    def shown(self) -> list[Passage]:
        """As many passages as a prompt may have: the best of each search, in the order found."""
        return best_passages(passages_by_round(self.trace), self._options.max_passages)

    async def next_move(self, call: str, messages: list[Message], read: Callable[[str], Move]) -> Move | None:
        """Ask the model for its next move; the trace records the reply, and the reason if the loop ends.

        Returns:
            The move; None if no search is left, the query was searched before, or no reply could be read.
        """
        replies: list[str] = []

        def parse(text: str) -> Move:
            """Keep a reply, which becomes the recorded action, and read its move."""
            replies.append(text)
            return read(without_thoughts(text).strip())

        try:
            move = await self.llm.ask(call, messages, parse, self._options.max_thought_tokens)
        except UnusableReply as error:
            self.trace.tally(f"{call}.{error.reason}")
            self.trace.malformed += 1
            self.trace.add_action(replies[-1], None)
            self.trace.stop_reason = "malformed"
            return None
        self.trace.add_action(replies[-1], "answer" if move.answer else "search", move.query)
        if move.answer:
            self.trace.stop_reason = "sufficient"
            return move
        if call != "think" and asks_nothing(move.query):  # a thought need not ask
            self.trace.stop_reason = "no_question"
        else:
            rounds, max_rounds = len(self.trace.steps), self._options.max_rounds
            self.trace.stop_reason = reason_to_stop(move.query, self._searched, rounds, max_rounds)
        return None if self.trace.stop_reason else move

    async def answer_by_reader(self, question: str, passages: list[Passage]) -> str:
        """The reader's short answer to a question from some passages, whatever length the main answer has."""
        return await answer_from(question, passages, self.llm, replace(self._options, answer="short"))

    async def finish(self, answer: str = "") -> Trace:
        """End the question and return its trace; the reader answers if the answer is missing or must be long.

        The evidence is the passages alone: thoughts and intermediate answers are no facts that were found. If the loop
        made no search, since no reply could be read, the question is searched first.
        """
        needs_reader = not answer or self._options.answer == "long"
        if needs_reader and not self.trace.steps:
            await self.search(self._first_query)

        async def answer_or_read() -> str:
            """The answer that the loop has found, or that of a reader of all passages if there is none."""
            if not needs_reader:
                return answer
            self.trace.tally("answered_by_reader")
            return await answer_from(self.trace.question, self.shown, self.llm, self._options)

        rounds = passages_by_round(self.trace)
        return await finish(self.trace, self._options, self.llm, Found(rounds), answer_or_read)


class Announced(NamedTuple):
    """An answer that a line announces, and the words that announce it, such as "So the answer is:"."""

    words: str
    answer: str


def announced_answer(lines: Sequence[Line], number: int) -> Announced | None:
    """The answer of a line such as "So the answer is: x" or "Answer: x", or below it if the line ends there.

    None if the line announces no answer, or a refusal.
    """
    line = lines[number]
    phrase = ANSWER_PHRASE.search(line.text)
    words, answer = "So the answer is:", line.text
    if phrase:
        words, answer = line.text[: phrase.end()].strip(), line.text[phrase.end() :]
    elif line.label not in ANSWER_LABELS:
        return None
    if not answer.strip() and number + 1 < len(lines):
        answer = lines[number + 1].text
    answer = without_period(bare_answer(answer))
    says_something = any(map(str.isalnum, answer))
    return Announced(words, answer) if says_something and not is_refusal(answer) else None


def reason_to_stop(query: str, searched: set[str], rounds: int, max_rounds: int) -> str:
    """Say why a query is not searched: no round is left, or it was searched before; "" if it can be searched.

    `searched` holds normalised queries.
    """
    if rounds == max_rounds:
        return "max_rounds"
    if normalize_answer(query) in searched:
        return "repeated_subquery"
    return ""
