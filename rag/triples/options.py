"""Which extractor a command line names: `--model` with its options, or `--teacher` with `--teacher-*`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from tripletune.models.data.pairs import load_instruction
from tripletune.models.files import weights_fingerprint
from tripletune.models.llm.options import LLMOptions, from_arguments, open_client
from tripletune.models.loading import resolve
from tripletune.rag.triples.extractor import MAX_TOKENS, ChatExtractor, TextExtractor
from tripletune.rag.triples.local_extractor import DTYPES, LocalOptions, open_local_extractor
from tripletune.rag.triples.local_extractor import MAX_TOKENS as LOCAL_TOKENS
from tripletune.rag.triples.prompt import TEACHER_PROMPT, ExtractionPrompt

_LOCAL_BACKENDS = ("hf",)
# Options of a local model alone; None is "not given".
_LOCAL_FLAGS = ("beams", "grammar", "batch_size", "dtype")


def add_local_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--max-tokens` and the options of a local model."""
    add = parser.add_argument
    add("--max-tokens", type=int, help=f"longest reply (default: {LOCAL_TOKENS} with --model, else {MAX_TOKENS})")
    defaults = LocalOptions()
    add("--beams", type=int, help=f"--model: beams of beam search (default: {defaults.beams}, greedy)")
    add("--grammar", action="store_true", default=None, help="--model: enforce the format of triples while writing "
        "(needs xgrammar, greedy decoding)")  # fmt: skip
    add("--batch-size", type=int, help=f"--model: most texts under way (default: {defaults.batch_size})")
    add("--dtype", choices=DTYPES, help=f"--model: weights (default: {defaults.dtype}, in which replies do not depend "
        "on the batch)")  # fmt: skip


def open_extractor(
    args: argparse.Namespace,
    ledger: str | None = None,
    untrained: bool = False,
    shots: Sequence[tuple[str, str]] = (),
) -> TextExtractor:
    """Open the extractor of a command line; a local model's weights are loaded when the first text comes.

    Args:
        args: With `model`, `teacher`, `prompt`, the options of `add_local_arguments` and `--teacher-*`.
        ledger: Where the replies of a hosted teacher are kept if `--teacher-ledger` names no file.
        untrained: The local model was not trained for this: it gets a teacher's prompt.
        shots: Examples before each text.

    Raises:
        FileNotFoundError: no such model.
        ValueError: an option makes no sense or has no effect, or a key is missing.
    """
    if args.model:
        _refuse_teacher_options(args)
        chosen = {name: getattr(args, name) for name in _LOCAL_FLAGS if getattr(args, name) is not None}
        options = LocalOptions(max_tokens=LOCAL_TOKENS if args.max_tokens is None else args.max_tokens, **chosen)
        prompt = args.prompt or (TEACHER_PROMPT if untrained else None)
        instruction = load_instruction(prompt) if prompt else None
        return open_local_extractor(args.model, options, instruction, shots)
    given = [f"--{name.replace('_', '-')}" for name in _LOCAL_FLAGS if getattr(args, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: only for --model; a teacher's options begin with --teacher-")
    prompt = ExtractionPrompt(load_instruction(args.prompt or TEACHER_PROMPT), tuple(shots))
    return _teacher(args, prompt, ledger)


def _teacher(args: argparse.Namespace, prompt: ExtractionPrompt, ledger: str | None) -> TextExtractor:
    args.teacher_backend = args.teacher
    if args.teacher_ledger is None and args.teacher not in _LOCAL_BACKENDS:
        args.teacher_ledger = ledger
    options = from_arguments(args, "teacher")
    sampling = options.sampling(MAX_TOKENS if args.max_tokens is None else args.max_tokens)
    if options.backend not in _LOCAL_BACKENDS:
        return ChatExtractor(open_client(options), prompt, sampling, options.concurrency)
    # The same folder may hold other weights tomorrow: their fingerprint is part of the name.
    fingerprint = weights_fingerprint(resolve(options.model))
    client = open_client(options)
    name = f"{client.model} {fingerprint}".strip()
    # Calls that wait are grouped by the backend; some more than a batch keep the next one full.
    return ChatExtractor(client, prompt, sampling, 4 * options.batch_size, name)


def _refuse_teacher_options(args: argparse.Namespace) -> None:
    given = [
        f"--teacher-{item.name.replace('_', '-')}"
        for item in fields(LLMOptions)
        if item.name != "backend" and getattr(args, f"teacher_{item.name}") != item.default
    ]
    if given:
        raise ValueError(f"{', '.join(given)}: no effect with --model, which runs on this machine")
