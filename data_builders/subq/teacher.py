"""A teacher LLM that labels questions: documents, sub-queries and triples (RAS, sections C.1 to C.3, figures 7, 8, 19).

The first call asks which documents are needed, in reasoning order. One call per kept document asks for a sub-query and
shows the earlier sub-queries. Another call asks for the document's triples and shows only the document, so that a
paragraph of many questions is one call in the ledger.

By default the main question is the first label (`first_subquery`). If there are several documents, the teacher still
writes the first sub-query, since the later calls show it, as in the paper. A bad reply (`checks`) is sent back once; if
the second reply is bad too, the question is left out with the reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tripletune.core.calls import LLMClient, Message, RepliesPending, Sampling, UnusableReply
from tripletune.core.data.fields import checked, text_field
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Annotation, DropReason, Question, Teacher, UnlabelledQuestion
from tripletune.core.data.triples import Triple
from tripletune.core.rows import required_name, required_text, source_rows
from tripletune.data_builders.subq import FirstSubquery, Shown
from tripletune.data_builders.subq.annotations import PROMPT_FOLDER
from tripletune.data_builders.subq.checks import (
    check_answer_kept,
    check_subquery,
    read_documents,
    read_subquery,
    read_triples,
)
from tripletune.llm.question_client import PromptSet, load_prompts
from tripletune.llm.replies import ask

logger = logging.getLogger(__name__)
PROMPT_NAMES = ("subq_filter", "subq_query", "subq_triples")
# Loads the three system prompts; our prompts replace those that a custom folder lacks.
load_subq_prompts = partial(load_prompts, PROMPT_NAMES, room="data")
FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE, DIRECT_ROLE = "subq.filter", "subq.query", "subq.triples", "subq.direct"
# Maximum tokens of a reply. A paragraph of HotpotQA has 13 triples on average, each of about 25 tokens as JSON.
MAX_TOKENS = {FILTER_ROLE: 128, QUERY_ROLE: 192, TRIPLES_ROLE: 1536}
_TEXT = {"type": "string"}
_TRIPLE = {"type": "array", "items": _TEXT, "minItems": 3, "maxItems": 3}
# The fields of a reply as a JSON schema, by stage.
_FIELDS: dict[str, dict[str, Any]] = {
    FILTER_ROLE: {"documents": {"type": "array", "items": {"type": "integer"}}, "answerable": {"type": "boolean"}},
    QUERY_ROLE: {"question": _TEXT},
    TRIPLES_ROLE: {"triples": {"type": "array", "items": _TRIPLE}},
}
T = TypeVar("T")


class LLMTeacher(Teacher):
    """A teacher behind an LLM client; the module's docstring describes its calls.

    Args:
        prompts: The system prompts; None takes ours.
        triples_from: Triples that were extracted before (RAS, section F.2); None asks the teacher.
        shown: Passages for the filter: the supporting ones, as in figure 7, or all, which take five times the tokens.
        first_subquery: See `options.BuildOptions`.
        sampling: Temperature, top_p and seed of the calls; the length of replies is `MAX_TOKENS`.
        json_schema: Whether each call sends the JSON schema of its reply.

    Attributes:
        calls: Number of calls by role, also those answered from the ledger, without repair turns.
        refused, repairs, recovered: Numbers of replies by role (and form or reason), as `writer.BuildFacts` explains.
        malformed: Number of malformed triples in accepted replies.
    """

    collects_failures = False

    def __init__(
        self,
        client: LLMClient,
        prompts: PromptSet | None = None,
        triples_from: Callable[[Passage], list[Triple]] | None = None,
        shown: Shown = "supporting",
        first_subquery: FirstSubquery = "main_question",
        sampling: Sampling | None = None,
        json_schema: bool = False,
    ) -> None:
        self.name = client.model
        self.malformed = 0
        self.calls = Counter[str]()
        self.refused = Counter[str]()
        self.repairs = Counter[str]()
        self.recovered = Counter[str]()
        self._client = client
        self._prompts = prompts or load_subq_prompts()
        self._triples_from = triples_from
        self._shown = shown
        self._first_subquery = first_subquery
        self._sampling: dict[str, Sampling] = {}
        for role, max_tokens in MAX_TOKENS.items():
            schema = reply_schema(role) if json_schema else None
            self._sampling[role] = replace(sampling or Sampling(), max_tokens=max_tokens, schema=schema)

    async def annotate(self, question: Question) -> list[Annotation]:
        """See `Teacher`; several errors raise one that ends the build, else a pending reply, else the first error."""
        documents = await self.helpful_documents(question)
        calls: list[Coroutine[Any, Any, Any]] = [self.subqueries(question, documents)]
        calls += [self.triples(question, document) for document in documents]
        results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise min(errors, key=_severity_of_error)
        subqueries, *triples = results
        return list(map(Annotation, documents, subqueries, triples))

    async def helpful_documents(self, question: Question) -> list[int]:
        """Indices into `question.passages`, in the order of reading (section C.1 gives none).

        Raises:
            UnlabelledQuestion: The teacher keeps no document, or says that the documents do not answer the question.
        """
        shown = shown_documents(question, self._shown)

        def parse(text: str, recovered: Counter[str]) -> _KeptDocuments:
            """The kept documents in a reply; one that drops the answer's document is sent back."""
            reply = read_documents(text, len(shown), recovered)
            kept = [shown[number - 1] for number in reply.numbers]
            # "Nothing helps" and "not answerable" are judgements, not mistakes, so they are not sent back.
            if kept and reply.answerable:
                check_answer_kept(question, shown, kept)
            return _KeptDocuments(kept, reply.answerable, text)

        kept = await self._ask_teacher(FILTER_ROLE, filter_text(question, shown), parse, question)
        if not kept.documents:
            raise UnlabelledQuestion(DropReason.NO_HELPFUL, "", FILTER_ROLE, kept.reply)
        if not kept.answerable:
            raise UnlabelledQuestion(DropReason.NOT_ANSWERABLE, "", FILTER_ROLE, kept.reply)
        return kept.documents

    async def subqueries(self, question: Question, documents: list[int]) -> list[str]:
        """One sub-query per kept document (section C.2); each call shows the earlier sub-queries.

        A single document needs no sub-query of its own if the main question is its label.
        """
        first_is_label = self._first_subquery == "generated"
        if len(documents) == 1 and not first_is_label:
            return [question.question]
        asked: list[str] = []
        for document in documents:
            passage = question.passages[document]

            def parse(text: str, recovered: Counter[str], title: str = passage.title) -> str:
                """The sub-query in a reply; one that is only shown to later calls is not checked like a label."""
                subquery = read_subquery(text, title, recovered)
                if asked or first_is_label:
                    check_subquery(subquery, question, asked)
                return subquery

            asked.append(await self._ask_teacher(QUERY_ROLE, query_text(question, passage, asked), parse, question))
        return asked

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """The facts of one document, f_t2t(d_i), from the triple file if there is one; malformed ones are counted."""
        if self._triples_from is not None:
            return self._triples_from(question.passages[document])
        text = f"Document: {document_text(question.passages[document])}"
        triples, malformed = await self._ask_teacher(TRIPLES_ROLE, text, lambda reply, _: read_triples(reply), question)
        self.malformed += malformed
        return list(triples)

    async def _ask_teacher(
        self, role: str, text: str, parse: Callable[[str, Counter[str]], T], question: Question
    ) -> T:
        """Return the parsed reply to a user turn; a bad reply is sent back once, and all counts of the class grow.

        Args:
            parse: Reads a reply; counts in its second argument what it recovered.
        """
        rejected = Counter[str]()
        recovered = Counter[str]()

        def parse_alone(reply: str) -> T:
            """Read a reply, and forget what an earlier one recovered."""
            # Only the accepted reply counts, not the one that was sent back.
            recovered.clear()
            return parse(reply, recovered)

        self.calls[role] += 1
        try:
            value = await ask(
                self._client,
                self._prompts.chat(role.replace(".", "_"), text),
                parse_alone,
                role=role,
                sampling=self._sampling[role],
                question_id=question.id,
                repaired=rejected,
            )
        except UnusableReply as error:
            rejected[error.reason] += 1
            raise UnlabelledQuestion(_drop_reason(error.reason), error.explanation, role, error.reply) from None
        finally:
            # Also when a call fails: the reply that was sent back stays rejected.
            for reason, count in rejected.items():
                self.refused[f"{role}: {_drop_reason(reason)}"] += count
        if rejected:
            self.repairs[role] += 1
        for form, count in recovered.items():
            self.recovered[f"{role}: {form}"] += count
        return value


