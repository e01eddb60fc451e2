"""The command line of `tripletune build subq`.

Exit codes: 0 done; 1 a call of the teacher can't be answered, run again to continue; 2 bad input; 3 calls wait for a
batch's replies; 4 done, but the teacher could not label a single question; 130 interrupted.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from tripletune.data_builders.datasets.lookup import SeenTable, progress
from tripletune.data_builders.datasets.rows import token_counter
from tripletune.data_builders.hotpotqa_subq.build import BuildPending, NothingLabelled, build
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source
from tripletune.data_builders.hotpotqa_subq.questions import Dropped, Question
from tripletune.data_builders.hotpotqa_subq.teacher import (
    FILTER_ROLE,
    QUERY_ROLE,
    TRIPLES_ROLE,
    document_text,
    filter_text,
    load_subq_prompts,
    query_text,
    shown_documents,
)
from tripletune.models.files import check_new
from tripletune.models.llm import LLMClient
from tripletune.models.llm.backends import LLMOptions, backend_names, open_client
from tripletune.models.options import add_arguments, from_arguments
from tripletune.models.program import run_program

_PRICE = re.compile(r"\d+(\.\d+)?,\d+(\.\d+)?")
# No model: recorded replies and gold annotations, as they are.
ANNOTATIONS = "annotations"
_GROUPS = {
    "labels": ("first_subquery", "distractors", "triple_file"),
    "what the teacher is asked": (
        "prompts", "show_documents", "triples_from", "json_schema", "on_call_error", "concurrency",
        "shard"),
    "direct-answer test": ("direct_answer_model", "direct_answers", "batch_size", "max_new_tokens"),
    "which questions": ("limit", "asqa_count", "arc_easy_count", "validation_fraction", "split_name", "seed"),
    "files": ("overwrite", "format", "shard_size", "tokenizer"),
}  # fmt: skip
# What only a teacher LLM takes notice of, besides `--teacher-...`.
_LLM_ALONE = ("prompts", "show_documents", "triples_from", "json_schema", "on_call_error", "dry_run", "price")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; None takes the arguments of the process. Returns the exit code."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    kept = "interrupted; replies received so far are in the ledger, run the command again to continue"
    return run_program(lambda: _run(parser, parsed), stopped=kept)


def _run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    sources = [Source.parse(text) for text in parsed.source]
    options = from_arguments(BuildOptions, parsed)
    llm = _teacher(parser, parsed, options)
    if llm is not None and not any(source.needs_teacher for source in sources):
        raise ValueError("a teacher LLM is given, but every source has annotations: leave out those it shall make")
    if parsed.dry_run:
        _show(sources, options, parsed.price)
        return 0
    if options.shard and llm is None and options.direct_answer_model is None:
        raise ValueError(f"--shard {options.shard} shares out calls of a model, and no --teacher is named")
    ledger = parsed.teacher_ledger or options.ledger
    check_new(options.output, [ledger])
    try:
        build(
            sources,
            options,
            partial(open_client, llm) if llm is not None else None,
            llm.sampling(1) if llm is not None else None,
            partial(open_base_model, options, ledger) if options.direct_answer_model else None,
        )
    except (BuildPending, NothingLabelled) as end:
        sys.stderr.write(f"{end}\n")
        return end.exit_code
    return 0


def open_base_model(options: BuildOptions, ledger: str) -> LLMClient:
    """The client of the direct-answer test: a base model, which has no chat template, on this machine."""
    from tripletune.models.llm.backends.hf import HFBackend
    from tripletune.models.llm.ledger import Ledger
    from tripletune.models.llm.ledger_client import LedgerClient, Retry

    backend = HFBackend(str(options.direct_answer_model), options.batch_size, plain=True)
    # A chat with the same model is another call.
    backend.model += " plain"
    # Greedily, an empty reply stays empty.
    return LedgerClient(backend, Ledger(ledger), retry=Retry(empty_attempts=1))


def _teacher(parser: argparse.ArgumentParser, parsed: argparse.Namespace, options: BuildOptions) -> LLMOptions | None:
    """The teacher LLM's options; None without one. Its ledger stands beside the output unless it is named.

    Raises:
        ValueError: options of a teacher LLM are given and no such teacher is, most often a forgotten `--teacher`.
    """
    if parsed.teacher != ANNOTATIONS:
        parsed.teacher_ledger = parsed.teacher_ledger or options.ledger
        return from_arguments(LLMOptions, parsed, "teacher")
    names = [name for name in vars(parsed) if name in _LLM_ALONE or name.startswith("teacher_")]
    if parsed.direct_answer_model:
        names.remove("teacher_ledger")
    idle = [f"--{name.replace('_', '-')}" for name in names if getattr(parsed, name) != parser.get_default(name)]
    if idle:
        raise ValueError(
            f"{', '.join(idle)}: without effect, since --teacher {parsed.teacher} asks no model; name a backend, for "
            "example --teacher openai, or leave it out"
        )
    return None


def _show(sources: list[Source], options: BuildOptions, price: str | None) -> None:
    dollars = [float(part) for part in price.split(",")] if price and _PRICE.fullmatch(price) else None
    if price and dollars is None:
        raise ValueError(f"--price {price}: write dollars per million tokens as IN,OUT, for example 0.15,0.6")
    counted, count = "as characters / 4 (no --tokenizer)", None
    if options.tokenizer:
        counted, count = f"with the tokenizer of {options.tokenizer}", token_counter(options.tokenizer)
    questions, stages = estimate(sources, options, *([count] if count else []))
    stages["all"] = tuple(map(sum, zip(*stages.values())))  # type: ignore[assignment]
    lines = [f"{questions:,} questions; nothing was sent"]
    lines.append(f"{'stage, at most':16}{'calls':>14}{'input tokens':>18}{'output tokens':>18}{'cost':>14}")
    for role, (calls, read, written) in stages.items():
        cost = "-" if dollars is None else f"${(read * dollars[0] + written * dollars[1]) / 1e6:,.2f}"
        lines.append(f"{role:16}{calls:>14,}{read:>18,.0f}{written:>18,.0f}{cost:>14}")
    lines.append(f"Tokens are counted {counted}, in a sample of at most {SAMPLE} questions.")
    lines.append("Replies that the ledger has cost nothing, repair turns are not counted.")
    if options.direct_answer_model or options.direct_answers:
        lines.append("Questions that the base model answers directly cost nothing either.")
    if dollars is None:
        lines.append("For the cost give the model's price: --price IN,OUT in dollars per million tokens.")
    sys.stdout.write("\n".join(lines) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tripletune build subq",
        description="Build HotpotQA-SUBQ records from benchmark files and a teacher.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--source", action="append", required=True, metavar="[NAME=]READER:FILE[:ANNOTATIONS]",
        help="a benchmark file (.json, .jsonl, .parquet, or a hub id owner/name[@configuration][#split]) with its "
        "reader (hotpotqa, musique, two_wiki, ...) and annotations: recorded teacher replies, or a triple file for "
        "musique; without any, the teacher LLM labels it; repeat it for several")  # fmt: skip
    add_arguments(parser, BuildOptions, only=("output",))
    add("--teacher", choices=(ANNOTATIONS, *backend_names()), default=ANNOTATIONS,
        help="who labels: recorded replies and gold annotations, or an LLM of one of the backends, which labels "
        "the sources without annotations (default: annotations)")  # fmt: skip
    add_arguments(parser, LLMOptions, "teacher", only=("model",))
    add("--dry-run", action="store_true", help="send nothing; show the most calls and tokens it would take")
    for title, names in _GROUPS.items():
        add_arguments(parser.add_argument_group(title), BuildOptions, only=names)
    group = parser.add_argument_group("how the teacher is called")
    group.add_argument("--price", metavar="IN,OUT", help="dollars per million tokens read and written, for --dry-run")
    rest = [item.name for item in fields(LLMOptions) if item.name not in ("backend", "model")]
    add_arguments(group, LLMOptions, "teacher", only=rest)
    return parser


ROLES = (FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE)
SAMPLE = 200
# A triple list as JSON has 1.3 times the characters of its paragraph: 4,031 triples that a strong teacher read out of
# 300 paragraphs of HotpotQA have 1.24, 370 others of its supporting paragraphs 1.39. Its sub-queries have 86 as JSON.
_TRIPLES_PER_CHARACTER, _SUBQUERY_CHARACTERS, _FILTER_CHARACTERS = 1.3, 86, 40


def estimate(
    sources: list[Source], options: BuildOptions, count_tokens: Callable[[str], float] = lambda text: len(text) / 4
) -> tuple[int, dict[str, tuple[int, float, float]]]:
    """Count the calls of a build.

    Returns:
        Questions that the teacher labels; and by role the calls, input tokens and output tokens at most.

    Raises:
        FileNotFoundError: an input file is missing.
        ValueError: an input file is malformed.
    """
    calls = Counter[str](dict.fromkeys(ROLES, 0))
    sample: list[Question] = []
    chance, number = random.Random(0), 0
    for number, question in enumerate(_questions(sources, options), 1):
        calls.update(_calls(question, options))
        # Every question is in the sample with the same chance (reservoir sampling).
        if len(sample) < SAMPLE:
            sample.append(question)
        elif (place := chance.randrange(number)) < SAMPLE:
            sample[place] = question
    prompts = load_subq_prompts(options.prompts)
    system = {role: count_tokens(prompts.texts[role.replace(".", "_")]) for role in ROLES}
    sampled, read, written = Counter[str](), dict.fromkeys(ROLES, 0.0), dict.fromkeys(ROLES, 0.0)
    for role, text, reply in (call for question in sample for call in _prompts(question, options)):
        sampled[role] += 1
        tokens = count_tokens(text)
        read[role] += system[role] + tokens
        written[role] += reply * tokens / len(text)
    share = {role: calls[role] / max(1, sampled[role]) for role in ROLES}
    return number, {role: (calls[role], share[role] * read[role], share[role] * written[role]) for role in ROLES}


def _questions(sources: list[Source], options: BuildOptions) -> Iterator[Question]:
    with SeenTable() as seen:
        for source in sources:
            if not source.needs_teacher:
                continue
            rows = progress(source.questions(options.most_questions(source.reader)), source.name)
            for position, row in enumerate(rows):
                if isinstance(row, Dropped) or seen.first("id", row.id) is not None or not row.supporting:
                    continue
                if options.is_mine(position):
                    yield row


def _calls(question: Question, options: BuildOptions) -> dict[str, int]:
    kept = len(question.supporting)
    # A single document needs no sub-query that is not a label.
    queries = kept if kept > 1 or options.first_subquery == "generated" else 0
    return {FILTER_ROLE: 1, QUERY_ROLE: queries, TRIPLES_ROLE: kept if options.triples_from == "teacher" else 0}


def _prompts(question: Question, options: BuildOptions) -> Iterator[tuple[str, str, float]]:
    """Role, user's turn and characters of the reply of each call."""
    calls = _calls(question, options)
    yield FILTER_ROLE, filter_text(question, shown_documents(question, options.show_documents)), _FILTER_CHARACTERS
    earlier: list[str] = []
    for document in question.supporting:
        passage = question.passages[document]
        if calls[QUERY_ROLE]:
            yield QUERY_ROLE, query_text(question, passage, earlier), _SUBQUERY_CHARACTERS
            earlier.append("q" * _SUBQUERY_CHARACTERS)
        if calls[TRIPLES_ROLE]:
            text = f"Document: {document_text(passage)}"
            yield TRIPLES_ROLE, text, _TRIPLES_PER_CHARACTER * len(text)


if __name__ == "__main__":
    sys.exit(main())
