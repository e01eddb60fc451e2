"""Several models for several roles, and several servers of one model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tripletune.models.llm import TIMED_OUT, Backend, Completion, LLMClient, Message, Sampling, TransientError

# Seconds in which a server that failed or did not answer in time gets no call while another one is up.
_REST = 10.0


def in_role(values: Mapping[str, Any], role: str, default: Any = None) -> Any:
    """The value of the longest name that is the role or stands before a dot in it: "cirag", "cirag.integrate"."""
    names = [name for name in values if f"{role}.".startswith(f"{name}.")]
    return values[max(names, key=len)] if names else default


class RoleClients(LLMClient):
    """An `LLMClient` that gives the calls of some roles, see `in_role`, to their own clients."""

    def __init__(self, default: LLMClient, roles: Mapping[str, LLMClient]) -> None:
        self.model, self.default, self.roles = default.model, default, dict(roles)
        self.send_temperature = default.send_temperature

    def load(self) -> None:
        """Load all models that are on this machine."""
        for client in (self.default, *self.roles.values()):
            client.load()

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of a chat as the default model reads it."""
        return self.default.count_tokens(messages)

    def pending_message(self) -> str | None:
        """See `Endpoint.pending_message`; of all models."""
        told = [client.pending_message() for client in (self.default, *self.roles.values())]
        return " ".join(text for text in told if text) or None

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `LLMClient.chat`."""
        client: LLMClient = in_role(self.roles, role, self.default)
        return await client.chat(messages, role=role, sampling=sampling, question_id=question_id)

    async def close(self) -> None:
        """Close all clients."""
        await asyncio.gather(*(client.close() for client in (self.default, *self.roles.values())))


class Servers(Backend):
    """A `Backend` over several servers of one model: a call goes to the least busy one, and to the next if it fails."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.model, self._backends = backends[0].model, backends
        self.send_temperature = backends[0].send_temperature
        self._busy, self._rests = [0] * len(backends), [0.0] * len(backends)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat; see `models.llm.Backend`.

        Raises:
            TransientError: no server answers; what the last one said.
        """
        left = list(range(len(self._backends)))
        while True:
            now = time.monotonic()
            place = min(left, key=lambda one: (self._rests[one] > now, self._busy[one]))
            left.remove(place)
            self._busy[place] += 1
            try:
                return await self._backends[place].complete(messages, sampling)
            except (TransientError, asyncio.CancelledError) as error:
                if isinstance(error, TransientError) or TIMED_OUT in error.args:
                    self._rests[place] = time.monotonic() + _REST
                if not left or isinstance(error, asyncio.CancelledError):
                    raise
            finally:
                self._busy[place] -= 1

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(backend.close() for backend in self._backends))
