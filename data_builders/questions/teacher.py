"""A teacher LLM that words drafts as questions and answers them as a check (`tripletune/prompts/data/questions_*.md`).

A program checks each wording; a bad wording is sent back once. Then the teacher answers without seeing the draft. With
all passages its answer must agree with the draft's answer; with one passage, or with none, it must not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from tripletune.core.calls import LLMClient, Sampling, UnusableReply
from tripletune.core.concurrency import all_of
from tripletune.core.data.answers import YES_NO, normalize_name
from tripletune.core.data.passages import Passage
from tripletune.core.data.words import words
from tripletune.data_builders.questions import CHAIN_KINDS, COMPARISON
from tripletune.data_builders.questions.facts import Draft
from tripletune.data_builders.questions.names import contains_name, searchable
from tripletune.data_builders.subq.checks import read_subquery
from tripletune.data_builders.subq.teacher import document_text
from tripletune.llm.question_client import PromptSet, load_prompts
from tripletune.llm.refusals import is_refusal
from tripletune.llm.replies import ask
from tripletune.llm.reply_json import find_json, without_thoughts

WORD_ROLE, READ_ROLE, RECALL_ROLE = "questions.word", "questions.read", "questions.recall"
# Maximum tokens of a reply.
MAX_TOKENS = {WORD_ROLE: 512, READ_ROLE: 64, RECALL_ROLE: 64}
_REPLY_FORM = 'write one JSON object {"question": "...", "subqueries": ["...", ...]} and nothing else'


def prompt_name(role: str) -> str:
    """The name of a role's prompt: "questions_word" for "questions.word". Names of files have no dots."""
    return role.replace(".", "_")


# Loads the three system prompts; our prompts replace those that a custom folder lacks.
load_question_prompts = partial(load_prompts, tuple(prompt_name(role) for role in MAX_TOKENS), room="data")


class Rejection(StrEnum):
    """Why a draft gives no question; the card shows the values."""

    UNREADABLE = "the teacher's reply cannot be read"
    NO_QUESTION = "the teacher sees no question that somebody would ask"
    START = "the question does not name what it starts from"
    GIVES_AWAY = "the question names the answer or a name on the way to it"
    COPIED = "the wording is copied from a passage"
    SUBQUERY = "a sub-query does not name its subject, or names what it asks for"
    REPEATED = "the same question was asked before"
    NOT_ANSWERED = "with all passages, the teacher gives another answer or none"
    ONE_IS_ENOUGH = "with one passage alone, the teacher gives the answer"
    FROM_MEMORY = "the teacher knows the answer without a passage"
    CALL_REFUSED = "a call to the teacher can't be answered"

    @classmethod
    def of(cls, reason: str) -> Rejection:
        """The rejection with this text; readers of JSON have reasons of their own, which mean an unreadable reply."""
        if reason in list(cls):
            return cls(reason)
        return cls.UNREADABLE


class Wording(NamedTuple):
    """A question in words, and the sub-query of each of its facts."""

    question: str
    subqueries: tuple[str, ...]


class ReadingCall(NamedTuple):
    """A call that checks a question: the teacher answers it from some of the passages.

    Attributes:
        role: The role of the call.
        text: The user's turn.
        must_agree: Whether the reply must agree with the draft's answer; otherwise it must not.
        rejection: Why the draft is rejected if the reply is wrong.
    """

    role: str
    text: str
    must_agree: bool
    rejection: Rejection


async def make_question(
    client: LLMClient,
    prompts: PromptSet,
    sampling: Mapping[str, Sampling],
    draft: Draft,
    passages: Sequence[Passage],
    copied: int,
) -> Wording:
    """Return the checked question of a draft; if there is none, `UnusableReply` mostly has a `Rejection` as reason.

    Args:
        sampling: The sampling of each role.
        passages: One passage per fact.
        copied: Number of consecutive words that a question may not share with a passage.
    """
    wording = await ask(
        client,
        prompts.chat(prompt_name(WORD_ROLE), wording_text(draft, passages)),
        lambda reply: read_wording(reply, draft, passages, copied),
        role=WORD_ROLE,
        sampling=sampling[WORD_ROLE],
        question_id=draft.id,
    )
    if wording is None:
        raise UnusableReply(Rejection.NO_QUESTION, "")
    calls = reading_calls(wording.question, passages)
    waiting = []
    for call in calls:
        chat = prompts.chat(prompt_name(call.role), call.text)
        waiting.append(client.chat(chat, role=call.role, sampling=sampling[call.role], question_id=draft.id))
    # The calls are made at once, so that a batch backend needs one round.
    replies = await all_of(waiting)
    for call, reply in zip(calls, replies, strict=True):
        if not reply.is_whole:
            raise UnusableReply("cut_off", f"{wording.question} {reply.text}")
        if agrees(without_thoughts(reply.text).strip(), draft) != call.must_agree:
            raise UnusableReply(call.rejection, f"{wording.question} {reply.text}")
    return wording


def wording_text(draft: Draft, passages: Sequence[Passage]) -> str:
    """The user's turn that asks for a question.

    Chains of all lengths have one instruction, while comparisons say which test they ask for. The facts stand in
    reasoning order, since the sub-queries of the reply are checked against them one by one.
    """
    kind: str = draft.kind
    if kind in CHAIN_KINDS:
        kind = "chain"
    elif draft.test:
        kind = f"{kind} ({draft.test})"
    lines = [f"Kind: {kind}", "Facts:"]
    for number, fact in enumerate(draft.facts, 1):
        lines.append(f"{number}. {' | '.join(fact.triple.as_list())}")
    lines += [f"Answer: {draft.answer}", "", "Passages:"]
    numbered = [f"[{number}] {document_text(passage)}" for number, passage in enumerate(passages, 1)]
    return "\n".join([*lines, "\n\n".join(numbered)])


