"""Answer questions over HTTP, as a model of OpenAI's API, and show how on one page: `tripletune serve`.

tripletune serve runs/mine --corpus mine --triples mine/triples.sqlite
tripletune serve --llm openai:NAME@URL --corpus corpus.jsonl

Exit codes: 0 ended by SIGTERM or SIGINT; 2 bad input, before the port opens.
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
from dataclasses import dataclass, fields

from tripletune.models.llm.backends import LLMOptions, add_chat_model
from tripletune.models.options import rare, setting
from tripletune.models.program import CommandParser, add_arguments, add_short_flags, from_arguments, run_program
from tripletune.rag.answering import SystemOptions
from tripletune.rag.search import SearchOptions
from tripletune.rag.systems import SHORT, LoopOptions, system_names

logger = logging.getLogger(__name__)
# Attempts at a call: who waits for an answer is told sooner than a batch run that the model's server is away.
_ATTEMPTS = 3
_FLUSH_SECONDS = 5


@dataclass(kw_only=True)
class ServeOptions:
    """Where a server listens, what it offers, and how much it takes."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is all of this machine's")
    port: int = setting(8000, "port to listen on; 0 takes a free one", at_least=0, at_most=65535)
    api_key_env: str | None = setting(None, "name of the environment variable with the key that clients must send")
    systems: tuple[str, ...] = setting(
        (), "the loops to offer, separated by commas (default: all that can run with what is given)",
        choices=system_names(),
    )  # fmt: skip
    integrator: str | None = setting(None, "a trained model that integrates in CIRAG: folder or hub id")
    places: int = setting(32, "most questions answered at once", at_least=1)
    queue: int = setting(128, "most questions that wait for a place; one more is refused (429)", at_least=0)
    timeout: float = setting(120.0, "most seconds for a question, waiting included (504)", above=0)
    grace: float = setting(30.0, "seconds for the questions under way when the server is asked to end", at_least=0)
    body_limit: int = rare(2**20, "most bytes of a request (413)", at_least=1)
    hosts: tuple[str, ...] = rare((), "names by which clients reach it (default: on loopback its own, else any)")


def _serve(args: argparse.Namespace) -> None:
    serving = from_arguments(ServeOptions, args)
    key = os.environ.get(serving.api_key_env, "").strip() if serving.api_key_env else ""
    if serving.api_key_env and not key:
        raise ValueError(f"--api-key-env {serving.api_key_env}: this environment variable is not set")
    if not args.teacher_model and args.teacher != LLMOptions.backend:
        raise ValueError(f"--teacher {args.teacher}: name its --teacher-model")
    teacher = from_arguments(LLMOptions, args, "teacher") if args.teacher_model else None
    with _bound(serving) as place:
        asyncio.run(_run(serving, key, from_arguments(SystemOptions, args, system="ras"), teacher, place))


def _bound(serving: ServeOptions) -> socket.socket:
    """The address, taken but not yet open: an address that is in use shows before models are loaded."""
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    place = socket.socket(family)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((serving.host, serving.port))
    except OSError as error:
        place.close()
        why = error.strerror or str(error)
        raise ValueError(f"--host {serving.host} --port {serving.port}: {why}; give another") from None
    return place


async def _run(
    serving: ServeOptions, key: str, options: SystemOptions, teacher: LLMOptions | None, place: socket.socket
) -> None:
    import uvicorn

    from tripletune.serve.app import Server, Service
    from tripletune.serve.door import Door
    from tripletune.serve.served import open_shelf

    shelf = open_shelf(options, teacher, serving.systems, serving.integrator)
    try:
        await shelf.warm_up()
        local = _is_loopback(serving.host)
        hosts = serving.hosts or (("127.0.0.1", "localhost", "[", serving.host) if local else ())
        door = Door(serving.places, serving.queue, serving.timeout)
        service = Service(shelf, door, key, serving.body_limit, hosts)
        config = uvicorn.Config(
            service.app, log_config=None, access_log=False, lifespan="off", server_header=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS, ws="none", backlog=1024, proxy_headers=False,
        )  # fmt: skip
        host, port = place.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        for name, why in shelf.left_out.items():
            logger.info("not offered: %s (%s)", name, why)
        logger.info("models: %s", ", ".join(shelf.models))
        if not local and not key:
            logger.warning("whoever reaches this machine can ask here: --api-key-env NAME makes them send a key")
        logger.info("ready on http://%s:%s (the page), http://%s:%s/v1 (the API)", shown, port, shown, port)
        await Server(config, door, serving.grace).serve([place])
    finally:
        await shelf.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve."""
    about = "an option of a system's own, for example max_passages=10, or of one alone, ras.top_k=3; repeatable"
    parser = CommandParser(
        prog="tripletune serve",
        description=(__doc__ or "").split(":")[0] + ".",
        others=about,
        example="tripletune serve runs/demo/export --corpus corpus.jsonl --triples triples.jsonl",
    )
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="folder of a Graph-LLM, as --model")
    add_arguments(parser, ServeOptions)
    # The calls of a teacher are kept in --teacher-ledger.
    searched = [item.name for item in fields(SearchOptions)]
    own = [item.name for item in fields(SystemOptions) if item.name not in ("system", "set", "ledger", *searched)]
    add_arguments(parser.add_argument_group("models"), SystemOptions, only=own)
    add_arguments(parser.add_argument_group("retrieval"), SearchOptions)
    add_short_flags(parser.add_argument_group("options of the systems", SHORT), LoopOptions)
    chat = "a chat model instead of --model; with both, RAS plans with it and answers with --model"
    add_chat_model(parser.add_argument_group("teacher model", chat))
    dest, help_text = parser.settable["teacher.attempts"]
    shown = help_text.replace(f"default: {LLMOptions.attempts}", f"default: {_ATTEMPTS}")
    parser.settable["teacher.attempts"] = (dest, shown)
    parser.set_defaults(ledger=None, teacher_attempts=_ATTEMPTS)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    return run_program(lambda: _serve(args), level=logging.INFO, stopped="stopped")


if __name__ == "__main__":
    sys.exit(main())
