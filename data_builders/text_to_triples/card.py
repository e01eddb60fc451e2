"""Statistics, Arrow schema and card of a text-to-triples data set; memory does not grow with its size."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.data_builders.datasets.shards import CARD, STATISTICS, Format, front_matter, write_text
from tripletune.data_builders.datasets.stats import Histogram

from tripletune.data_builders.datasets.card import BuildFacts, table
from tripletune.models.data.pairs import ExtractionPair, entity_triple

if TYPE_CHECKING:
    import pyarrow as pa

# RAS, section D.1.
MAX_SOURCE_TOKENS, MAX_TARGET_TOKENS = 512, 256
PAPER_PAIRS = 5_851_776
_SAMPLES = 4
_LONGEST_SAMPLE = 1000
_KINDS = ("with facts", "without facts", "only a name")
SOURCE_HEAD = ["source", *_KINDS, "with a title", "triples", "entities in the text"]
LENGTH_HEAD = ["", "min", "mean", "median", "max"]


def pair_schema() -> pa.Schema:
    """The Arrow schema of a pair; explicit, since a shard that begins with empty lists does not show it."""
    import pyarrow as pa

    text = pa.string()
    triples = pa.list_(pa.list_(text))
    return pa.schema([("id", text), ("text", text), ("title", text), ("triples", triples), ("source", text)])


def pair_features() -> list[dict[str, Any]]:
    """The features of a pair as the YAML head of a data set card names them."""
    text = {"dtype": "string"}
    kinds: dict[str, dict[str, Any]] = {"triples": {"list": {"list": "string"}}}
    return [{"name": name, **kinds.get(name, text)} for name in pair_schema().names]


class PairStatistics:
    """Counts pairs, their lengths and their triples.

    Args:
        tokenizer: A model spec whose tokenizer counts lengths; None counts words between white space.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self.unit = f"tokens of {tokenizer}" if tokenizer else "white-space words, no tokenizer was given"
        self._length: Callable[[str], int] = _token_counter(tokenizer) if tokenizer else _word_count
        self._counts_tokens = tokenizer is not None
        self._splits: Counter[str] = Counter()
        self._sources: dict[str, Counter[str]] = defaultdict(Counter)
        self._histograms: dict[str, Histogram] = defaultdict(Histogram)
        self._too_long: Counter[str] = Counter()
        self._samples: dict[str, list[tuple[int, str, ExtractionPair]]] = {kind: [] for kind in _KINDS}

    @property
    def records(self) -> int:
        """How many pairs were counted."""
        return self._splits.total()

    def add(self, record: ExtractionPair, split: str) -> None:
        """Count one pair of a split."""
        kind = pair_kind(record)
        source, target = self._length(record.source_text), self._length(record.target)
        self._splits[split] += 1
        counts = self._sources[record.source]
        counts["pairs"] += 1
        counts[kind] += 1
        counts["with a title"] += bool(record.title)
        counts["triples"] += len(record.triples)
        names = {name for triple in record.triples for name in (triple.subject, triple.object)}
        searched = f"{record.title}\n{record.text}".casefold()
        counts["entities"] += len(names)
        counts["entities in the text"] += sum(name.casefold() in searched for name in names)
        for name, value in (("source", source), ("target", target), ("triples", len(record.triples))):
            self._histograms[name].add(value)
        self._too_long["source"] += source > MAX_SOURCE_TOKENS
        self._too_long["target"] += target > MAX_TARGET_TOKENS
        self._keep_sample(kind, record)

    def to_json(self) -> dict[str, Any]:
        """Everything that was counted, as plain numbers, and the samples."""
        return {
            "unit": self.unit,
            "records": self._splits.total(),
            "splits": dict(self._splits),
            "sources": {name: dict(counts) for name, counts in self._sources.items()},
            "lengths": {name: histogram.summary() for name, histogram in self._histograms.items()},
            "longer_than_the_paper_cuts": dict(self._too_long) if self._counts_tokens else None,
            "samples": {
                kind: [pair.to_json() for _, _, pair in sorted(heap, key=lambda entry: (-entry[0], entry[1]))]
                for kind, heap in self._samples.items()
                if heap
            },
        }

    def _keep_sample(self, kind: str, pair: ExtractionPair) -> None:
        """Keep the pairs whose ids have the smallest hashes: the same ones in any order of reading."""
        digest = int.from_bytes(hashlib.blake2b(pair.id.encode(), digest_size=8).digest())
        heap = self._samples[kind]
        if len(heap) < _SAMPLES:
            heapq.heappush(heap, (-digest, pair.id, pair))
        elif -digest > heap[0][0]:
            heapq.heapreplace(heap, (-digest, pair.id, pair))


