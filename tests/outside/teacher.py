"""A mock server that answers from the facts of a made-up world, and of the company in `examples/`."""

import sys
from pathlib import Path
from typing import Any

from tests.llm.server import MockServer
from tests.outside.environment import ROOT
from tests.outside.inputs import ANSWERS
from tripletune.core.calls import CallError, Sampling, SetupError
from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.rag.chat_generator import ANSWER, PLAN


class Facts:
    """Replies of the first teacher that knows a prompt; without any, "NONE"."""

    def __init__(self, world: Path) -> None:
        sys.path.append(str(ROOT / "examples"))
        from teacher import Teacher

        self._world = world
        self._company = Teacher()
        self._oracles: list[WorldOracle] = []

    def reply(self, body: dict[str, Any]) -> str:
        """The reply to a request of OpenAI's layout."""
        messages = body["messages"]
        question = messages[-1]["content"].rpartition("Question: ")[2].strip()
        role = self._company.roles.get(messages[0]["content"].strip())
        if question in ANSWERS and role == PLAN:
            is_first = "[SUBQ]" not in messages[-1]["content"]
            return f"[SUBQ] {question}" if is_first else "[SUFFICIENT]"
        if question in ANSWERS and role == ANSWER:
            return ANSWERS[question]
        try:
            return self._company.reply(messages)
        except (KeyError, ValueError, AttributeError):
            pass
        if not self._oracles and (self._world / "world.json").exists():
            self._oracles = [WorldOracle.open(self._world, split) for split in ("test", "train")]
        for oracle in self._oracles:
            # It never waits, and the server's event loop runs.
            call = oracle.complete(messages, Sampling())
            try:
                call.send(None)
            except StopIteration as done:
                return str(done.value.text)
            except (CallError, SetupError, KeyError, ValueError, IndexError):
                continue
        return "NONE"


def mock_server(world: Path) -> MockServer:
    """The server; `world` is a folder of `build world`, which may be made later."""
    return MockServer(Facts(world).reply)
