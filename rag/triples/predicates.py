"""`tripletune rag vocabulary`: induce the predicates of a teacher's triples, and write them as a file for a person.

The file (`rag.triples.vocabulary`) is applied by `--vocabulary FILE` of `build pairs`, `rag extract` and `eval
extraction`. A teacher says one relation in many ways, each of which a small extractor sees a few times.
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import NamedTuple

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.triples import Triple
from tripletune.core.files import check_new, new_file
from tripletune.core.options import CheckedOptions, setting
from tripletune.rag.search.embedding import open_embedder
from tripletune.rag.triple_store import open_triples
from tripletune.rag.triples.relations import PredicateGroup, Uses, induce
from tripletune.rag.triples.vocabulary import COLUMNS, REVERSED, SAME, Vocabulary, read_vocabulary

logger = logging.getLogger(__name__)
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class VocabularyOptions(CheckedOptions):
    """Options of `tripletune rag vocabulary`."""

    triples: tuple[str, ...] = setting(
        MISSING,
        'stores of `rag extract`, or JSON lines of {"title", "text", "triples"}: all count alike, and the first one '
        "that has a relation names it",
    )
    output: str = setting(MISSING, "table to write, separated by tabs, which you review")
    size: int = setting(100, "maximum number of predicates: 50 to 200 fit most graphs", at_least=1)
    encoder: str | None = setting(
        None,
        "encoder of predicates: owner/name[@revision], folder or pypi:<package> (default: only words are compared)",
    )
    cosine: float = setting(0.8, "minimum cosine of two predicates", above=0, at_most=1)
    overwrite: bool = setting(False, "replace an existing file, with your changes in it")


class Coverage(NamedTuple):
    """What a vocabulary says about the triples of a file.

    Attributes:
        outside: The spellings that the vocabulary lacks, with their numbers of triples.
    """

    triples: int
    inside: int
    renamed: int
    is_reversed: int
    outside: Counter[str]


def write_vocabulary(options: VocabularyOptions) -> tuple[Vocabulary, dict[str, Coverage]]:
    """Write the vocabulary of some triples; return it, and its coverage of each file."""
    check_new(options.output, options.triples)
    if Path(options.output).exists() and not options.overwrite:
        raise FileExistsError(
            f"{options.output} exists and may hold your changes: give another file, or --overwrite to lose them"
        )
    uses = Uses()
    for path in options.triples:
        uses.add(_triples_in_file(path))
    encode = None if options.encoder is None else open_embedder(options.encoder).encode
    groups = induce(uses, options.size, encode, options.cosine)
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8", errors="replace", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows(_lines_of_groups(groups, uses))
    vocabulary = read_vocabulary(options.output)
    # The files are read a second time, because all their triples may not fit into memory.
    return vocabulary, {path: coverage_of(_triples_in_file(path), vocabulary) for path in options.triples}


def _triples_in_file(path: str) -> Iterator[Triple]:
    """The triples of a store or of JSON lines, each once per passage."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(open_triples(path, Path(scratch) / "triples.sqlite")) as source,
    ):
        for extraction in source.store.extractions(source.extractor):
            yield from extraction.triples


def _lines_of_groups(groups: Sequence[PredicateGroup], uses: Uses) -> Iterator[list[str]]:
    """The lines of the file: predicate after predicate, the spelling that names it first."""
    for group in groups:
        predicate = group.leading.spelling
        for use in sorted(group.members, key=lambda use: (use.spelling != predicate, -uses.triples(use), use)):
            is_reversed, why = group.members[use]
            direction = REVERSED if is_reversed else SAME
            example = " | ".join(uses.examples[use].as_list())
            yield [predicate, use.spelling, use.objects, direction, why, str(uses.triples(use)), example]


def coverage_of(triples: Iterable[Triple], vocabulary: Vocabulary) -> Coverage:
    """How many of some triples have a predicate of the vocabulary."""
    total, inside, renamed, turned = 0, 0, 0, 0
    outside: Counter[str] = Counter()
    for triple in triples:
        total += 1
        entry = vocabulary.entry(triple.predicate, triple.object)
        if entry is None:
            outside[triple.predicate] += 1
            continue
        inside += 1
        renamed += entry.predicate != triple.predicate
        turned += entry.is_reversed
    return Coverage(total, inside, renamed, turned, outside)


def add_vocabulary_arguments(parser: CommandParser) -> None:
    """Add the options of `tripletune rag vocabulary` to a parser."""
    add_arguments(parser, VocabularyOptions)


def vocabulary(arguments: argparse.Namespace) -> None:
    """Write a vocabulary, and say what it covers."""
    options = from_arguments(VocabularyOptions, arguments)
    written, coverages = write_vocabulary(options)
    spellings = len(written.entries)
    logger.info("%s: %d predicates, %s spellings", options.output, len(written.predicates), f"{spellings:,}")
    for path, coverage in coverages.items():
        share = coverage.inside / max(coverage.triples, 1)
        form = "  %s: %.1f %% of %s triples have one of these predicates; %s get another spelling, %s are turned around"
        counts = [f"{count:,}" for count in (coverage.triples, coverage.renamed, coverage.is_reversed)]
        logger.info(form, path, 100 * share, *counts)
        if coverage.outside:
            shown = ", ".join(f"{name} {count}" for name, count in coverage.outside.most_common(_SHOWN))
            logger.info("    most used outside: %s", shown)
    logger.info("review it, then give --vocabulary %s to `build pairs` and `rag extract`", options.output)
