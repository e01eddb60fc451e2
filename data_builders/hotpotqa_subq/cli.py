"""The command line of `tripletune build subq`: options, the dry run's table, exit codes.

Exit codes: 0 done; 1 a call of the teacher can't be answered, run again to go on; 2 bad input; 3 calls wait for a
batch's replies; 4 done, but the teacher could not label a single question; 130 interrupted.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

from tripletune.data_builders.datasets.writer import NO_RECORDS, Format
from tripletune.data_builders.hotpotqa_subq.build import BuildPending, NothingLabelled, build
from tripletune.data_builders.hotpotqa_subq.dry_run import STAGE_NAMES, Estimate, Speed, rehearse
from tripletune.data_builders.hotpotqa_subq.options import ON_CALL_ERROR, BuildOptions
from tripletune.data_builders.hotpotqa_subq.prices import find_price
from tripletune.data_builders.hotpotqa_subq.recorded_client import RecordedClient
from tripletune.data_builders.hotpotqa_subq.sources import Source
from tripletune.data_builders.hotpotqa_subq.teacher import SHOWN
from tripletune.data_builders.text_to_triples.mixing import PARTS
from tripletune.models.llm.backends.api import TRANSPORTS, ledger_name
from tripletune.models.llm.client import CallError, LLMClient
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.options import BACKENDS, LLMOptions, add_arguments, from_arguments, open_client

# No model: recorded replies and gold annotations, as they are (`annotations`) or through the path of a teacher LLM.
ANNOTATIONS, RECORDED = "annotations", "recorded"
_OWN = ("source", "teacher", "dry_run", "prices", "assumed_latency")
# What only a teacher LLM takes notice of, besides `--teacher-...`.
_LLM_ALONE = ("prompts", "on_call_error", "prices", "assumed_latency")
# The dry run's table has its costs in the last column, which a narrow console would cut.
_WIDTH = 110


def run(arguments: list[str] | None = None) -> int:
    """Parse the command line and do what it says.

    Args:
        arguments: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # A line for every request they send; under whatever name the SDKs of today bring their transport.
    for noisy in (*sorted(TRANSPORTS), "openai", "anthropic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        _refuse_idle_options(parser, parsed)
        return _run(parsed)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    except CallError as error:
        kept = "What was answered is in the ledger: run the same command again to go on"
        again = "" if "again to go on" in str(error) else f". {kept}"
        parser.exit(1, f"error: {error}{again}\n")
    except BuildPending as pending:
        parser.exit(3, f"{pending}\n")
    except NothingLabelled as error:
        parser.exit(NO_RECORDS, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; replies received so far are in the ledger, run the command again to go on\n")
    return 0


def _run(parsed: argparse.Namespace) -> int:
    sources = [Source.parse(text) for text in parsed.source]
    llm = _llm_options(parsed)
    values = {
        name: value for name, value in vars(parsed).items() if name not in _OWN and not name.startswith("teacher_")
    }
    options = BuildOptions(**values)
    unlabelled = [source.name for source in sources if source.needs_teacher]
    if llm is not None and not unlabelled:
        raise ValueError("a teacher LLM is given, but every source has annotations: leave out those it shall make")
    if parsed.dry_run:
        if llm is None:
            raise ValueError("--dry-run estimates the calls of a teacher LLM; name one: --teacher and --teacher-model")
        _dry_run(sources, options, llm, parsed)
        return 0
    opener: Callable[[], LLMClient] | None = None
    if parsed.teacher == RECORDED:
        sources, opener = _recorded(sources)
    elif llm is not None:
        opener = partial(_open, llm)
    build(sources, options, opener, llm.sampling(1) if llm else None)
    return 0


def _open(llm: LLMOptions) -> LLMClient:
    client = open_client(llm)
    # The SDKs' 90,000 objects stay until the end: a full collection, one every thousand calls, need not walk them.
    gc.collect()
    gc.freeze()
    return client


def _llm_options(parsed: argparse.Namespace) -> LLMOptions | None:
    """The teacher LLM's options; None without one. Its ledger stands beside the output unless it is named."""
    if parsed.teacher in BACKENDS:
        if parsed.teacher_backend not in (None, parsed.teacher):
            raise ValueError(f"--teacher {parsed.teacher} and --teacher-backend {parsed.teacher_backend}: name one")
        parsed.teacher_backend = parsed.teacher
    if parsed.teacher_backend is None:
        return None
    if parsed.teacher_ledger is None:
        parsed.teacher_ledger = f"{parsed.output.rstrip('/')}.ledger.sqlite"
    return from_arguments(parsed, "teacher")


def _refuse_idle_options(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """An option that would change nothing is a mistake, most often a forgotten `--teacher`.

    Raises:
        ValueError: options of a teacher LLM are given and no such teacher is.
    """
    if parsed.teacher in BACKENDS or parsed.teacher_backend is not None:
        return
    names = [name for name in vars(parsed) if name.startswith("teacher_") or name in _LLM_ALONE]
    names += [] if parsed.teacher == RECORDED else ["triples_from", "show_documents"]
    idle = [f"--{name.replace('_', '-')}" for name in names if getattr(parsed, name) != parser.get_default(name)]
    if idle:
        raise ValueError(
            f"{', '.join(idle)}: without effect, since --teacher {parsed.teacher} asks no model; name a backend, for "
            "example --teacher openai, or leave it out"
        )


def _recorded(sources: list[Source]) -> tuple[list[Source], Callable[[], LLMClient]]:
    files = {source.annotations for source in sources}
    if len(files) != 1 or None in files:
        raise ValueError(
            "--teacher recorded answers from one file of recorded replies: one source, READER:FILE:REPLIES"
        )
    path = str(files.pop())
    bare = [Source(source.name, source.reader, source.location) for source in sources]
    return bare, lambda: RecordedClient(path)


def _dry_run(sources: list[Source], options: BuildOptions, llm: LLMOptions, parsed: argparse.Namespace) -> None:
    price = find_price(llm.model, parsed.prices, batch=llm.backend == "batch")
    count = _token_counter(options.tokenizer) if options.tokenizer else None
    counted = (
        f"with the tokenizer of {options.tokenizer}" if options.tokenizer else "as characters / 4 (no --tokenizer)"
    )
    concurrency = None if llm.backend == "batch" else min(llm.concurrency, options.concurrency)
    speed = Speed(llm.requests_per_minute, llm.tokens_per_minute, concurrency, parsed.assumed_latency)
    estimate = Estimate(_model_name(llm), counted, price, speed)
    ledger = Ledger(llm.ledger) if llm.ledger and Path(llm.ledger).is_file() else None
    try:
        rehearse(sources, options, estimate, ledger, count, llm.sampling(1))
    finally:
        if ledger is not None:
            ledger.close()
    _show(estimate, llm, options.direct_answer_model)


def _model_name(llm: LLMOptions) -> str:
    """What the ledger calls the model, without opening its backend: that needs a key."""
    kind = llm.batch_layout if llm.backend == "batch" else llm.backend
    return ledger_name(kind, llm.model, json.loads(llm.extra) if llm.extra else None)


def _token_counter(spec: str) -> Callable[[str], int]:
    from tripletune.models.loading import load_tokenizer

    tokenizer = load_tokenizer(spec)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _show(estimate: Estimate, llm: LLMOptions, direct_answer_model: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{estimate.model}: {estimate.questions:,} questions, nothing was sent")
    for heading in ("stage", "calls", "in the ledger", "input tokens", "output tokens", "cost"):
        table.add_column(heading, justify="left" if heading == "stage" else "right", no_wrap=True)
    price = estimate.price
    for role, stage in estimate.stages.items():
        cost = "-" if price is None else f"${price.cost(stage.input_tokens, stage.output_tokens):,.2f}"
        numbers = (round(stage.expected_calls), stage.stored, round(stage.input_tokens), round(stage.output_tokens))
        table.add_row(STAGE_NAMES.get(role, role), *(f"{number:,}" for number in numbers), cost)
    read, written = estimate.tokens
    stored = sum(stage.stored for stage in estimate.stages.values())
    total = "-" if estimate.dollars is None else f"${estimate.dollars:,.2f}"
    table.add_section()
    table.add_row(
        "all", *(f"{number:,}" for number in (round(estimate.calls), stored, round(read), round(written))), total
    )
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, _WIDTH))
    console.print(table)
    lines = [f"Tokens are counted {estimate.counted}. Replies that have to be mended are not foreseen."]
    shares = {STAGE_NAMES[role]: stage.ratio for role, stage in estimate.stages.items() if stage.ratio != 1}
    if shares:
        told = ", ".join(f"{share:.0%} of the {name} of all supporting passages" for name, share in shares.items())
        lines.append(f"As in the {estimate.known:,} questions whose documents are in the ledger: {told}.")
    else:
        kept = "a teacher keeps fewer in about one question of eight"
        lines.append(f"All supporting passages are taken to be kept; {kept}.")
    if direct_answer_model is not None:
        lines.append(f"What {direct_answer_model} will answer directly is not known yet: those questions cost nothing.")
    if estimate.direct:
        lines.append(f"{estimate.direct:,} questions are answered directly and need no teacher.")
    if price:
        lines.append(f"Price: {price.source}.")
    elif llm.backend == "hf":
        lines.append("Price: none, the model runs here.")
    else:
        lines.append(f"No price known for {llm.model}: give a table with --prices.")
    if llm.backend == "batch":
        lines.append("Time: a batch is answered within a day; one round for each stage, one more for mended replies.")
    else:
        minutes, bound = estimate.limits.minutes(estimate.calls, read + written)
        lines.append(f"Time: {_duration(minutes)} at {bound}.")
    for line in lines:
        console.print(line, markup=False)


def _duration(minutes: float) -> str:
    return f"{minutes / 60:,.1f} hours" if minutes >= 120 else f"{minutes:,.1f} minutes"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tripletune build subq",
        description="Build HotpotQA-SUBQ records from benchmark files and a teacher.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--source", action="append", required=True, metavar="[NAME=]READER:FILE[:ANNOTATIONS]",
        help="a benchmark file (.json, .jsonl, .parquet, or a hub id owner/name[@configuration][#split]) with its "
        "reader (hotpotqa, musique, two_wiki, ...) and annotations: recorded teacher replies, or a triple file for "
        "musique; without any, the teacher LLM labels it; repeat it for several")  # fmt: skip
    add("--output", required=True, help="folder of the data set")
    add("--first-subquery", choices=("main_question", "generated"), default="main_question",
        help="q_0: the main question (the paper) or the first generated sub-query (the authors' code)")  # fmt: skip
    add("--distractors", type=int, default=0, metavar="N", help="let the triples of N unrelated passages of the "
        "question join each step, as retrieval would bring them (the paper: none)")  # fmt: skip
    add("--triple-file", metavar="FILE", help="triples of those passages: JSON lines of title, text, triples")
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--validation-fraction", type=float, default=0.05, help="share of the questions for validation")
    split.add_argument("--split-name", help="put everything into one split of this name instead")
    add("--seed", type=int, default=0, help="seed of the split")
    add("--limit", type=int, help="read only the first questions of each source")
    for reader, name in (("asqa", "asqa"), ("arc_easy", "arc-easy")):
        add(f"--{name}-count", type=int, default=PARTS[reader].count, metavar="N",
            help=f"questions of a source with the reader {reader}, which gives answering records alone")  # fmt: skip
    add("--format", choices=get_args(Format), default="jsonl", help="format of the shards")
    add("--shard-size", type=int, default=50_000, help="records in a shard")
    add("--shard", metavar="i/n", help="label every n-th question alone, the i-th of them first (from 0); "
        "`tripletune data merge` makes one data set of the n outputs")  # fmt: skip
    add("--overwrite", action="store_true", help="replace a data set in the output folder")
    add("--direct-answer-model", help="base model of the direct-answer test: hub id, folder or pypi:package; "
        "without it and without stored answers there is no test")  # fmt: skip
    add("--direct-answers", help="JSON lines {question_id, answer} where the test's answers are kept and taken from; "
        "<output>.direct_answers.jsonl where a model is given and this is not")  # fmt: skip
    add("--batch-size", type=int, default=8, help="questions at a time in the direct-answer test")
    add("--max-new-tokens", type=int, default=16, help="longest answer in the direct-answer test, in tokens")
    add("--concurrency", type=int, default=64, help="questions a teacher works on at a time")
    add("--tokenizer", help="count the card's tokens with this model's tokenizer instead of counting words")
    _add_teacher(parser)
    return parser


def _add_teacher(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--teacher", choices=(ANNOTATIONS, RECORDED, *BACKENDS), default=ANNOTATIONS,
        help="who labels: recorded replies and gold annotations, the same through the path of a teacher LLM "
        "(recorded), or an LLM behind one of the backends, which labels the sources without annotations")  # fmt: skip
    add("--prompts", metavar="DIR", help="folder with prompts of your own: subq_filter.md, subq_query.md, "
        "subq_triples.md; ours for those that are missing")  # fmt: skip
    add("--triples-from", default="teacher", metavar="teacher|FILE",
        help="who gives the triples of a document: the teacher LLM, or JSON lines of title, text, triples")  # fmt: skip
    add("--show-documents", choices=SHOWN, default="supporting",
        help="documents the filter chooses from: the supporting passages (the paper) or all passages")  # fmt: skip
    add("--on-call-error", choices=ON_CALL_ERROR, default="stop",
        help="when a call can't be answered by any further attempt: stop, or drop the question")  # fmt: skip
    add("--dry-run", action="store_true", help="send nothing; show calls, tokens, cost and time")
    add("--prices", metavar="FILE", help="price table for --dry-run in the place of ours")
    add("--assumed-latency", type=float, default=2.0, metavar="SECONDS", help="of one call, for --dry-run")
    # `--teacher openai` says the backend; the long form stays for configurations that name every field.
    defaults: dict[str, Any] = {"backend": None}
    add_arguments(parser, "teacher", **defaults)
