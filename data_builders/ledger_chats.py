"""Trajectories from a call ledger: join the calls of one role and question into chats.

The last call of a loop's chat holds all earlier turns, so a trajectory is this call and its reply. Call B continues
call A if B's messages begin with those of A and an assistant turn; a call that no other call continues ends a chat. An
assistant turn counts as the teacher's if the ledger has the call that it answers, so examples inside a prompt are never
learned.

Only the reading of replies depends on the system: a decision of CIRAG is written as the loop would write it into the
next round, and every fault of a reply has a name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import NamedTuple

from tripletune.core.calls import Message
from tripletune.llm.ledger import open_ledger
from tripletune.llm.question_client import CALL_NAME
from tripletune.llm.replies import REPAIR_ROLE
from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE, read_decision, write_decision
from tripletune.rag.systems.cirag.shortening import shown_candidates


class Chat(NamedTuple):
    """One chat of a question with its last reply.

    Attributes:
        learned: For each turn, whether the model wrote it.
        faults: Names of the replies' faults; "repaired" for a repair turn.
        readable: Whether the last reply could be understood and was not cut off.
    """

    model: str
    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    faults: tuple[str, ...]
    readable: bool


class RoleCalls(AbstractContextManager["RoleCalls"]):
    """The calls of one role in a ledger, by question; a context manager."""

    def __init__(self, path: str | Path, role: str, model: str | None = None) -> None:
        self.role, self._model = role, model
        self._connection = open_ledger(path, create=False)
        # The ledger has no index of calls by question, so a temporary one is made on disk.
        self._connection.execute("PRAGMA temp_store = FILE")
        self._connection.execute("CREATE TEMP TABLE chosen (question_id TEXT, repair INTEGER, call_id INTEGER)")
        self._connection.execute(
            "INSERT INTO chosen SELECT question_id, role <> :role, call_id FROM uses WHERE role IN (:role, :repair)",
            {"role": role, "repair": role + REPAIR_ROLE},
        )
        self._connection.execute("CREATE INDEX temp.chosen_question ON chosen (question_id)")

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def chats(self, question_id: str, keys: Sequence[str] | None = None) -> list[Chat]:
        """The chats of a question, in the order in which their last calls were stored.

        `keys` selects the calls of one run of the question, by the start of their keys; None takes all calls.
        """
        calls, repairs = (list(self._calls(question_id, repair, keys)) for repair in (False, True))
        answers = {call.name(): call.text for call in calls if not call.cut_off}
        continued = {call.name(place) for call in calls for place in _assistant_turns(call.messages)}
        return [self._chat(call, answers, repairs) for call in calls if call.name() not in continued]

    def corpus_chats(self) -> Iterator[Chat]:
        """Stream the calls that read a corpus instead of a question, each as a chat."""
        repairs = list(self._calls("", True))
        return (self._chat(call, {}, repairs) for call in self._calls("", False))

    def _calls(self, question_id: str, repair: bool, keys: Sequence[str] | None = None) -> Iterator[_Call]:
        query = (
            "SELECT model, sampling, messages, text, finish_reason FROM chosen JOIN calls ON calls.id = call_id "
            "WHERE question_id = ? AND repair = ? AND status = 'ok' AND has_text(text) AND (? IS NULL OR model = ?) "
            f"AND (? IS NULL OR substr(key, 1, {CALL_NAME}) IN (SELECT value FROM json_each(?))) ORDER BY calls.id"
        )
        wanted = None if keys is None else json.dumps(keys)
        values = (question_id, repair, self._model, self._model, wanted, wanted)
        with closing(self._connection.execute(query, values)) as rows:
            for model, sampling, messages, text, finish in rows:
                yield _Call((model, sampling), json.loads(messages), text, finish == "length")

    def _chat(self, call: _Call, answers: Mapping[str, str], repairs: Sequence[_Call]) -> Chat:
        """The chat that ends with a call."""
        # The reply as the loop understood it (None: not at all), and what was wrong with it.
        read = _read_integration if self.role == INTEGRATE_ROLE else _as_it_is
        learned, faults = [False] * len(call.messages), list[str]()
        for place in _assistant_turns(call.messages):
            if (reply := answers.get(call.name(place))) is None:
                continue
            learned[place] = True
            understood, found = read(call.messages[:place], reply)
            faults += found
            if understood is None or understood.strip() != call.messages[place]["content"].strip():
                faults.append("repaired")
        text = call.text
        last, found = read(call.messages, text)
        faults += found
        # A loop sends back only what it can't use.
        bad = last is None or self.role != INTEGRATE_ROLE
        if bad and (repaired := _repaired(call, repairs)) is not None:
            text = repaired
            last, found = read(call.messages, text)
            faults += ["repaired", *found]
        cut_off = call.cut_off and text is call.text
        turns = (*call.messages, Message(role="assistant", content=text if last is None else last))
        return Chat(call.maker[0], turns, (*learned, True), tuple(faults), last is not None and not cut_off)


class _Call(NamedTuple):
    """An answered call; `maker` is its model and sampling."""

    maker: tuple[str, str]
    messages: list[Message]
    text: str
    cut_off: bool

    def name(self, count: int | None = None) -> str:
        """A name that calls with the same first `count` messages share."""
        return json.dumps([*self.maker, *([one["role"], one["content"]] for one in self.messages[:count])])


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _repaired(call: _Call, repairs: Sequence[_Call]) -> str | None:
    """The last reply of a call's repair, whose messages continue those of the call or extend the last of them."""
    *kept, last = call.messages
    for one in reversed(repairs):
        *before, asked = one.messages[: len(call.messages)]
        if (one.maker, before) == (call.maker, kept) and asked["content"].startswith(last["content"]):
            return one.text
    return None


def calls_in(ledger: Path) -> set[tuple[str, str]]:
    """Pairs of role and model of a ledger's calls, without repairs."""
    with closing(open_ledger(ledger, create=False)) as connection:
        found = set(connection.execute("SELECT DISTINCT role, model FROM uses JOIN calls ON calls.id = call_id"))
    return {(role, model) for role, model in found if not role.endswith(REPAIR_ROLE)}


def _as_it_is(messages: Sequence[Message], reply: str) -> tuple[str | None, tuple[str, ...]]:
    return (reply, ()) if reply.strip() else (None, ("empty_reply",))


def _read_integration(messages: Sequence[Message], reply: str) -> tuple[str | None, tuple[str, ...]]:
    """A CIRAG decision in canonical form, with core triples only from the round's candidates."""
    if (shown := shown_candidates(messages[-1]["content"])) is None:
        return None, ("no_candidates",)
    decision = read_decision(reply, shown)
    return (None if decision.query is None else write_decision(decision)), decision.faults
