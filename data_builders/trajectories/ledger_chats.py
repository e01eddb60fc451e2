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

from tripletune.core.calls import Message, ends_reply
from tripletune.llm.ledger import open_ledger
from tripletune.llm.question_client import CALL_NAME
from tripletune.llm.replies import REPAIR_ROLE
from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE, decision_text, read_decision
from tripletune.rag.systems.cirag.shortening import shown_candidates


class Chat(NamedTuple):
    """One chat of a question with its last reply.

    Attributes:
        model: The teacher.
        messages: All turns; the last one is the last reply.
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
    """The calls of one role in a ledger, by question; a context manager.

    Args:
        path: The ledger.
        role: Full name of the role, such as "cirag.integrate". Calls of its repair turns are read too.
        model: Read only the calls to this model; None: to any model.
    """

    def __init__(self, path: str | Path, role: str, model: str | None = None) -> None:
        self.role = role
        self._model = model
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

        A call that a later one continues is part of the later chat, and would else be learned twice. `keys` selects the
        calls of one run of the question, by the start of their keys; None takes all calls.
        """
        calls = list(self._answered_calls(question_id, keys=keys))
        repairs = list(self._answered_calls(question_id, keys=keys, of_repairs=True))
        answers = {call.name(): call.text for call in calls if not call.cut_off}
        # The names of calls that a later call continues: those that end before one of its assistant turns.
        continued: set[str] = set()
        for call in calls:
            continued.update(call.name(place) for place in _assistant_turns(call.messages))
        return [self._chat_that_ends_with(call, answers, repairs) for call in calls if call.name() not in continued]

    def corpus_chats(self) -> Iterator[Chat]:
        """Stream the calls that read a corpus instead of a question, each as a chat."""
        repairs = list(self._answered_calls("", of_repairs=True))
        for call in self._answered_calls(""):
            yield self._chat_that_ends_with(call, {}, repairs)

    def _answered_calls(
        self, question_id: str, keys: Sequence[str] | None = None, of_repairs: bool = False
    ) -> Iterator[_Call]:
        """The answered calls of a question ("": of the corpus), or those of its repair turns, in stored order."""
        query = (
            "SELECT model, sampling, messages, text, finish_reason FROM chosen JOIN calls ON calls.id = call_id "
            "WHERE question_id = ? AND repair = ? AND status = 'ok' AND is_reply(text, finish_reason) "
            "AND (? IS NULL OR model = ?) "
            f"AND (? IS NULL OR substr(key, 1, {CALL_NAME}) IN (SELECT value FROM json_each(?))) ORDER BY calls.id"
        )
        wanted = None if keys is None else json.dumps(keys)
        values = (question_id, of_repairs, self._model, self._model, wanted, wanted)
        with closing(self._connection.execute(query, values)) as rows:
            for model, sampling, messages, text, finish_reason in rows:
                yield _Call(model, sampling, json.loads(messages), text, not ends_reply(finish_reason))

    def _chat_that_ends_with(self, call: _Call, answers: Mapping[str, str], repairs: Sequence[_Call]) -> Chat:
        """The chat that ends with a call.

        Replies are read as the loop read them, because a student must learn what the loop understood and not the words
        around it.

        Args:
            answers: Replies of the question's calls by `_Call.name`: an assistant turn that answers one is learned.
            repairs: The question's repair turns.

        Returns:
            The chat. Its last turn, and whether it is readable, are those of the repair where the loop used one.
        """
        is_integration = self.role == INTEGRATE_ROLE
        read = _read_integration if is_integration else _read_plain
        learned = [False] * len(call.messages)
        faults: list[str] = []
        for place in _assistant_turns(call.messages):
            answer = answers.get(call.name(place))
            if answer is None:
                continue
            learned[place] = True
            reply = read(call.messages[:place], answer)
            faults += reply.faults
            # The turn is what the loop went on with: where the reply says something else, a repair was used.
            if reply.text is None or reply.text.strip() != call.messages[place]["content"].strip():
                faults.append("repaired")
        text = call.text
        cut_off = call.cut_off
        last = read(call.messages, text)
        faults += last.faults
        # CIRAG's loop sends back only what it can't use; of other loops we can't tell, so a repair always counts.
        if last.text is None or not is_integration:
            repair = _repair_of(call, repairs)
            if repair is not None:
                text = repair.text
                cut_off = repair.cut_off
                last = read(call.messages, text)
                faults += ["repaired", *last.faults]
        content = text if last.text is None else last.text
        turns = (*call.messages, Message(role="assistant", content=content))
        readable = last.text is not None and not cut_off
        return Chat(call.model, turns, (*learned, True), tuple(faults), readable)


class _Call(NamedTuple):
    """An answered call; `sampling` is its canonical JSON."""

    model: str
    sampling: str
    messages: list[Message]
    text: str
    cut_off: bool

    def name(self, count: int | None = None) -> str:
        """A name that calls of one model and sampling with the same first `count` messages (None: all) share."""
        turns = [(message["role"], message["content"]) for message in self.messages[:count]]
        return json.dumps([self.model, self.sampling, *turns])


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    """The places of the assistant turns."""
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _repair_of(call: _Call, repairs: Sequence[_Call]) -> _Call | None:
    """The last repair turn of a call, or None if the call was not repaired.

    A repair continues the messages of the call, or extends the last of them (`llm.replies.repair_turns`).
    """
    *before, request = call.messages
    for repair in reversed(repairs):
        if (repair.model, repair.sampling) != (call.model, call.sampling):
            continue
        *repair_before, repair_request = repair.messages[: len(call.messages)]
        if repair_before == before and repair_request["content"].startswith(request["content"]):
            return repair
    return None


class RoleModel(NamedTuple):
    """The role of calls, such as "cirag.integrate", and the model that answered them."""

    role: str
    model: str


def roles_with_models(ledger: Path) -> set[RoleModel]:
    """The roles of a ledger's calls with the models that answered them; repairs, which belong to a role, are not."""
    with closing(open_ledger(ledger, create=False)) as connection:
        rows = connection.execute("SELECT DISTINCT role, model FROM uses JOIN calls ON calls.id = call_id")
        pairs = set(map(RoleModel._make, rows))
    return {pair for pair in pairs if not pair.role.endswith(REPAIR_ROLE)}


class _ReadReply(NamedTuple):
    """A reply as the loop understood it (None: not at all), and the names of its faults."""

    text: str | None
    faults: tuple[str, ...] = ()


def _read_plain(messages: Sequence[Message], reply: str) -> _ReadReply:
    """A reply as it is; only an empty one is at fault."""
    if reply.strip():
        return _ReadReply(reply)
    return _ReadReply(None, ("empty_reply",))


def _read_integration(messages: Sequence[Message], reply: str) -> _ReadReply:
    """A CIRAG decision in canonical form, with core triples only from the round's candidates."""
    candidates = shown_candidates(messages[-1]["content"])
    if candidates is None:
        return _ReadReply(None, ("no_candidates",))
    decision = read_decision(reply, candidates)
    if decision.query is None:
        return _ReadReply(None, decision.faults)
    return _ReadReply(decision_text(decision), decision.faults)