def reading_calls(question: str, passages: Sequence[Passage]) -> list[ReadingCall]:
    """The calls that check a question: without passages, with all passages, and with each of several alone."""
    calls = [
        ReadingCall(RECALL_ROLE, f"Question: {question}", must_agree=False, rejection=Rejection.FROM_MEMORY),
        ReadingCall(READ_ROLE, _reading_text(question, passages), must_agree=True, rejection=Rejection.NOT_ANSWERED),
    ]
    if len(passages) > 1:
        for passage in passages:
            text = _reading_text(question, [passage])
            calls.append(ReadingCall(READ_ROLE, text, must_agree=False, rejection=Rejection.ONE_IS_ENOUGH))
    return calls


def _reading_text(question: str, passages: Sequence[Passage]) -> str:
    """The user's turn of a reading call: documents first, so that calls with the same documents share a beginning."""
    documents = "\n\n".join(map(document_text, passages))
    return f"Passages:\n{documents}\n\nQuestion: {question}"


def read_wording(text: str, draft: Draft, passages: Sequence[Passage], copied: int) -> Wording | None:
    """Read and check the reply to `wording_text`; None if the teacher sees no question.

    Args:
        text: The reply.
        draft: The facts that the question is about.
        passages: Their passages, from which the question must not be copied.
        copied: Number of consecutive words that it may not share with a passage.

    Raises:
        UnusableReply: The reply can't be read, or breaks a rule; the teacher is told which.
    """
    reply = find_json(text, dict, advice=_REPLY_FORM)
    stated_question = reply.get("question")
    stated_subqueries = reply.get("subqueries")
    if stated_question == "":
        return None
    if not isinstance(stated_subqueries, list) or len(stated_subqueries) != len(draft.facts):
        raise UnusableReply(Rejection.UNREADABLE, f"It needs {len(draft.facts)} sub-queries; {_REPLY_FORM}.")
    question = read_subquery(str(stated_question))
    subqueries = tuple(read_subquery(str(subquery)) for subquery in stated_subqueries)
    _check_names(question, draft)
    _check_not_copied(question, passages, copied)
    for subquery, given, sought in zip(subqueries, draft.given, draft.sought, strict=True):
        _check_subquery(subquery, given, sought)
    return Wording(question, subqueries)


def _check_names(question: str, draft: Draft) -> None:
    """Check that a question names what it starts from, and no name that it asks for."""
    searchable_question = searchable(question)
    for name in draft.named:
        if not contains_name(searchable_question, name):
            raise UnusableReply(Rejection.START, f'The question must name "{name}".')
    searchable_given = searchable(" ".join(draft.named))
    for name in draft.sought:
        # A name inside a given name gives nothing away: "Paris" in "the Paris Opera".
        if contains_name(searchable_question, name) and not contains_name(searchable_given, name):
            raise UnusableReply(Rejection.GIVES_AWAY, f'The question must not name "{name}": describe it.')


def _check_not_copied(question: str, passages: Sequence[Passage], length: int) -> None:
    """Check that a question shares no `length` consecutive words with a passage."""
    runs_of_passages: set[tuple[str, ...]] = set()
    for passage in passages:
        runs_of_passages.update(_word_runs(passage.content, length))
    for run in _word_runs(question, length):
        if run in runs_of_passages:
            raise UnusableReply(Rejection.COPIED, f'"{" ".join(run)}" stands in a passage: use words of your own.')


def _word_runs(text: str, length: int) -> list[tuple[str, ...]]:
    """Each run of `length` consecutive words of a text; none for a shorter text."""
    text_words = words(text)
    return [tuple(text_words[start : start + length]) for start in range(len(text_words) - length + 1)]


def _check_subquery(subquery: str, given: str, sought: str) -> None:
    """Check that a sub-query names what is given, and not what it asks for.

    Raises:
        UnusableReply: It does not; the teacher is told both names.
    """
    searchable_subquery = searchable(subquery)
    names_sought = contains_name(searchable_subquery, sought) and not contains_name(searchable(given), sought)
    if names_sought or not contains_name(searchable_subquery, given):
        advice = f'The sub-query "{subquery}" must name "{given}" and must not name "{sought}".'
        raise UnusableReply(Rejection.SUBQUERY, advice)


def agrees(reply: str, draft: Draft) -> bool:
    """Whether a short answer equals the draft's answer, even with more or fewer words.

    One may contain the other ("Paris" and "Paris, France"). For yes and no only the first word counts, since the words
    after it explain.
    """
    first_line = reply.partition("\n")[0].removeprefix("Answer:")
    said = normalize_name(first_line)
    answer = normalize_name(draft.answer)
    if said == answer:
        return True
    if not said or is_refusal(first_line):
        return False
    if answer in YES_NO:
        return said.split()[0] == answer
    searchable_reply = searchable(first_line)
    if not contains_name(searchable_reply, answer) and not contains_name(searchable(answer), said):
        return False
    if draft.kind == COMPARISON:
        # A reply that names both entities does not choose.
        for name in draft.given:
            if name != draft.answer and contains_name(searchable_reply, name):
                return False
    return True
