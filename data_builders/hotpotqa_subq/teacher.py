"""A teacher LLM that labels questions: documents, sub-queries and triples (RAS, sections C.1 to C.3, figures 7, 8, 19).

For a question with n kept documents it is asked

1. once which of the documents are needed, in reasoning order (figure 7);
2. n times for a sub-query, one document after another with the earlier sub-queries in view (figure 8);
3. n times for triples, one document each and nothing else (figure 19), so that a paragraph that occurs in many
   questions is one call in the ledger.

Sub-queries and triples are asked for side by side. The first sub-query is asked for although the label puts the main
question in its place by default (`first_subquery`): the next ones are written with it in view, as in the paper, and
`--first-subquery generated` then costs nothing more. Only where a single document is kept is it left out, since
nothing would use it. What is not used as a label is not checked as one either.

Every reply is checked (`data_builders.reply_checks`); a bad one is sent back once with what is wrong, and then the
question is left out with the reason.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from tripletune.data_builders.hotpotqa_subq.annotations import KnowsDirectAnswers, TripleFile
from tripletune.data_builders.hotpotqa_subq.labelling import FirstSubquery
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question, UnlabelledQuestion
from tripletune.data_builders.hotpotqa_subq.reply_checks import (
    KeptDocuments,
    check_answer_kept,
    check_subquery,
    read_documents,
    read_subquery,
    read_triples,
)
from tripletune.models.data.passages import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm.client import LLMClient, Message, Sampling
from tripletune.models.llm.replies import UnusableReply, ask
from tripletune.rag.systems import load_prompts

PROMPT_FOLDER = Path(__file__).parents[1] / "prompts"
PROMPT_NAMES = ("subq_filter", "subq_query", "subq_triples")
Shown = Literal["supporting", "all"]
SHOWN: tuple[Shown, ...] = ("supporting", "all")
FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE = "subq.filter", "subq.query", "subq.triples"
ROLES = (FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE)
# Longest replies in tokens. A paragraph of HotpotQA gives 13 triples on average, some 25 tokens each as JSON.
MAX_TOKENS = {FILTER_ROLE: 128, QUERY_ROLE: 192, TRIPLES_ROLE: 1536}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The three system prompts.

    Attributes:
        filter: Which documents are needed.
        query: One sub-query for a document.
        triples: The facts of a document.
        files: Where each comes from, by name.
    """

    filter: str
    query: str
    triples: str
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path | None = None) -> Prompts:
        """Read the prompt files; those that `folder` does not hold are ours.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: a file in it is not one of the prompts, or is empty.
        """
        read = load_prompts(PROMPT_NAMES, folder, PROMPT_FOLDER)
        texts, files = read.texts, dict(read.files)
        return cls(texts["subq_filter"], texts["subq_query"], texts["subq_triples"], files)

    def digests(self) -> dict[str, str]:
        """SHA-256 of each prompt by its file."""
        texts = (self.filter, self.query, self.triples)
        return {
            file: hashlib.sha256(text.encode()).hexdigest()
            for file, text in zip(self.files.values(), texts, strict=True)
        }


class TripleSource(Protocol):
    """Where the triples of a document come from, f_t2t of Algorithm 1: a teacher, a store, or a trained model.

    Attributes:
        name: As the card calls it.
    """

    name: str

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """The facts of one of the question's passages; empty when there are none."""
        ...


class StoredTriples:
    """Triples that were extracted before, from JSON lines `{"title", "text", "triples"}` (RAS, section F.2)."""

    def __init__(self, path: str | Path, issues: Counter[str] | None = None) -> None:
        self.name = f"triples of {Path(path).name}"
        self._file = TripleFile(path, issues)

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """See `TripleSource`."""
        return self._file.of(question.passages[document])


