"""Build text-to-triples data for the extractor f_t2t (RAS, sections 3.2 and D.1) from many sources.

    tripletune build pairs --source triples:runs/world/train.triples.jsonl \\
        --source hotpotqa:hotpotqa_train.jsonl:teacher.jsonl --exclude triples:held_out.jsonl --output runs/t2t_mixed

Files are streamed and look-ups use temporary files, so memory grows neither with the data nor with the excluded texts.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.pairs import ExtractionPair, entity_triple, is_only_a_name, predicate_words
from tripletune.core.data.triples import Triple
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import run_program
from tripletune.data_builders.datasets import SeenTable, listed
from tripletune.data_builders.datasets.kinds import PAIRS, text_key
from tripletune.data_builders.datasets.writer import BuildFacts, FolderOptions, drawn, new_dataset, split_name_problems
from tripletune.data_builders.readers.triples import (
    MALFORMED_TRIPLES,
    PairDrop,
    PairRow,
    check_source,
    read_rows,
    read_source,
)
from tripletune.data_builders.subq.options import Source, check_names

logger = logging.getLogger(__name__)

ENTITY_SOURCE = "names"
PAPER_ROWS = 5_000
# At most a tenth of a small data set is for validation, so that most of it is left for training.
_LARGEST_SHARE = 10
_PAIR, _TEXT, _ID = "pair", "text", "id"
TEXT_CHANGED = "texts with Unicode composed, spaces folded or control characters removed"
TRIPLE_CHANGED = "triples changed in the same way"
CASE_CHANGED = "triples with entities in the spelling of the text"
PREDICATE_CHANGED = "triples with predicates written as words"
REPEATED_TRIPLES = "triples that a row has twice, left out"
ONLY_A_NAME = "rows that are only a name, with the target (NAME, is, NAME)"

_UNSEEN = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u200b\ufeff]")


@dataclass(frozen=True)
class PairOptions(CheckedOptions):
    """How pairs are made and split."""

    entity_case: Literal["source", "text"] = setting(
        "source",
        "spelling of names: as in the source, or as in the text (RAS, figure 19, rule 5), for example for WikiOFGraph",
    )
    predicates: Literal["source", "words"] = setting(
        "source", "spelling of predicates: as in the source, or as words (birthPlace becomes 'birth place')"
    )
    no_facts: Literal["keep", "drop"] = setting(
        "keep", "keep texts with an empty list of triples (their target is empty), or drop them"
    )
    entity_share: float = setting(
        0.0,
        "share of pairs whose title or first subject becomes an extra pair (NAME, is, NAME), as in the paper's rule "
        "for texts that are only a name; the paper's data has no such pairs",
        at_least=0,
        at_most=1,
    )
    limit: int | None = setting(None, "read only the first rows of each source", at_least=1)
    validation_rows: int | None = setting(
        None,
        f"number of validation rows (default: the paper's {PAPER_ROWS:,}, at most a tenth of all)",
        at_least=0,
    )
    split_name: str | None = setting(None, "put all pairs into one split of this name")
    seed: int = setting(0, "seed of the split")

    def check(self) -> list[str]:
        """Problems of the split."""
        found = split_name_problems(self.split_name)
        if self.split_name is not None and self.validation_rows is not None:
            found.append("validation_rows and split_name: a single split has no validation rows; set one of the two")
        return found


def build_pairs(
    sources: Sequence[Source], options: PairOptions, folder: FolderOptions, excluded: Sequence[Source] = ()
) -> dict[str, Any]:
    """Build a text-to-triples data set."""
    check_names(sources)
    for source in (*sources, *excluded):
        check_source(source)
        if source.name == ENTITY_SOURCE and source in sources:
            raise ValueError(f"{source.name!r} is the name for pairs of --entity-share: choose another source name")
    build = _Build(sources, excluded, options)
    files = [path for one in (*sources, *excluded) for path in (one.location, one.annotations) if path]
    with new_dataset(folder, PAIRS, files) as dataset:
        for pair, side in build.sides():
            dataset.write(pair, side)
        if not dataset.statistics.records:
            reasons = "; ".join(f"{name}: {listed(drops)}" for name, drops in build.drops.items() if drops)
            raise ValueError(f"no pair could be made ({reasons or 'the files hold no rows'})")
        for name, drops in build.drops.items():
            logger.info("%s: left out: %s", name, listed(drops) or "none")
        return dataset.finish(build.facts())


class _Build:
    def __init__(self, sources: Sequence[Source], excluded: Sequence[Source], options: PairOptions) -> None:
        self._sources, self._excluded, self._options = sources, excluded, options
        self._split = CountedSplit(options.validation_rows, options.seed)
        self._excluded_texts = 0
        self._issues = {source.name: Counter[str]() for source in sources}
        self.drops = {source.name: Counter[str]() for source in sources}

    def sides(self) -> Iterator[tuple[ExtractionPair, str]]:
        name = self._options.split_name
        with SeenTable() as seen:
            pairs = self._pairs(seen)
            yield from self._split.split(pairs) if name is None else ((pair, name) for pair in pairs)

    def _pairs(self, seen: SeenTable) -> Iterator[ExtractionPair]:
        for source in self._excluded:
            for row in read_rows(source, Counter(), Counter()):
                self._excluded_texts += seen.first(_TEXT, text_key(clean_text(row.text))) is None
        if self._excluded and not self._excluded_texts:
            raise ValueError(f"--exclude {', '.join(source.text for source in self._excluded)}: no text was found")
        for source in self._sources:
            for pair in self._source_pairs(source, seen):
                yield pair
                name = self._name_of(pair)
                if name is not None and seen.first(_PAIR, f"\n{text_key(name)}") is None:
                    triples = (entity_triple(name),)
                    yield ExtractionPair(f"{ENTITY_SOURCE}:{pair.id}", name, "", triples, ENTITY_SOURCE)

    def _source_pairs(self, source: Source, seen: SeenTable) -> Iterator[ExtractionPair]:
        drops, issues = self.drops[source.name], self._issues[source.name]
        for number, row in enumerate(islice(read_source(source, drops, issues), self._options.limit), 1):
            clean = clean_row(row, self._options, issues)
            key, facts = text_key(clean.text), triples_key(clean.triples)
            if clean.unusable:
                drops[clean.unusable] += 1
            elif not key:
                drops[PairDrop.NO_TEXT] += 1
            elif not clean.triples and self._options.no_facts == "drop":
                drops[PairDrop.NO_FACTS] += 1
            elif self._excluded and seen.get(_TEXT, key) is not None:
                drops[PairDrop.EXCLUDED] += 1
            elif (before := seen.first(_PAIR, f"{text_key(clean.title)}\n{key}", facts)) is not None:
                drops[PairDrop.REPEATED if before == facts else PairDrop.CONTRADICTED] += 1
            else:
                identity = f"{source.name}:{row.id or number}"
                identity += f":{number}" if seen.first(_ID, identity) is not None else ""
                yield ExtractionPair(identity, clean.text, clean.title, clean.triples, source.name)

    def _name_of(self, pair: ExtractionPair) -> str | None:
        """The name that becomes an extra pair, for a share of the pairs, drawn by a hash of the id; else None."""
        if not pair.triples or drawn(self._options.seed, pair.id) >= self._options.entity_share * 2**64:
            return None
        name = pair.title or pair.triples[0].subject
        return name if name in f"{pair.title}\n{pair.text}" else None

    def facts(self) -> BuildFacts:
        notes = [self._split.sentence()] if self._options.split_name is None else []
        if names := ", ".join(source.text for source in self._excluded):
            notes.append(f"{self._excluded_texts:,} texts of {names} were excluded.")
        return BuildFacts(
            title="Text-to-triples pairs",
            summary="Texts with their subject-predicate-object facts, to train the extractor of RAS (section D.1).",
            drops={name: {str(what): n for what, n in drops.items()} for name, drops in self.drops.items() if +drops},
            issues={f"{name}: {what}": n for name, issues in self._issues.items() for what, n in issues.items() if n},
            options={
                "sources": [source.text for source in self._sources],
                "exclude": [source.text for source in self._excluded],
                **vars(self._options),
            },
            notes=notes,
        )


def clean_row(row: PairRow, options: PairOptions, issues: Counter[str]) -> PairRow:
    """Normalise a row and count changes in `issues`; a row that loses all its triples is unusable."""
    title, text = clean_text(row.title), clean_text(row.text)
    issues[TEXT_CHANGED] += (title, text) != (row.title, row.text)
    if not row.triples and is_only_a_name(title, text):
        issues[ONLY_A_NAME] += 1
        return replace(row, title=title, text=text, triples=(entity_triple(title),))
    found: list[Triple] = []
    searched = f"{title}\n{text}"
    lowered = searched.lower()
    for triple in row.triples:
        try:
            cleaned = Triple(*map(clean_text, triple.as_list()))
        except ValueError:
            issues[MALFORMED_TRIPLES] += 1
            continue
        subject, predicate, object_ = cleaned.as_list()
        if options.entity_case == "text":
            subject, object_ = (_spelling(name, searched, lowered) for name in (subject, object_))
        if options.predicates == "words":
            predicate = predicate_words(predicate)
        found.append(Triple(subject, predicate, object_))
        issues[TRIPLE_CHANGED] += cleaned != triple
        issues[CASE_CHANGED] += (subject, object_) != (cleaned.subject, cleaned.object)
        issues[PREDICATE_CHANGED] += predicate != cleaned.predicate
    distinct = tuple(dict.fromkeys(found))
    issues[REPEATED_TRIPLES] += len(found) - len(distinct)
    unusable = PairDrop.ALL_MALFORMED if row.triples and not distinct else None
    return replace(row, title=title, text=text, triples=distinct, unusable=unusable)


def clean_text(text: str) -> str:
    """Compose Unicode (NFC), fold spaces and remove control characters."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(_UNSEEN.sub("", text).split())


