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
from tripletune.core.data.answers import YES_NO, normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.words import words
from tripletune.data_builders.questions import CHAIN_KINDS, COMPARISON
from tripletune.data_builders.questions.facts import Draft, names, spoken
from tripletune.data_builders.subq.checks import read_subquery
from tripletune.data_builders.subq.teacher import document_text
from tripletune.llm.question_client import PromptSet, load_prompts
from tripletune.llm.refusals import is_refusal
from tripletune.llm.replies import ask
from tripletune.llm.reply_json import find_json, without_thoughts

WORD_ROLE, READ_ROLE, RECALL_ROLE = "questions.word", "questions.read", "questions.recall"
# Maximum tokens of a reply.
MAX_TOKENS = {WORD_ROLE: 512, READ_ROLE: 64, RECALL_ROLE: 64}
_PROMPT_NAMES = tuple(role.replace(".", "_") for role in MAX_TOKENS)
# Loads the three system prompts; our prompts replace those that a custom folder lacks.
load_question_prompts = partial(load_prompts, _PROMPT_NAMES, room="data")
_REPLY = 'write one JSON object {"question": "...", "subqueries": ["...", ...]} and nothing else'


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


class Wording(NamedTuple):
    """A question in words, and the sub-query of each of its facts."""

    question: str
    subqueries: tuple[str, ...]


async def make_question(
    client: LLMClient, prompts: PromptSet, sampling: Mapping[str, Sampling], draft: Draft, passages: Sequence[Passage],
    copied: int,
) -> Wording:  # fmt: skip
    """Return the checked question of a draft; if there is none, `UnusableReply` mostly has a `Rejection` as reason.

    Args:
        sampling: The sampling of each role.
        passages: One passage per fact.
        copied: Number of consecutive words that a question may not share with a passage.
    """

    made = await ask(
        client, prompts.chat("questions_word", wording_text(draft, passages)),
        lambda reply: read_wording(reply, draft, passages, copied),
        role=WORD_ROLE, sampling=sampling[WORD_ROLE], question_id=draft.id,
    )  # fmt: skip
    if made is None:
        raise UnusableReply(Rejection.NO_QUESTION, "")
    turns = reading_calls(made.question, passages)
    chats = ((role, prompts.chat(role.replace(".", "_"), text)) for role, text in turns)
    asked = (client.chat(chat, role=role, sampling=sampling[role], question_id=draft.id) for role, chat in chats)
    # The calls are made at once, so that a batch backend needs one round.
    replies = await all_of(asked)
    wanted = [Rejection.FROM_MEMORY, Rejection.NOT_ANSWERED, *[Rejection.ONE_IS_ENOUGH] * len(passages)]
    for reply, reason in zip(replies, wanted):
        if agrees(without_thoughts(reply.text).strip(), draft) is not (reason is Rejection.NOT_ANSWERED):
            raise UnusableReply(reason, f"{made.question} {reply.text}")
    return made


def wording_text(draft: Draft, passages: Sequence[Passage]) -> str:
    """The user's turn that asks for a question."""
    kind = "chain" if draft.kind in CHAIN_KINDS else f"{draft.kind} ({draft.test})" if draft.test else draft.kind
    facts = [f"{n}. {' | '.join(fact.triple.as_list())}" for n, fact in enumerate(draft.facts, 1)]
    head = "\n".join([f"Kind: {kind}", "Facts:", *facts, f"Answer: {draft.answer}"])
    shown = [f"[{number}] {document_text(passage)}" for number, passage in enumerate(passages, 1)]
    return "\n\n".join([head, f"Passages:\n{shown[0]}", *shown[1:]])


def reading_calls(question: str, passages: Sequence[Passage]) -> list[tuple[str, str]]:
    """Role and user turn of the calls that check a question: without passages, with all passages, with each alone."""
    sets = [passages, *([one] for one in passages if len(passages) > 1)]
    shown = ["\n\n".join(map(document_text, some)) for some in sets]
    return [
        (RECALL_ROLE, f"Question: {question}"),
        *((READ_ROLE, f"Passages:\n{text}\n\nQuestion: {question}") for text in shown),
    ]


def read_wording(text: str, draft: Draft, passages: Sequence[Passage], copied: int) -> Wording | None:
    """Read and check the reply to `wording_text`; None if the teacher sees no question."""
    value = find_json(text, dict, advice=_REPLY)
    asked, found = value.get("subqueries"), value.get("question")
    if found == "":
        return None
    if not isinstance(asked, list) or len(asked) != len(draft.facts):
        raise UnusableReply(Rejection.UNREADABLE, f"It needs {len(draft.facts)} sub-queries; {_REPLY}.")
    question, *subqueries = (read_subquery(str(one)) for one in (found, *asked))
    plain, given = spoken(question), spoken(" ".join(draft.named))
    for name in draft.named:
        if not names(plain, name):
            raise UnusableReply(Rejection.START, f'The question must name "{name}".')
    for name in draft.sought:
        if names(plain, name) and not names(given, name):
            raise UnusableReply(Rejection.GIVES_AWAY, f'The question must not name "{name}": describe it.')
    read = {run for passage in passages for run in _runs(passage.content, copied)}
    if same := next((run for run in _runs(question, copied) if run in read), None):
        raise UnusableReply(Rejection.COPIED, f'"{" ".join(same)}" stands in a passage: use words of your own.')
    for subquery, one, other in zip(subqueries, draft.given, draft.sought):
        plain = spoken(subquery)
        if not names(plain, one) or (names(plain, other) and not names(spoken(one), other)):
            must = f'must name "{one}" and must not name "{other}"'
            raise UnusableReply(Rejection.SUBQUERY, f'The sub-query "{subquery}" {must}.')
    return Wording(question, tuple(subqueries))


def _runs(text: str, length: int) -> list[tuple[str, ...]]:
    found = words(text)
    return list(zip(*(found[start:] for start in range(length))))


def agrees(reply: str, draft: Draft) -> bool:
    """Whether a short answer equals the draft's answer, even with more or fewer words."""
    first = reply.partition("\n")[0].removeprefix("Answer:")
    said, answer = normalize_answer(first), normalize_answer(draft.answer)
    if said == answer or not said or is_refusal(first):
        return said == answer
    if answer in YES_NO:
        return said.split()[0] == answer
    others = [name for name in draft.given if draft.kind == COMPARISON and name != draft.answer]
    close = names(spoken(first), answer) or names(spoken(answer), said)
    return close and not any(names(spoken(first), name) for name in others)
