"""Text-to-triples pairs: what the extractor f_t2t of RAS is trained on (section D.1)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tripletune.data_builders.datasets.rows import RowKind, Statistics, Table, length_table
from tripletune.data_builders.text_to_triples.cleaning import text_key
from tripletune.models.data.pairs import ExtractionPair, entity_triple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from tripletune.models.data.triples import Triple

# RAS, section D.1.
MAX_SOURCE_TOKENS, MAX_TARGET_TOKENS = 512, 256
PAPER_PAIRS = 5_851_776
_COLUMNS = ("with facts", "without facts", "only a name", "with a title", "triples")


class Pairs(RowKind[ExtractionPair]):
    """Texts with their triples."""

    name, plural = "pair", "pairs"
    keys = ("text", "triples")
    labels = MappingProxyType({"facts": "with facts", "no_facts": "without facts", "name": "only a name"})

    def schema(self) -> pa.Schema:
        """The Arrow schema of a pair."""
        import pyarrow as pa

        text = pa.string()
        triples = pa.list_(pa.list_(text))
        return pa.schema([("id", text), ("text", text), ("title", text), ("triples", triples), ("source", text)])

    def read(self, row: dict[str, Any], where: str) -> ExtractionPair:
        """Read a stored pair."""
        return ExtractionPair.from_json(row, where)

    def label(self, row: ExtractionPair) -> str:
        """Whether a pair has facts, none, or is only a name."""
        if not row.triples:
            return "without facts"
        return "only a name" if row.triples == (entity_triple(row.triples[0].subject),) else "with facts"

    def text(self, row: ExtractionPair) -> tuple[str, str]:
        """Title and text, and the triples as they are written."""
        return row.source_text, row.target or "(nothing: the text has no facts)"

    def describe(self, row: ExtractionPair, split: str) -> list[str]:
        """Identity and sizes."""
        head = f"{row.id}  (split {split}, source {row.source or '-'}, {self.label(row)})"
        return [head, f"{len(row.triples)} triples, {len(_names(row))} entities"]

    def sides(self, row: ExtractionPair) -> list[tuple[str, str]]:
        """A text is the same aside from spaces, case and Unicode form."""
        return [("text", text_key(row.text))]

    def graphs(self, row: ExtractionPair) -> list[Sequence[Triple]]:
        """The pair's triples."""
        return [row.triples]

    def count(self, row: ExtractionPair, statistics: Statistics[ExtractionPair]) -> None:
        """Count pairs by source, their lengths, and those that the paper would cut."""
        names, searched = _names(row), f"{row.title}\n{row.text}".casefold()
        for what, number in (
            ("pairs", 1),
            (self.label(row), 1),
            ("with a title", bool(row.title)),
            ("triples", len(row.triples)),
            ("entities", len(names)),
            ("entities in the text", sum(name.casefold() in searched for name in names)),
        ):
            statistics.count("sources", row.source, what, number)
        source, target = statistics.length(row.source_text), statistics.length(row.target)
        for name, value in (("source", source), ("target", target), ("triples", len(row.triples))):
            statistics.measure("all", name, value)
        if statistics.tokenizer:
            statistics.count("longer_than_the_paper_cuts", "all", "source", source > MAX_SOURCE_TOKENS)
            statistics.count("longer_than_the_paper_cuts", "all", "target", target > MAX_TARGET_TOKENS)

    def tables(self, numbers: dict[str, Any], facts: Any) -> list[Table]:
        """The sources and the lengths."""
        sources = [
            [name, *(f"{counts.get(key, 0):,}" for key in _COLUMNS), _share(counts)]
            for name, counts in numbers.get("sources", {}).items()
        ]
        note = (
            "“Entities in the text” is the share of subjects and objects that occur in title or text, ignoring case. "
            f"The paper trains on {PAPER_PAIRS:,} pairs of WikiOFGraph (RAS, section D.1)."
        )
        longer, cut = numbers.get("longer_than_the_paper_cuts", {}).get("all"), ""
        if longer:
            cut = (
                f"{longer['source']:,} sources are longer than the {MAX_SOURCE_TOKENS} tokens the paper reads, "
                f"{longer['target']:,} targets longer than the {MAX_TARGET_TOKENS} it writes."
            )
        head = ["source", *_COLUMNS, "entities in the text"]
        return [Table("Sources", head, sources, note), length_table(numbers, cut)]


def _names(row: ExtractionPair) -> set[str]:
    return {name for triple in row.triples for name in (triple.subject, triple.object)}


def _share(counts: dict[str, int]) -> str:
    entities = counts.get("entities", 0)
    return f"{counts['entities in the text'] / entities:.1%}" if entities else "-"


KIND = Pairs()
