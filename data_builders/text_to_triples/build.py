"""Text-to-triples data for the extractor f_t2t (RAS, section 3.2 and D.1): pairs from many sources, one record form.

    tripletune build pairs --source wikiofgraph:wikiofgraph.jsonl --output runs/t2t
    tripletune build pairs --source triples:runs/world/train.triples.jsonl \\
        --source hotpotqa:hotpotqa_train.jsonl:teacher.jsonl --exclude triples:held_out.jsonl --output runs/t2t_mixed

Files are streamed; look-ups lie in temporary files, so memory grows neither with the data nor with the texts to
exclude. Rows that are left out and whatever normalisation changed are counted in the data card.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from tripletune.data_builders.datasets.card import BuildFacts, file_digest
from tripletune.data_builders.datasets.folder import FolderOptions, Layout, add_folder_arguments, write_rows
from tripletune.data_builders.datasets.shards import SPLIT_NAME
from tripletune.data_builders.hotpotqa_subq.sources import Source
from tripletune.data_builders.readers._pair_rows import PairDrop
from tripletune.data_builders.text_to_triples.card import PairStatistics, pair_schema, write_pair_card
from tripletune.data_builders.text_to_triples.cleaning import (
    ENTITY_CASES,
    PREDICATES,
    Cleaning,
    EntityCase,
    Predicates,
    clean_row,
    clean_text,
    text_key,
    triples_key,
)
from tripletune.data_builders.text_to_triples.seen import SeenTable
from tripletune.data_builders.text_to_triples.sources import check_source, read_source, read_texts
from tripletune.data_builders.text_to_triples.split import PAPER_ROWS, CountedSplit
from tripletune.models.data.pairs import ExtractionPair, entity_triple

logger = logging.getLogger(__name__)

NoFacts = Literal["keep", "drop"]
NO_FACTS: tuple[NoFacts, ...] = get_args(NoFacts)
ENTITY_SOURCE = "names"
_PAIR, _TEXT, _ID = "pair", "text", "id"


@dataclass(frozen=True)
class PairOptions:
    """Options of a build; the command line says what each one means.

    Raises:
        ValueError: a value makes no sense.
    """

    validation_rows: int | None = None
    split_name: str | None = None
    seed: int = 0
    limit: int | None = None
    exclude: tuple[str, ...] = ()
    entity_case: EntityCase = "source"
    predicates: Predicates = "source"
    no_facts: NoFacts = "keep"
    entity_share: float = 0.0

    def __post_init__(self) -> None:
        Cleaning(self.entity_case, self.predicates)
        CountedSplit(self.validation_rows, self.seed)
        if self.split_name is not None and not SPLIT_NAME.fullmatch(self.split_name):
            raise ValueError(f"split name {self.split_name!r}: use letters, digits, underscores and single dots")
        if self.split_name is not None and self.validation_rows is not None:
            raise ValueError("validation rows and a split name: with one split for all there are no validation rows")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit {self.limit}: it must be at least 1")
        if self.no_facts not in NO_FACTS:
            raise ValueError(f"no facts {self.no_facts!r} is not one of {', '.join(NO_FACTS)}")
        if not 0 <= self.entity_share <= 1:
            raise ValueError(f"entity share {self.entity_share}: it must lie between 0 and 1")


@dataclass
class Tally:
    """What is counted while sources are read: rows left out, oddities, and pairs, by source where it matters."""

    drops: dict[str, Counter[str]] = field(default_factory=dict)
    issues: dict[str, Counter[str]] = field(default_factory=dict)
    excluded_texts: int = 0


def build(sources: list[Source], options: PairOptions, folder: FolderOptions) -> dict[str, Any]:
    """Build a text-to-triples data set.

    Args:
        sources: What to read, in this order; of a text that occurs again the first row counts.
        options: How pairs are made and split.
        folder: Where and how they are written.

    Returns:
        The statistics that are also in `statistics.json`.

    Raises:
        FileNotFoundError: a file is missing.
        FileExistsError: the output folder is taken.
        ValueError: a source can't be read, or gives not a single pair.
    """
    names = Counter(source.name for source in sources)
    for source in sources:
        check_source(source)
        if names[source.name] > 1 or source.name == ENTITY_SOURCE:
            taken = "stands for the pairs of --entity-share" if source.name == ENTITY_SOURCE else "is there twice"
            raise ValueError(f"the source name {source.name!r} {taken}; name it otherwise: NAME={source.reader}:FILE")
    excluded = [Source.parse(text) for text in options.exclude]
    for source in excluded:
        check_source(source)
    tally, split = Tally(), CountedSplit(options.validation_rows, options.seed)

    def rows(seen: SeenTable) -> Iterator[tuple[ExtractionPair, str]]:
        pairs = _pairs(sources, excluded, options, tally, seen)
        if options.split_name is None:
            return split.split(pairs)
        return ((pair, str(options.split_name)) for pair in pairs)

    def facts(statistics: PairStatistics) -> BuildFacts:
        if not statistics.records:
            listed = "; ".join(f"{name}: {_listed(drops)}" for name, drops in tally.drops.items() if drops)
            raise ValueError(f"not a single pair could be made ({listed or 'the files hold no rows'})")
        return _facts(sources, excluded, options, folder, tally, split)

    layout = Layout(PairStatistics(folder.tokenizer), write_pair_card, pair_schema)
    with SeenTable() as seen:
        return write_rows(rows(seen), facts, folder, layout)


def _pairs(
    sources: list[Source], excluded: list[Source], options: PairOptions, tally: Tally, seen: SeenTable
) -> Iterator[ExtractionPair]:
    for source in excluded:
        for text in read_texts(source):
            tally.excluded_texts += seen.first(_TEXT, text_key(clean_text(text))) is None
    for source in sources:
        drops = tally.drops.setdefault(source.name, Counter())
        issues = tally.issues.setdefault(source.name, Counter())
        for pair in _source_pairs(source, options, drops, issues, seen):
            yield pair
            if (name := _name_of(pair, options)) is not None:
                named = ExtractionPair(f"{ENTITY_SOURCE}:{pair.id}", name, "", (entity_triple(name),), ENTITY_SOURCE)
                if seen.first(_PAIR, f"\n{text_key(name)}") is None:
                    yield named


def _source_pairs(
    source: Source, options: PairOptions, drops: Counter[str], issues: Counter[str], seen: SeenTable
) -> Iterator[ExtractionPair]:
    cleaning = Cleaning(options.entity_case, options.predicates)
    for number, row in enumerate(islice(read_source(source, drops, issues), options.limit), 1):
        clean = clean_row(row, cleaning, issues)
        key = text_key(clean.text)
        if clean.malformed:
            drops[PairDrop.ALL_MALFORMED] += 1
        elif not key:
            drops[PairDrop.NO_TEXT] += 1
        elif not clean.triples and options.no_facts == "drop":
            drops[PairDrop.NO_FACTS] += 1
        elif options.exclude and seen.has(_TEXT, key):
            drops[PairDrop.EXCLUDED] += 1
        elif (before := seen.first(_PAIR, f"{text_key(clean.title)}\n{key}", triples_key(clean.triples))) is not None:
            same = before == triples_key(clean.triples)
            drops[PairDrop.REPEATED if same else PairDrop.CONTRADICTED] += 1
        else:
            identity = f"{source.name}:{row.id or number}"
            if seen.first(_ID, identity) is not None:
                identity = f"{identity}:{number}"
            yield ExtractionPair(identity, clean.text, clean.title, clean.triples, source.name)


def _name_of(pair: ExtractionPair, options: PairOptions) -> str | None:
    """The name that becomes a pair of its own beside this one: a share of the pairs, drawn by a hash of the id."""
    if not options.entity_share or not pair.triples:
        return None
    digest = hashlib.blake2b(f"{options.seed}\n{pair.id}".encode(), digest_size=8).digest()
    if int.from_bytes(digest) >= options.entity_share * 2**64:
        return None
    name = pair.title or pair.triples[0].subject
    return name if name in f"{pair.title}\n{pair.text}" else None


def _facts(
    sources: list[Source],
    excluded: list[Source],
    options: PairOptions,
    folder: FolderOptions,
    tally: Tally,
    split: CountedSplit,
) -> BuildFacts:
    notes = [split.sentence()] if options.split_name is None else []
    if excluded:
        notes.append(f"{tally.excluded_texts:,} texts of {', '.join(s.text for s in excluded)} were kept out.")
    paths = [path for source in (*sources, *excluded) for path in (source.location, source.annotations) if path]
    order = {drop.value: place for place, drop in enumerate(PairDrop)}
    shown = {name: value for name, value in vars(options).items() if name != "exclude"}
    return BuildFacts(
        title="Text-to-triples pairs",
        summary="Texts with their subject-predicate-object facts, to train the extractor of RAS (section D.1).",
        drops={
            name: {str(what): n for what, n in sorted(drops.items(), key=lambda item: order[item[0]]) if n}
            for name, drops in tally.drops.items()
            if drops
        },
        issues={f"{name}: {what}": n for name, issues in tally.issues.items() for what, n in issues.items() if n},
        files={path: file_digest(path) for path in dict.fromkeys(paths) if Path(path).is_file()},
        options={
            "sources": [source.text for source in sources],
            "exclude": [source.text for source in excluded],
            **shown,
            "format": folder.format,
            "shard_size": folder.shard_size,
            "tokenizer": folder.tokenizer,
        },
        notes=notes,
    )


def _listed(counts: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tripletune build pairs",
        description="Build text-to-triples pairs from published data, a teacher's triples or the fictional world.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--source", action="append", required=True, metavar="[NAME=]READER:FILE[:REPLIES]",
        help="pairs to read: triples, wikiofgraph or genwiki with a file (.jsonl, .json, .parquet) or a hub id "
        "owner/name[@configuration][#split]; or a reader of questions (hotpotqa, ...) with its file and a teacher's "
        "recorded replies; repeat it for several; of a text that occurs again the first row counts")  # fmt: skip
    add("--exclude", action="append", default=[], metavar="[NAME=]READER:FILE[:REPLIES]",
        help="leave out the texts of this source, for example those of a test set; repeat it for several")  # fmt: skip
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--validation-rows", type=int, metavar="N", help=f"validation rows, a count (the paper's "
        f"{PAPER_ROWS:,}, but at most a tenth of all, where this is not given)")  # fmt: skip
    split.add_argument("--split-name", help="put everything into one split of this name instead")
    add("--seed", type=int, default=0, help="seed of the split")
    add("--limit", type=int, help="read only the first rows of each source")
    add("--entity-case", choices=ENTITY_CASES, default="source", help="spelling of names: the source's, or that of "
        "the text where they occur in it (WikiOFGraph lower-cases them)")  # fmt: skip
    add("--predicates", choices=PREDICATES, default="source", help="spelling of predicates: the source's, or as words "
        "(birthPlace becomes 'birth place')")  # fmt: skip
    add("--no-facts", choices=NO_FACTS, default="keep", help="texts with an empty list of triples: keep them with an "
        "empty target, or leave them out")  # fmt: skip
    add("--entity-share", type=float, default=0.0, metavar="SHARE", help="share of the pairs whose title or first "
        "subject becomes a pair of its own, (NAME, is, NAME), as the paper's rule for a text that is only a name "
        "asks; the paper's own data has none")  # fmt: skip
    add_folder_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        values = {name: getattr(parsed, name) for name in PairOptions.__dataclass_fields__}
        values["exclude"] = tuple(parsed.exclude)
        sources = [Source.parse(text) for text in parsed.source]
        folder = FolderOptions.from_arguments(parsed)
        numbers = build(sources, PairOptions(**values), folder)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {error}\n")
    logger.info("%s: %s", folder.output, _listed(numbers["splits"]))
    for name, counts in numbers["sources"].items():
        logger.info("  %s: %s", name, _listed(counts))
    return 0
