"""Read WikiOFGraph (Kim et al., 2024), 5.85 million sentences on which RAS trains its extractor (section D.1).

The authors' files and the hub data set `andreaKIM/WikiOFGraph` hold
`{"triplet": "(<S> s| <P> p| <O> o), ...", "text": "..."}`; copies with a list `triples` are read too. In the released
data entities and predicates are lower-cased after their first letter ("Bobby timmons"): `--entity-case text` gives
entities the spelling of the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tripletune.data_builders.readers.triples import PairRow, pair_rows


def read_pair_rows(location: str, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows; see `data_builders.readers.triples.pair_rows`."""
    return pair_rows(location, drops, issues, ("triplet", "triples"))