class _KeptDocuments(NamedTuple):
    """What the document filter keeps, as indices into `question.passages`, and the reply that says so."""

    documents: list[int]
    answerable: bool
    reply: str


def _severity_of_error(error: BaseException) -> int:
    """The place of an error among several: the one that ends the build comes first, the question's own last.

    A question that is left out would hide that its other calls wait, or that the server is down.
    """
    if isinstance(error, UnlabelledQuestion):
        return 2
    if isinstance(error, RepliesPending):
        return 1
    return 0


def _drop_reason(reason: str) -> DropReason:
    """The `DropReason` with this text; readers of JSON have reasons of their own, which mean an unreadable reply."""
    if reason in list(DropReason):
        return DropReason(reason)
    return DropReason.UNREADABLE_REPLY


def reply_schema(role: str) -> str:
    """The JSON schema of the replies of a stage, as JSON text."""
    fields = _FIELDS[role]
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return json.dumps(schema)


def shown_documents(question: Question, shown: Shown) -> list[int]:
    """Indices of the filter's passages in row order, since the order of the facts often shows the reasoning order."""
    if shown == "supporting":
        return sorted(question.supporting)
    return list(range(len(question.passages)))


def filter_text(question: Question, shown: Sequence[int]) -> str:
    """The user's turn of the document filter: question and numbered documents."""
    documents = [f"[{number}] {document_text(question.passages[index])}" for number, index in enumerate(shown, 1)]
    numbered = "\n\n".join(documents)
    return f"Question: {' '.join(question.question.split())}\n\nDocuments:\n{numbered}"


