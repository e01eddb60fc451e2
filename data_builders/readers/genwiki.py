"""Read GenWiki (Jin et al., 2020), texts of Wikipedia with DBpedia's predicates; people annotated its test set.

A row is one of the official JSON (`{"text", "entities", "graph": [[s, p, o]]}`, where `<ENT_0>` in the text stands for
the first entity), one of the test set as WikiOFGraph's authors publish it (`{"triplet", "text"}`), or
`{"text", "triples"}`. The texts are tokenised: every comma and full stop has a space before it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from tripletune.core.data.fields import given
from tripletune.core.rows import Row
from tripletune.data_builders.readers.triples import PairRow, pair_rows

_PLACEHOLDER = re.compile(r"<ENT_(\d+)>")


def read_pair_rows(location: str, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows; see `data_builders.readers.triples.pair_rows`."""
    return pair_rows(location, drops, issues, ("graph", "triples", "triplet"), _with_entities)


def _with_entities(row: Row, text: str) -> str | None:
    """The text with its entities instead of their numbers; None if an entity is missing.

    Its triples name the entity, so a text with the bare number would teach a model to invent names.
    """
    numbers = [int(number) for number in _PLACEHOLDER.findall(text)]
    if not numbers:
        return text
    entities = given(row, "entities") or ()
    if not isinstance(entities, (list, tuple)):
        return None
    for number in numbers:
        if number >= len(entities) or entities[number] is None:
            return None
    return _PLACEHOLDER.sub(lambda placeholder: str(entities[int(placeholder[1])]), text)
