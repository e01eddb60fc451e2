"""Calls that are made on other machines: noted there, stored in the ledger here, where later runs find them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from tripletune.models.llm import Completion, LLMClient, Message, RepliesPending, Sampling
from tripletune.models.llm.ledger import PUT, Call, Ledger, make_call, row_of


class NotedCalls(LLMClient):
    """An `LLMClient` that notes the calls of another one.

    Attributes:
        model: The other's.
        notes: A JSON text for each call that was answered; `store_calls` reads them.
    """

    def __init__(self, client: LLMClient) -> None:
        self.model, self._client = client.model, client
        self.notes: list[str] = []

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """See `LLMClient.chat`."""
        completion = await self._client.chat(messages, role=role, sampling=sampling, question_id=question_id)
        call = make_call(self.model, sampling or Sampling(), messages)
        self.notes.append(json.dumps([call, asdict(completion), role, question_id]))
        return completion

    async def close(self) -> None:
        """See `LLMClient.close`."""
        await self._client.close()


class StoredReplies(LLMClient):
    """An `LLMClient` without a model: it has the replies of a ledger, and every other call raises `RepliesPending`."""

    def __init__(self, model: str, ledger: Ledger) -> None:
        self.model, self._ledger = model, ledger

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """See `LLMClient.chat`."""
        stored = self._ledger.get(make_call(self.model, sampling or Sampling(), messages).key)
        if stored is None:
            raise RepliesPending(f"{role}: the ledger has no reply")
        return stored


def store_calls(ledger: Ledger, notes: Iterable[str]) -> None:
    """Store calls that `NotedCalls` noted, in one transaction; of one that is there already the first reply stays."""
    with ledger.transaction() as connection:
        for call, reply, role, question_id in map(json.loads, notes):
            connection.execute(PUT, row_of(Call(*call), Completion(**reply)))
            ledger.use(call[0], role, question_id)