def query_text(question: Question, passage: Passage, earlier: Sequence[str]) -> str:
    """The user's turn of a sub-query: main question, document, earlier sub-queries."""
    parts = [f"Main question: {' '.join(question.question.split())}", f"Document: {document_text(passage)}"]
    if earlier:
        listed = [f"- {subquery}" for subquery in earlier]
        parts.append("\n".join(["Earlier sub-queries:", *listed]))
    return "\n\n".join(parts)


def document_text(passage: Passage) -> str:
    """Title and text, each on one line, so that a line break in them does not look like the next document."""
    return f"{' '.join(passage.title.split())}\n{' '.join(passage.text.split())}"


class BaseModelAnswers:
    """The direct-answer test (RAS, Algorithm 1, lines 3-4): a base model answers without any document, greedily.

    Args:
        client: The client of the base model.
        max_new_tokens: Maximum tokens of an answer.
    """

    def __init__(self, client: LLMClient, max_new_tokens: int = 16) -> None:
        self._client = client
        self._sampling = Sampling(max_tokens=max_new_tokens)
        self._prompt = (PROMPT_FOLDER / "direct_answer.md").read_text(encoding="utf-8").rstrip()

    async def answer(self, question: Question) -> str:
        """The first line of the reply, after which a base model continues with another question."""
        text = self._prompt.replace("{question}", " ".join(question.question.split()))
        turn: Message = {"role": "user", "content": text}
        completion = await self._client.chat([turn], role=DIRECT_ROLE, sampling=self._sampling, question_id=question.id)
        first_line, line_break, _ = completion.text.strip().partition("\n")
        if not completion.is_whole and not line_break:
            # A part of an answer is no answer.
            return ""
        return first_line.strip()


class StoredAnswers:
    """Answers of the direct-answer test from rows `{"question_id", "answer"}`.

    RAS's `subquery_classification.json` is read, too: its rows `{"question", "llm_answer", …}` have no id. Whether an
    answer is right is decided here, not by the similarity in the row.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the file; of several rows with one id or question the first counts.

        A warning counts the rows with another answer, since only the user knows which one is right.
        """
        self._path = path
        # By id, or by the text of the question where a row has no id; ids are no sentences, so both fit in one table.
        self._answers: dict[str, str] = {}
        contradictions = 0
        for where, row in source_rows(str(path)):
            if "llm_answer" in row:
                name, answer = required_text(row, where, "question"), text_field(row, where, "llm_answer")
            else:
                name = required_name(row, where, "question_id")
                answer = checked(row, where, {"answer": str})["answer"]
            contradictions += self._answers.setdefault(name, answer) != answer
        if contradictions:
            logger.warning("%s: %d rows answer a question again, differently; the first counts", path, contradictions)

    async def answer(self, question: Question) -> str:
        """The stored answer, by the question's id or else by its text.

        Raises:
            ValueError: The file has none.
        """
        answer = self._answers.get(question.id, self._answers.get(question.question))
        if answer is None:
            raise ValueError(
                f"{self._path}: no direct answer to question {question.id!r} of {question.source}; "
                "complete the file, or name the model with --direct-answer-model"
            )
        return answer
