"""`tripletune rag entities`: propose one name per entity, and write the proposals as a file for a person.

The file (`rag.triples.names`) is applied by `--entities FILE`; nothing is merged before a run names it, and the store
never changes. A chat model can decide the doubtful pairs, within a budget of calls.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import logging
import tempfile
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path

from tripletune.core.calls import LLMClient, SetupError, UnusableReply
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.triples import Triple
from tripletune.core.files import check_new, new_file
from tripletune.core.options import CheckedOptions, setting
from tripletune.llm.backends import LLMOptions, add_chat_model, open_client
from tripletune.llm.ledger_client import RetriesExhausted
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reply_json import numbers_in_list
from tripletune.rag import Trace
from tripletune.rag.search.embedding import open_embedder
from tripletune.rag.triple_store import StoredTriples, open_triples
from tripletune.rag.triples.names import COLUMNS, NamePair, read_decisions
from tripletune.rag.triples.proposals import DOUBTFUL, NameUse, Proposal, propose, related_pairs, uses_of

logger = logging.getLogger(__name__)
_PROMPT = ("entities_same",)
# Pairs per call of the chat model, and the length of its list of numbers.
_PAIRS = 10
_REPLY_TOKENS = 128
RELATED = "a triple relates them"
MODEL_YES, MODEL_NO = "the model says yes", "the model says no"


@dataclass(frozen=True, slots=True)
class EntityOptions(CheckedOptions):
    """Options of `tripletune rag entities`."""

    triples: str = setting(MISSING, 'store of `rag extract`, or JSON lines of {"title", "text", "triples"}')
    output: str = setting(MISSING, "table to write, separated by tabs, which you review")
    extractor: str | None = setting(None, "extractor (number or model) in --triples, if the store holds several")
    encoder: str | None = setting(
        None, "encoder of names: owner/name[@revision], folder or pypi:<package> (default: only letters are compared)"
    )
    cosine: float = setting(0.9, "minimum cosine of two names", above=0, at_most=1)
    budget: int = setting(100, f"maximum calls of the chat model, each about {_PAIRS} doubtful pairs", at_least=1)
    decided: str | None = setting(None, "a file that you reviewed before: its decisions are kept")
    prompts: str | None = setting(None, "folder with a custom prompt entities_same.md")
    overwrite: bool = setting(False, "replace an existing file, with your decisions in it")


def propose_names(options: EntityOptions, teacher: LLMOptions | None) -> Counter[str]:
    """Write the proposals for a store; return their numbers by kind and decision.

    Args:
        teacher: The chat model that decides the doubtful pairs; None: a person does.
    """
    check_new(options.output, [options.triples, *filter(None, [options.decided])])
    if Path(options.output).exists() and not options.overwrite:
        raise FileExistsError(
            f"{options.output} exists and may hold your decisions: give another file, and --decided {options.output} "
            "to keep them, or --overwrite"
        )
    decided = read_decisions(options.decided) if options.decided else {}
    with tempfile.TemporaryDirectory() as scratch:
        source = open_triples(options.triples, Path(scratch) / "triples.sqlite", options.extractor)
        with closing(source):
            encode = None if options.encoder is None else open_embedder(options.encoder).encode
            proposals = propose(uses_of(_triples_of_passages(source)), encode, options.cosine)
            pairs = related_pairs(proposals, _triples_of_passages(source))
    reasons = dict.fromkeys(pairs, RELATED)
    doubtful = []
    for proposal in proposals:
        pair = _names_of(proposal)
        if proposal.why in DOUBTFUL and pair not in reasons and pair not in decided:
            doubtful.append(proposal)
    verdicts: dict[NamePair, bool] = {}
    if teacher is not None:
        verdicts = asyncio.run(_ask_all(doubtful, options, teacher))
    return _write_table(proposals, reasons, verdicts, decided, options.output)


def _triples_of_passages(source: StoredTriples) -> Iterator[Sequence[Triple]]:
    """The triples of each passage, as the store has them."""
    for extraction in source.store.extractions(source.extractor):
        yield extraction.triples


def _names_of(proposal: Proposal) -> NamePair:
    """The two names of a proposal, by which reasons, verdicts and decisions are kept."""
    return NamePair(proposal.name.name, proposal.into.name)


async def _ask_all(doubtful: Sequence[Proposal], options: EntityOptions, teacher: LLMOptions) -> dict[NamePair, bool]:
    """The verdicts of the chat model on the pairs that the budget allows, the most used names first."""
    client = open_client(replace(teacher, ledger=teacher.ledger or f"{options.output}.ledger.sqlite"))
    blocks = []
    for start in range(0, len(doubtful), _PAIRS):
        blocks.append(doubtful[start : start + _PAIRS])
    if len(blocks) > options.budget:
        form = "--budget %d: %d of %d doubtful pairs are asked"
        logger.warning(form, options.budget, options.budget * _PAIRS, len(doubtful))
    try:
        verdicts = await asyncio.gather(
            *(_ask_about_block(block, client, options) for block in blocks[: options.budget])
        )
    except (SetupError, RetriesExhausted) as error:
        raise ValueError(str(error)) from error
    finally:
        await client.close()
    return dict(ChainMap(*verdicts))


async def _ask_about_block(block: Sequence[Proposal], llm: LLMClient, options: EntityOptions) -> dict[NamePair, bool]:
    """The verdicts on some pairs; none if the reply can't be read, which leaves them to a person."""
    prompts = load_prompts(_PROMPT, options.prompts, "data")
    client = QuestionClient(llm, Trace(""), system="entities", prompts=prompts)
    lines = []
    for number, proposal in enumerate(block, 1):
        lines.append(f"{number}. {_name_with_fact(proposal.name)} / {_name_with_fact(proposal.into)}")
    try:
        same = await client.ask("same", "\n".join(lines), partial(numbers_in_list, len(block), "pairs"), _REPLY_TOKENS)
    except UnusableReply as error:
        logger.warning("a reply about %d pairs can't be read (%s): they are left to you", len(block), error.reason)
        return {}
    return {_names_of(proposal): number in same for number, proposal in enumerate(block, 1)}


