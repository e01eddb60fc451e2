"""Read 2WikiMultiHopQA (Ho et al., 2020): HotpotQA's layout plus `evidences`, gold triples in reasoning order.

Some supporting facts of the published files name a sentence that does not exist. These facts are counted, and their
passages still support the question.
"""

from __future__ import annotations

from tripletune.core.data.contexts import as_list
from tripletune.core.data.questions import Issues, Questions
from tripletune.core.data.triples import Triple, triples_from_json
from tripletune.core.rows import Row
from tripletune.data_builders.readers.hotpotqa import read_questions as read_hotpotqa


def read_questions(location: str, issues: Issues = None, source: str = "two_wiki") -> Questions:
    """Stream the questions of a 2WikiMultiHopQA file; see `data_builders.readers.Reader` for arguments and errors."""
    return read_hotpotqa(location, issues, source, _gold_triples)


def _gold_triples(row: Row, where: str) -> tuple[Triple, ...]:
    """The gold triples of a row in reasoning order; a repeated one counts once.

    The official file has lists `[s, p, o]`; copies have objects or three columns, under the names below.
    """
    value = as_list(row.get("evidences"), ("subject", "fact"), ("relation", "predicate"), ("object", "entity"))
    return tuple(dict.fromkeys(triples_from_json(value, where)))
