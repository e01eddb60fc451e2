"""Several servers of one model as one backend. Tested in `tests/llm/test_roles_and_servers.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tripletune.core.calls import TIMED_OUT, Backend, Completion, Message, Sampling, TransientError

# Seconds for which a server that failed or timed out gets no call while another server is available.
_REST = 10.0


class Servers(Backend):
    """A `Backend` over several servers of one model; calls go to the least busy one, or if it fails to another."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        """Take name and abilities from the first server: all come from one set of options, but for the URL."""
        self.model = backends[0].model
        self.behind = backends
        self.send_temperature = backends[0].send_temperature
        self.enforces_schemas = backends[0].enforces_schemas
        self.address = ", ".join(backend.address for backend in backends)
        self._backends = backends
        # Calls in progress by server.
        self._busy = [0] * len(backends)
        # When a server that failed gets calls again (`time.monotonic`).
        self._rests_until = [0.0] * len(backends)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat by the least busy server; see `core.calls.Backend`.

        A server that fails rests for a while, and the call goes to another one. If all fail, the last error is raised,
        and the client's retries begin again with all of them.
        """
        untried = list(range(len(self._backends)))
        while True:
            server = self._least_busy(untried)
            untried.remove(server)
            self._busy[server] += 1
            try:
                return await self._backends[server].complete(messages, sampling)
            except TransientError:
                self._let_rest(server)
                if not untried:
                    raise
            except asyncio.CancelledError as error:
                # The ledger client cancels a call that is out of time; other calls are cancelled by their callers.
                if TIMED_OUT in error.args:
                    self._let_rest(server)
                raise
            finally:
                self._busy[server] -= 1

    def _least_busy(self, servers: Sequence[int]) -> int:
        """The server with the fewest calls in progress, a resting one only if all rest."""
        now = time.monotonic()
        return min(servers, key=lambda server: (self._rests_until[server] > now, self._busy[server]))

    def _let_rest(self, server: int) -> None:
        """Give a server that failed no call for a while, unless all rest."""
        self._rests_until[server] = time.monotonic() + _REST
