"""Answer questions through OpenAI's API and show every step on a page (`tripletune serve`), or as tools over MCP.

Exit codes: 0 after SIGTERM or SIGINT, or with `--mcp` when the client closes its end; 2 for bad input, before the port
opens.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.options import rare, setting
from tripletune.core.program import run_program
from tripletune.llm.backends import LLMOptions
from tripletune.rag.system_options import SystemOptions, add_system_arguments, teacher_of
from tripletune.rag.systems import system_names

if TYPE_CHECKING:
    from tripletune.serve.models import Shelf

logger = logging.getLogger(__name__)
# Attempts at a call, fewer than in a batch run, because a user waits for the answer.
_ATTEMPTS = 3
# Host headers of requests from this machine; of an IPv6 address only "[" is read.
_LOCAL = ("127.0.0.1", "localhost", "[")
# Options that have no effect without a port.
_OF_PORT = ("host", "port", "api_key_env", "hosts", "body_limit", "grace")


@dataclass(kw_only=True)
class ServeOptions:
    """Options for the address, systems and limits of a server."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 accepts requests from other machines")
    mcp: bool = setting(False, "offer the tools of an MCP server on stdin and stdout, instead of a port")
    port: int = setting(8000, "port to listen on; 0: any free port", at_least=0, at_most=65535)
    api_key_env: str | None = setting(None, "name of the environment variable with the key that clients must send")
    systems: tuple[str, ...] = setting(
        (), "systems to offer, separated by commas (default: all that can run)",
        choices=system_names(),
    )  # fmt: skip
    places: int = setting(32, "maximum questions answered at the same time", at_least=1)
    queue: int = setting(128, "maximum waiting questions; further questions are refused (429)", at_least=0)
    timeout: float = setting(120.0, "timeout of a question in seconds, waiting included (504)", above=0)
    grace: float = setting(30.0, "seconds to finish started questions when the server stops", at_least=0)
    body_limit: int = rare(2**20, "maximum bytes of a request (413)", at_least=1)
    hosts: tuple[str, ...] = rare((), "host names that clients may use (default: local names on loopback, else any)")


def _serve_from_arguments(args: argparse.Namespace) -> None:
    """Check the options, take the port, then open the models and serve.

    In this order an error that takes no time to find is not reported after minutes of loading.
    """
    serving = from_arguments(ServeOptions, args)
    key = os.environ.get(serving.api_key_env, "").strip() if serving.api_key_env else ""
    if serving.api_key_env and not key:
        raise ValueError(f"--api-key-env {serving.api_key_env}: this environment variable is not set")
    options = from_arguments(SystemOptions, args, system="ras")
    teacher = teacher_of(args)
    if serving.mcp:
        of_port = [name for name in _OF_PORT if getattr(serving, name) != getattr(ServeOptions(), name)]
        if of_port:
            raise ValueError(f"--mcp opens no port, so these options have no effect: {', '.join(of_port)}")
        asyncio.run(_serve_mcp(serving, options, teacher))
        return
    with socket.socket(socket.AF_INET6 if ":" in serving.host else socket.AF_INET) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:  # Bind before models are loaded, so that an address in use is reported at once; nobody can connect yet.
            place.bind((serving.host, serving.port))
        except OSError as error:
            raise ValueError(f"--host {serving.host} --port {serving.port}: {error.strerror or error}") from None
        asyncio.run(_serve_on_socket(serving, key, options, teacher, place))


async def _serve_mcp(serving: ServeOptions, options: SystemOptions, teacher: LLMOptions | None) -> None:
    """Serve one client that has started this program, until it closes its end."""
    from tripletune.serve.limits import Door
    from tripletune.serve.mcp_tools import open_tool_server
    from tripletune.serve.models import open_shelf

    shelf = open_shelf(options, teacher, serving.systems)
    try:
        _tell_left_out(shelf)
        door = Door(serving.places, serving.queue, serving.timeout)
        await open_tool_server(shelf, door, options).run()
    finally:
        await shelf.close()


async def _serve_on_socket(
    serving: ServeOptions, key: str, options: SystemOptions, teacher: LLMOptions | None, place: socket.socket
) -> None:
    """Open the models, then answer on a socket that is already bound, until a signal ends the server.

    Args:
        serving: The options of the server.
        key: The key that clients must send; "": none.
        options: The options of the systems.
        teacher: The chat model; None: there is none.
        place: Bound by the caller, so that a port in use was reported before.
    """
    import uvicorn

    from tripletune.serve.app import Server, Service
    from tripletune.serve.limits import Door
    from tripletune.serve.models import open_shelf

    shelf = open_shelf(options, teacher, serving.systems)
    try:
        await shelf.warm_up()
        host, port = place.getsockname()[:2]
        local = ipaddress.ip_address(host).is_loopback
        door = Door(serving.places, serving.queue, serving.timeout)
        # A browser may be led to this machine under another name (DNS rebinding), so only local names are accepted.
        hosts = serving.hosts or (_LOCAL if local else ())
        service = Service(shelf, door, key, serving.body_limit, hosts)
        config = uvicorn.Config(
            service.app, log_config=None, access_log=False, lifespan="off", server_header=False, ws="none",
            timeout_graceful_shutdown=5, timeout_keep_alive=75, proxy_headers=False,
        )  # fmt: skip
        _tell_left_out(shelf)
        if not local and not key:
            logger.warning("anyone who can reach this machine can use the server: --api-key-env NAME requires a key")
        shown_host = f"[{host}]" if ":" in host else host
        url = f"http://{shown_host}:{port}"
        logger.info("models: %s\nready on %s (the page), %s/v1 (the API)", ", ".join(shelf.names), url, url)
        await Server(config, door, serving.grace).serve([place])
        logger.info("stopped: no question is open")
    finally:
        await shelf.close()


def _tell_left_out(shelf: Shelf) -> None:
    """Log which systems are not offered, and how a user who named none learns what one of them needs."""
    if shelf.left_out:
        logger.info("not offered: %s (--systems NAME says what one needs)", ", ".join(shelf.left_out))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve; return the exit code.

    The socket is opened before any model is loaded, so that a port in use is reported at once.
    """
    parser = CommandParser(
        prog="tripletune serve",
        description="Answer questions through OpenAI's API, and show every step on a page; or as tools over MCP.",
        others="option of all systems, for example max_rounds=3, or of one system, for example ras.top_k=3; repeatable",
        example="tripletune serve runs/demo/export --corpus corpus.jsonl --triples triples.jsonl",
    )
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="folder of a Graph-LLM, like --model")
    add_arguments(parser, ServeOptions)
    add_system_arguments(parser, "system")
    attempts = parser.settable["teacher.attempts"]
    about = attempts.about.replace(f"{LLMOptions.attempts}", f"{_ATTEMPTS}")
    parser.settable["teacher.attempts"] = attempts._replace(about=about)
    parser.set_defaults(teacher_attempts=_ATTEMPTS)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    return run_program(lambda: _serve_from_arguments(args), stopped="stopped")


if __name__ == "__main__":
    sys.exit(main())
