"""Build text-to-triples data for the extractor f_t2t (RAS, sections 3.2 and D.1) from many sources.

    tripletune build pairs --source triples:runs/world/train.triples.jsonl \\
        --source hotpotqa:hotpotqa_train.jsonl:teacher.jsonl --exclude triples:held_out.jsonl --output runs/t2t_mixed

Files are streamed and look-ups use temporary files, so memory grows neither with the data nor with the excluded texts.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.pairs import ExtractionPair, entity_triple, is_only_a_name, predicate_words, spelling_in
from tripletune.core.data.triples import Triple
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import run_program
from tripletune.data_builders.datasets import listed
from tripletune.data_builders.datasets.kinds import PAIRS
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.split import (
    PAPER_ROWS,
    CountedSplit,
    drawn_number,
    split_name_problems,
    text_key,
)
from tripletune.data_builders.datasets.writer import BuildFacts, FolderOptions, new_dataset
from tripletune.data_builders.readers.triples import (
    MALFORMED_TRIPLES,
    PairDrop,
    PairRow,
    check_source,
    read_rows,
    read_source,
)
from tripletune.data_builders.subq.options import Source, check_names
from tripletune.rag.triples.vocabulary import Vocabulary, read_vocabulary

logger = logging.getLogger(__name__)

ENTITY_SOURCE = "names"
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
    vocabulary: str | None = setting(
        None, "file of `rag vocabulary`: triples get its predicates, and its directions, after the other changes"
    )
    outside: Literal["keep", "drop"] = setting(
        "keep", "keep triples whose predicate the vocabulary lacks, or drop them", needs="vocabulary"
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
        problems = split_name_problems(self.split_name)
        if self.split_name is not None and self.validation_rows is not None:
            problems.append("validation_rows and split_name: a single split has no validation rows; set one of the two")
        return problems


def build_pairs(
    sources: Sequence[Source], options: PairOptions, folder: FolderOptions, excluded: Sequence[Source] = ()
) -> dict[str, Any]:
    """Build a text-to-triples data set.

    Args:
        excluded: Sources whose texts are left out.

    Returns:
        The statistics of the data set, as in its `statistics.json`.
    """
    check_names(sources)
    files: list[str | None] = []
    for source in (*sources, *excluded):
        check_source(source)
        if source.name == ENTITY_SOURCE and source in sources:
            raise ValueError(f"{source.name!r} is the name for pairs of --entity-share: choose another source name")
        files += [source.location, source.annotations]
    files.append(options.vocabulary)
    build = _Build(sources, excluded, options)
    with new_dataset(folder, PAIRS, files) as dataset:
        for pair, split in build.split_pairs():
            dataset.write(pair, split)
        if not dataset.statistics.records:
            reasons = "; ".join(f"{name}: {listed(drops)}" for name, drops in build.drops.items() if drops)
            raise ValueError(f"no pair could be made ({reasons or 'the files hold no rows'})")
        for name, drops in build.drops.items():
            logger.info("%s: left out: %s", name, listed(drops) or "none")
        return dataset.finish(build.facts())


class _Build:
    """Makes the pairs of all sources.

    Args:
        sources: What to read, in this order: of equal texts the first one counts.
        excluded: Sources whose texts are left out.
        options: How pairs are made and split.

    Attributes:
        drops: Counts the rows that give no pair, by source and `PairDrop`.
    """

    def __init__(self, sources: Sequence[Source], excluded: Sequence[Source], options: PairOptions) -> None:
        self._sources = sources
        self._excluded = excluded
        self._options = options
        self._vocabulary = read_vocabulary(options.vocabulary) if options.vocabulary else None
        self._split = CountedSplit(options.validation_rows, options.seed)
        self._excluded_texts = 0
        self._issues: dict[str, Counter[str]] = {source.name: Counter() for source in sources}
        self.drops: dict[str, Counter[str]] = {source.name: Counter() for source in sources}

    def split_pairs(self) -> Iterator[tuple[ExtractionPair, str]]:
        """Stream the pairs with their splits: drawn by a hash of the text, or all in the one that was named."""
        with SeenTable() as seen:
            pairs = self._pairs_of_sources(seen)
            if self._options.split_name is None:
                yield from self._split.split(pairs)
            else:
                for pair in pairs:
                    yield pair, self._options.split_name

    def _pairs_of_sources(self, seen: SeenTable) -> Iterator[ExtractionPair]:
        """The pairs of all sources, each perhaps followed by the pair of its name.

        Excluded texts are read first, since a pair that was yielded can't be taken back. If none is found, the user has
        named a wrong file and would train on the test set. `seen` holds the excluded texts under "text", and under
        "pair" the title and text of each pair, with a key of its triples.
        """
        for source in self._excluded:
            for row in read_rows(source, Counter(), Counter()):
                if seen.add_if_new("text", text_key(clean_text(row.text))):
                    self._excluded_texts += 1
        if self._excluded and not self._excluded_texts:
            raise ValueError(f"--exclude {', '.join(source.text for source in self._excluded)}: no text was found")
        for source in self._sources:
            for pair in self._source_pairs(source, seen):
                yield pair
                name = self._name_of(pair)
                if name is not None and seen.add_if_new("pair", f"\n{text_key(name)}"):
                    triples = (entity_triple(name),)
                    yield ExtractionPair(f"{ENTITY_SOURCE}:{pair.id}", name, "", triples, ENTITY_SOURCE)

    def _source_pairs(self, source: Source, seen: SeenTable) -> Iterator[ExtractionPair]:
        """The pairs of a source; rows that give none are counted in `drops`. A repeated id gets its row's number.

        A repeated id is no error, since sources are taken as they are, but the ids of pairs must differ.
        """
        drops = self.drops[source.name]
        issues = self._issues[source.name]
        for number, row in enumerate(islice(read_source(source, drops, issues), self._options.limit), 1):
            clean = clean_row(row, self._options, issues)
            if self._vocabulary is not None:
                clean = with_vocabulary(clean, self._vocabulary, self._options.outside == "drop", issues)
            reason = self._reason_to_drop(clean, seen)
            if reason is not None:
                drops[reason] += 1
                continue
            identity = f"{source.name}:{row.id or number}"
            if not seen.add_if_new("id", identity):
                identity += f":{number}"
            yield ExtractionPair(identity, clean.text, clean.title, clean.triples, source.name)

    def _reason_to_drop(self, row: PairRow, seen: SeenTable) -> PairDrop | None:
        """Why a clean row gives no pair, or None; then its title and text are added to `seen`.

        A text that comes again with other triples contradicts the first one, and the card counts it apart from copies:
        many of them mean that two sources disagree.
        """
        key = text_key(row.text)
        if row.unusable:
            return row.unusable
        if not key:
            return PairDrop.NO_TEXT
        if not row.triples and self._options.no_facts == "drop":
            return PairDrop.NO_FACTS
        if self._excluded and seen.get("text", key) is not None:
            return PairDrop.EXCLUDED
        triples = triples_key(row.triples)
        earlier_triples = seen.get_or_add("pair", f"{text_key(row.title)}\n{key}", triples)
        if earlier_triples is None:
            return None
        if earlier_triples == triples:
            return PairDrop.REPEATED
        return PairDrop.CONTRADICTED

    def _name_of(self, pair: ExtractionPair) -> str | None:
        """The name that becomes an extra pair, for a share of the pairs, drawn by a hash of the id; else None.

        A name that is not in the text is an invention of the annotator, and is not used.
        """
        if not pair.triples or drawn_number(self._options.seed, pair.id) >= self._options.entity_share * 2**64:
            return None
        name = pair.title or pair.triples[0].subject
        if name not in f"{pair.title}\n{pair.text}":
            return None
        return name

    def facts(self) -> BuildFacts:
        """The facts of the build for the card; call it after all pairs were read, since reading counts them.

        Counts of 0 are left out: counters keep a key for everything that was looked for.
        """
        notes = []
        if self._options.split_name is None:
            notes.append(self._split.sentence())
        if self._excluded:
            names = ", ".join(source.text for source in self._excluded)
            notes.append(f"{self._excluded_texts:,} texts of {names} were excluded.")
        drops = {}
        for name, dropped in self.drops.items():
            if +dropped:
                drops[name] = {str(reason): number for reason, number in dropped.items()}
        issues = {}
        for name, counts in self._issues.items():
            for issue, number in counts.items():
                if number:
                    issues[f"{name}: {issue}"] = number
        return BuildFacts(
            title="Text-to-triples pairs",
            summary="Texts with their subject-predicate-object facts, to train the extractor of RAS (section D.1).",
            drops=drops,
            issues=issues,
            options={
                "sources": [source.text for source in self._sources],
                "exclude": [source.text for source in self._excluded],
                **vars(self._options),
            },
            notes=notes,
        )


def clean_row(row: PairRow, options: PairOptions, issues: Counter[str]) -> PairRow:
    """Normalise a row and count changes in `issues`; a row that loses all its triples is unusable.

    Its empty target would teach a model that a text with facts has none.
    """
    title = clean_text(row.title)
    text = clean_text(row.text)
    issues[TEXT_CHANGED] += int((title, text) != (row.title, row.text))
    if not row.triples and is_only_a_name(title, text):
        issues[ONLY_A_NAME] += 1
        return replace(row, title=title, text=text, triples=(entity_triple(title),))
    searched = f"{title}\n{text}"
    triples = []
    for triple in row.triples:
        try:
            triples.append(_clean_triple(triple, searched, options, issues))
        except ValueError:
            # A field has no visible character.
            issues[MALFORMED_TRIPLES] += 1
    distinct = tuple(dict.fromkeys(triples))
    issues[REPEATED_TRIPLES] += len(triples) - len(distinct)
    unusable = PairDrop.ALL_MALFORMED if row.triples and not distinct else None
    return replace(row, title=title, text=text, triples=distinct, unusable=unusable)


def _clean_triple(triple: Triple, searched: str, options: PairOptions, issues: Counter[str]) -> Triple:
    """Normalise a triple; `searched` is the title and text whose spelling its entities may get.

    Each kind of change is counted once per triple in `issues`, and the card shows the counts.
    """
    clean = Triple(*map(clean_text, triple.as_list()))
    respelled = clean
    if options.entity_case == "text":
        subject = spelling_in(clean.subject, searched)
        respelled = Triple(subject, clean.predicate, spelling_in(clean.object, searched))
    reworded = respelled
    if options.predicates == "words":
        reworded = replace(respelled, predicate=predicate_words(clean.predicate))
    issues[TRIPLE_CHANGED] += int(clean != triple)
    issues[CASE_CHANGED] += int(respelled != clean)
    issues[PREDICATE_CHANGED] += int(reworded != respelled)
    return reworded


def with_vocabulary(row: PairRow, vocabulary: Vocabulary, drop_outside: bool, issues: Counter[str]) -> PairRow:
    """Write the predicates of a clean row as a vocabulary does, and count the changes in `issues`.

    The triple (NAME, is, NAME) is the paper's, so it stays. A row that loses all its triples is unusable.
    """
    if not row.triples or row.triples == (entity_triple(row.title or row.text),):
        return row
    triples = vocabulary.of(row.triples, issues, drop_outside)
    return replace(row, triples=triples, unusable=None if triples else PairDrop.ALL_OUTSIDE)


def clean_text(text: str) -> str:
    """Compose Unicode (NFC), fold spaces and remove control characters."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(_UNSEEN.sub("", text).split())