def _name_with_fact(use: NameUse) -> str:
    """A name with one of its facts, for the chat model."""
    return f'"{use.name}" ({" ".join(use.example.as_list())})'


def _write_table(
    proposals: Sequence[Proposal],
    reasons: Mapping[NamePair, str],
    verdicts: Mapping[NamePair, bool],
    decided: Mapping[NamePair, bool],
    output: str,
) -> Counter[str]:
    """Write the table into `output`; return the number of proposals by kind and decision.

    Args:
        reasons: Why a pair of names is not merged by itself.
        verdicts: What the chat model says about a pair.
        decided: What a person said about a pair, which counts most.
    """
    counts: Counter[str] = Counter()
    with new_file(output) as scratch, scratch.open("w", encoding="utf-8", errors="replace", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(COLUMNS)
        for proposal in proposals:
            pair = _names_of(proposal)
            why = proposal.why
            merge = why not in DOUBTFUL and pair not in reasons
            if pair in reasons:
                why = f"{why}, but {reasons[pair]}"
            if pair in verdicts:
                merge = verdicts[pair]
                why = f"{why}; {MODEL_YES if merge else MODEL_NO}"
            merge = decided.get(pair, merge)
            counts[f"{proposal.why}: {'yes' if merge else 'no'}"] += 1
            table.writerow(_table_row(proposal, "yes" if merge else "no", why))
    return counts


def _table_row(proposal: Proposal, merge: str, why: str) -> list[str]:
    """The line of a proposal, in the order of `COLUMNS`."""
    name, into = proposal.name, proposal.into
    cosine = f"{proposal.cosine:.3f}" if proposal.cosine else ""
    used = [str(name.passages), str(into.passages)]
    return [
        merge,
        name.name,
        into.name,
        why,
        cosine,
        *used,
        *(" | ".join(use.example.as_list()) for use in (name, into)),
    ]


def add_entities_arguments(parser: CommandParser) -> None:
    """Add the options of `tripletune rag entities` to a parser."""
    add_arguments(parser, EntityOptions)
    add_chat_model(parser.add_argument_group("teacher model", "a chat model that decides the doubtful pairs"))


def entities(arguments: argparse.Namespace) -> None:
    """Propose one name per entity, and say what to do with the file."""
    options = from_arguments(EntityOptions, arguments)
    teacher = from_arguments(LLMOptions, arguments, "teacher") if arguments.teacher_model else None
    counts = propose_names(options, teacher)
    merged = sum(count for name, count in counts.items() if name.endswith(": yes"))
    logger.info("%s: %s proposals, %s of them yes", options.output, f"{counts.total():,}", f"{merged:,}")
    for name, count in sorted(counts.items()):
        logger.info("  %s %s", f"{count:,}", name)
    logger.info(
        "review the column merge, then give --entities %s to `eval run`, `ask`, `serve` or `rag export`", options.output
    )
