"""Any file or hub data set of `{"text", "triples"}`, optionally with `title` and `id`: ours, a teacher's, yours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tripletune.data_builders.text_to_triples.rows import PairRow, pair_rows


def read_pair_rows(location: str, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows; see `data_builders.text_to_triples.rows.PairReader`."""
    return pair_rows(location, drops, issues, ("triples", "triplets", "triplet"))