def triples_key(triples: tuple[Triple, ...]) -> str:
    """A key that does not depend on the order of the triples, so that reordered copies count as copies."""
    lines = "\n".join(sorted("\t".join(triple.as_list()) for triple in triples))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build pairs",
        description="Build text-to-triples pairs from published data, a teacher's triples or the fictional world.",
        example="tripletune build pairs --source wikiofgraph:wikiofgraph.jsonl --output runs/t2t",
    )
    group = parser.add_argument_group("what to read")
    group.add_argument("--source", action="append", required=True, metavar="[NAME=]READER:FILE[:REPLIES]",
        help="pairs to read: triples, wikiofgraph or genwiki with a file (.jsonl, .json, .parquet, .csv, .tsv) or a "
        "hub id owner/name[@configuration][#split]; or a reader of questions (hotpotqa, ...) with its file and a "
        "teacher's recorded replies; repeatable; only the first row of a text is used")  # fmt: skip
    group.add_argument("--exclude", action="append", default=[], metavar="[NAME=]READER:FILE[:REPLIES]",
        help="leave out the texts of this source, for example a test set; repeatable")  # fmt: skip
    add_arguments(parser.add_argument_group("how pairs are made and split"), PairOptions)
    add_arguments(parser.add_argument_group("output"), FolderOptions)
    parsed = parser.parse_args(arguments)

    def program() -> None:
        """Build the pairs of the command line."""
        sources = list(map(Source.parse, parsed.source))
        excluded = list(map(Source.parse, parsed.exclude))
        folder = from_arguments(FolderOptions, parsed)
        numbers = build_pairs(sources, from_arguments(PairOptions, parsed), folder, excluded)
        logger.info("%s: %s", folder.output, listed(numbers["splits"]))
        for name, counts in numbers["sources"].items():
            logger.info("  %s: %s", name, listed(counts))

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
