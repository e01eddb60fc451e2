"""Read WikiOFGraph (Kim et al., 2024), 5.85 million sentences on which RAS trains its extractor (section D.1).

The authors' files and the hub data set `andreaKIM/WikiOFGraph` hold
`{"triplet": "(<S> s| <P> p| <O> o), ...", "text": "..."}`; copies with a list `triples` are read too. In the released
data entities and predicates are lower-cased after their first letter ("Bobby timmons"): `--entity-case text` gives
entities the spelling of the text.

In released rows, subjects have lost a first S, predicates a first P and objects a first O ("olskjel", "art of", "hio"):
the authors' filter strips the markers with `strip("<S> ")`, `strip("<P> ")` and `strip("<O> ")`, which removes these
letters too (`process/3DataQuestEvalFiltering.py` at 2f4d86bd). The rows are read as they are, since RAS was trained on
them; `LOST_LETTER` counts the triples of which the row tells it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tripletune.core.data.answers import mentions
from tripletune.core.data.triples import Triple
from tripletune.data_builders.readers.triples import PairRow, pair_rows

LOST_LETTER = "triples with a name that lost its first letter S, P or O, as released"


def read_pair_rows(location: str, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows; see `data_builders.readers.triples.pair_rows`."""
    for row in pair_rows(location, drops, issues, ("triplet", "triples")):
        issues[LOST_LETTER] += _lost_letters(row.text, row.triples)
        yield row


def _lost_letters(text: str, triples: Sequence[Triple]) -> int:
    """The number of triples with a name that lost its first letter.

    An entity has lost it if the text has the entity only with this letter. A predicate is no word of the text, so it
    has lost its letter if it begins with a small letter beside one with a capital letter.
    """
    has_capitals = any(triple.predicate[0].isupper() for triple in triples)
    number = 0
    for triple in triples:
        is_lost = has_capitals and triple.predicate[0].islower()
        for letter, entity in (("S", triple.subject), ("O", triple.object)):
            if entity[0].islower() and mentions(text, letter + entity) and not mentions(text, entity):
                is_lost = True
        number += is_lost
    return number