class LLMTeacher:
    """A teacher behind an LLM client; see the module for what it asks. Implements `Teacher` and `TripleSource`.

    Args:
        client: Answers the calls; it holds cache, limits and retries.
        prompts: The system prompts; None: ours.
        triples_from: Gives the triples instead of the teacher.
        shown: Documents the filter chooses from: "supporting", the benchmark's supporting passages as in figure 7,
            or "all" passages of the question, five times the tokens in HotpotQA.
        first_subquery: What becomes q_0; see `LabelOptions`.
        sampling: Temperature, top_p and seed of the calls; None: greedy. The length of replies is `MAX_TOKENS`.

    Attributes:
        name: As the card calls it.
        calls: Replies that were asked for, by stage, those from the ledger included and repair turns not.
        refused: Replies that were turned down, those of repair turns included, by stage and reason.
        repairs: Replies that became usable in the repair turn, by stage.
        recovered: Replies that were not in the form asked for and could be read all the same, by stage and form.
        malformed: Triples that were left out of usable replies since they were malformed.
    """

    def __init__(
        self,
        client: LLMClient,
        prompts: Prompts | None = None,
        triples_from: TripleSource | None = None,
        shown: Shown = "supporting",
        first_subquery: FirstSubquery = "main_question",
        sampling: Sampling | None = None,
    ) -> None:
        self.name = client.model if triples_from is None else f"{client.model}, {triples_from.name}"
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.repairs: Counter[str] = Counter()
        self.recovered: Counter[str] = Counter()
        self.malformed = 0
        self._client, self._prompts, self._triples_from = client, prompts or Prompts.load(), triples_from
        self._shown, self._first_subquery, self._sampling = shown, first_subquery, sampling or Sampling()

    async def helpful_documents(self, question: Question) -> list[int]:
        """See `Teacher`."""
        # In the order of the row: that of the supporting facts often is the reasoning order, which is asked for.
        shown = sorted(question.supporting) if self._shown == "supporting" else list(range(len(question.passages)))

        def parse(text: str, recovered: Counter[str]) -> KeptDocuments:
            reply = read_documents(text, len(shown), recovered)
            # "Nothing helps" and "not answerable" are judgements, no mistakes: they are not sent back.
            if reply.numbers and reply.answerable:
                check_answer_kept(question, shown, [shown[number - 1] for number in reply.numbers])
            return reply

        messages = _chat(self._prompts.filter, filter_text(question, shown))
        reply, text = await self._ask(FILTER_ROLE, messages, parse, question)
        if not reply.numbers or not reply.answerable:
            judgement = DropReason.NOT_ANSWERABLE if reply.numbers else DropReason.NO_HELPFUL
            raise UnlabelledQuestion(judgement, "", FILTER_ROLE, text)
        return [shown[number - 1] for number in reply.numbers]

    async def subqueries(self, question: Question, documents: list[int]) -> list[str]:
        """See `Teacher`; one call for each document, with the earlier sub-queries in view."""
        first_is_label = self._first_subquery == "generated"
        if len(documents) == 1 and not first_is_label:
            return [question.question]
        asked: list[str] = []
        for document in documents:
            passage = question.passages[document]

            def parse(text: str, recovered: Counter[str], title: str = passage.title) -> str:
                subquery = read_subquery(text, title, recovered)
                if asked or first_is_label:
                    check_subquery(subquery, question, asked)
                return subquery

            messages = _chat(self._prompts.query, query_text(question, passage, asked))
            subquery, _ = await self._ask(QUERY_ROLE, messages, parse, question)
            asked.append(subquery)
        return asked

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """See `Teacher`."""
        if self._triples_from is not None:
            return await self._triples_from.triples(question, document)
        messages = _chat(self._prompts.triples, triples_text(question.passages[document]))
        found, _ = await self._ask(TRIPLES_ROLE, messages, read_triples, question)
        self.malformed += found.malformed
        return list(found.triples)

    def answers_directly(self, question: Question) -> bool:
        """Whether the client marks the question as answered without retrieval; only recorded replies do."""
        return isinstance(self._client, KnowsDirectAnswers) and self._client.answers_directly(question)

    async def _ask(
        self, role: str, messages: list[Message], parse: Callable[[str, Counter[str]], T], question: Question
    ) -> tuple[T, str]:
        """What a reply says, and the reply; bad ones are counted, and one is sent back."""
        reply, bad, recovered = "", 0, Counter[str]()

        def counted(text: str) -> T:
            nonlocal reply, bad
            reply = text
            recovered.clear()
            try:
                return parse(text, recovered)
            except UnusableReply as error:
                bad += 1
                self.refused[f"{role}: {error.reason}"] += 1
                raise

        self.calls[role] += 1
        drawn = self._sampling
        sampling = Sampling(drawn.temperature, drawn.top_p, MAX_TOKENS[role], drawn.stop, drawn.seed)
        try:
            value = await ask(
                self._client, messages, counted, role=role, sampling=sampling, question_id=question.id, repairs=1
            )
        except UnusableReply as error:
            known = {reason.value: reason for reason in DropReason}
            reason = known.get(error.reason, DropReason.UNREADABLE_REPLY)
            raise UnlabelledQuestion(reason, error.explanation, role, reply) from None
        if bad:
            self.repairs[role] += 1
        self.recovered.update({f"{role}: {form}": n for form, n in recovered.items()})
        return value, reply


def filter_text(question: Question, shown: Sequence[int]) -> str:
    """The user's turn of the document filter: question and numbered documents."""
    documents = "\n\n".join(f"[{number}] {_text(question.passages[index])}" for number, index in enumerate(shown, 1))
    return f"Question: {_folded(question.question)}\n\nDocuments:\n{documents}"


def query_text(question: Question, passage: Passage, earlier: Sequence[str]) -> str:
    """The user's turn of a sub-query: main question, document, earlier sub-queries."""
    parts = [f"Main question: {_folded(question.question)}", f"Document: {_text(passage)}"]
    if earlier:
        parts.append("\n".join(["Earlier sub-queries:", *(f"- {subquery}" for subquery in earlier)]))
    return "\n\n".join(parts)


def triples_text(passage: Passage) -> str:
    """The user's turn of the triple extraction: the document alone."""
    return f"Document: {_text(passage)}"


def _text(passage: Passage) -> str:
    return f"{_folded(passage.title)}\n{_folded(passage.text)}"


def _folded(text: str) -> str:
    # Every text on one line: a line break in a title could be taken for the next document.
    return " ".join(text.split())


def _chat(system: str, user: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]