def pair_kind(pair: ExtractionPair) -> str:
    """Whether a pair has facts, none, or is only a name."""
    if not pair.triples:
        return "without facts"
    return "only a name" if pair.triples == (entity_triple(pair.triples[0].subject),) else "with facts"


def write_pair_card(folder: str | Path, facts: BuildFacts, statistics: PairStatistics, format: Format) -> None:
    """Write `README.md` and `statistics.json` into a folder that holds its shards."""
    folder, numbers = Path(folder), statistics.to_json()
    head = front_matter(list(numbers["splits"]), format, facts.title, pair_features(), "text-generation")
    write_text(folder / CARD, f"{head}\n{pair_card_body(facts, numbers)}")
    content = {"statistics": numbers, "build": dataclasses.asdict(facts)}
    write_text(folder / STATISTICS, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def pair_card_body(facts: BuildFacts, numbers: dict[str, Any]) -> str:
    """The card's text below the YAML head, in Markdown."""
    rows = [[name, f"{count:,}"] for name, count in numbers["splits"].items()]
    parts = [f"# {facts.title}", facts.summary, *facts.notes, "## Pairs", table(["split", "pairs"], rows)]
    parts.append(f"The paper trains on {PAPER_PAIRS:,} pairs of WikiOFGraph (RAS, section D.1).")
    parts += ["## Sources", table(SOURCE_HEAD, source_rows(numbers))]
    parts.append("“Entities in the text” is the share of subjects and objects that occur in title or text, case aside.")
    parts += [f"## Lengths\n\nIn {numbers['unit']}.", table(LENGTH_HEAD, length_rows(numbers))]
    longer = numbers["longer_than_the_paper_cuts"]
    if longer is not None:
        parts.append(
            f"{longer['source']:,} sources are longer than the {MAX_SOURCE_TOKENS} tokens the paper reads, "
            f"{longer['target']:,} targets longer than the {MAX_TARGET_TOKENS} it writes."
        )
    drops = {f"{source}: {what}": n for source, counts in facts.drops.items() for what, n in counts.items()}
    for heading, counts in (("Rows left out", drops), ("Normalisation and oddities", facts.issues)):
        if counts:
            parts += [f"## {heading}", table(["what", "count"], [[name, f"{n:,}"] for name, n in counts.items()])]
    for heading, column, values in (("Input files", "SHA-256", facts.files), ("Options", "value", facts.options)):
        if values:
            listed = [[f"`{name}`", f"`{value}`"] for name, value in values.items()]
            parts += [f"## {heading}", table(["name", column], listed)]
    parts += ["## Samples", "Pairs picked by a hash of their ids: what the model reads, and what it learns to write."]
    for kind, rows_of_kind in numbers["samples"].items():
        parts.append(f"### {kind.capitalize()}")
        for row in rows_of_kind:
            pair = ExtractionPair.from_json(row)
            parts.append(f"`{pair.id}`\n\n~~~~text\n{_cut(pair.source_text)}\n=> {_cut(pair.target)}\n~~~~")
    return "\n\n".join(parts) + "\n"


def source_rows(numbers: dict[str, Any]) -> list[list[str]]:
    """The table of the sources, below `SOURCE_HEAD`."""
    return [
        [name, *(f"{counts.get(key, 0):,}" for key in SOURCE_HEAD[1:-1]), _share(counts)]
        for name, counts in numbers["sources"].items()
    ]


def length_rows(numbers: dict[str, Any]) -> list[list[str]]:
    """The table of the lengths, below `LENGTH_HEAD`."""
    return [[name, *(f"{summary[key]:,}" for key in LENGTH_HEAD[1:])] for name, summary in numbers["lengths"].items()]


def _share(counts: dict[str, int]) -> str:
    entities = counts.get("entities", 0)
    return f"{counts['entities in the text'] / entities:.1%}" if entities else "-"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]} [...]"


def _word_count(text: str) -> int:
    return len(text.split())


def _token_counter(spec: str) -> Callable[[str], int]:
    from tripletune.models.loading import load_tokenizer

    tokenizer = load_tokenizer(spec)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