def triples_key(triples: tuple[Triple, ...]) -> str:
    """A key that does not depend on the order of the triples."""
    lines = "\n".join(sorted("\t".join(triple.as_list()) for triple in triples))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def _spelling(name: str, text: str, lowered: str) -> str:
    """A name in the spelling of the text if the text has the name as whole words, else unchanged."""
    wanted = name.lower()
    if len(lowered) != len(text) or len(wanted) != len(name):
        return name
    found = []
    start = lowered.find(wanted)
    while start >= 0:
        end = start + len(name)
        before, after = text[start - 1 : start] if start else "", text[end : end + 1]
        if not before.isalnum() and not after.isalnum():
            found.append(text[start:end])
        start = lowered.find(wanted, start + 1)
    return name if name in found or not found else found[0]


@dataclass
class CountedSplit:
    """Assigns splits to a stream of pairs in one pass; only the validation rows are held in memory.

    The validation rows are those whose texts have the smallest hashes, so they do not depend on the order of the rows
    and hardly change when the data grows. Rows of one text share a split, so `kept` may be smaller than `rows`.
    """

    rows: int | None = None
    seed: int = 0
    total: int = 0
    kept: int = 0

    def split(self, pairs: Iterable[ExtractionPair]) -> Iterator[tuple[ExtractionPair, str]]:
        """Yield the pairs with "train" or "validation"; candidates for validation come last."""
        most = PAPER_ROWS if self.rows is None else self.rows
        # A heap of (minus the hash, minus the number, pair), with the largest hash first.
        heap: list[tuple[int, int, ExtractionPair]] = []
        border = 2**64
        for pair in pairs:
            self.total += 1
            number = drawn(self.seed, text_key(pair.text))
            if number >= border:
                yield pair, "train"
                continue
            heapq.heappush(heap, (-number, -self.total, pair))
            if len(heap) > most:
                border = -heap[0][0]
                yield from _from_border(heap, border)
        if self.rows is None:
            most = min(most, self.total // _LARGEST_SHARE)
        elif most and most >= self.total:
            raise ValueError(
                f"validation rows {most}: there are only {self.total:,} pairs; set fewer, or set split_name"
            )
        while len(heap) > most:
            yield from _from_border(heap, -heap[0][0])
        self.kept = len(heap)
        for _, _, pair in sorted(heap, key=lambda entry: -entry[1]):
            yield pair, "validation"

    def sentence(self) -> str:
        """A sentence on the split, for the card."""
        text = (
            f"Validation: the {self.kept:,} of {self.total:,} pairs whose texts have the smallest hashes under seed "
            f"{self.seed}; no text is in both splits."
        )
        if self.rows is None and self.kept < PAPER_ROWS:
            text += f" The paper keeps {PAPER_ROWS:,} pairs; this data set is small, so a tenth is kept."
        return text


def _from_border(heap: list[tuple[int, int, ExtractionPair]], border: int) -> Iterator[tuple[ExtractionPair, str]]:
    """Take all pairs with the largest hash out of the heap, so that the pairs of one text stay together."""
    while heap and -heap[0][0] >= border:
        yield heapq.heappop(heap)[2], "train"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build pairs",
        description="Build text-to-triples pairs from published data, a teacher's triples or the fictional world.",
        example="tripletune build pairs --source wikiofgraph:wikiofgraph.jsonl --output runs/t2t",
    )
    group = parser.add_argument_group("what to read")
    group.add_argument("--source", action="append", required=True, metavar="[NAME=]READER:FILE[:REPLIES]",
        help="pairs to read: triples, wikiofgraph or genwiki with a file (.jsonl, .json, .parquet) or a hub id "
        "owner/name[@configuration][#split]; or a reader of questions (hotpotqa, ...) with its file and a teacher's "
        "recorded replies; repeatable; only the first row of a text is used")  # fmt: skip
    group.add_argument("--exclude", action="append", default=[], metavar="[NAME=]READER:FILE[:REPLIES]",
        help="leave out the texts of this source, for example a test set; repeatable")  # fmt: skip
    add_arguments(parser.add_argument_group("how pairs are made and split"), PairOptions)
    add_arguments(parser.add_argument_group("output"), FolderOptions)
    parsed = parser.parse_args(arguments)

    def program() -> None:
        sources, excluded = ([Source.parse(text) for text in texts] for texts in (parsed.source, parsed.exclude))
        folder = from_arguments(FolderOptions, parsed)
        numbers = build_pairs(sources, from_arguments(PairOptions, parsed), folder, excluded)
        logger.info("%s: %s", folder.output, listed(numbers["splits"]))
        for name, counts in numbers["sources"].items():
            logger.info("  %s: %s", name, listed(counts))

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
