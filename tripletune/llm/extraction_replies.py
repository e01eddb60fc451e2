"""The reading of an extractor's replies: text in RAS's format, or in a form that chat models write, to triples."""

from __future__ import annotations

from dataclasses import dataclass

from tripletune.core.data.triples import Triple
from tripletune.llm.replies import UnusableReply, find_triples


@dataclass(frozen=True, slots=True)
class ExtractionReply:
    """A parsed reply, without repeated triples.

    A reply is `unreadable` if it has text, but neither a triple nor the word for "no facts".
    """

    triples: tuple[Triple, ...]
    malformed: int = 0
    unreadable: bool = False
    repeated: int = 0

    @property
    def is_malformed(self) -> bool:
        """Whether any part of the output could not be used as written."""
        return self.unreadable or self.malformed > 0


def read_reply(*texts: str) -> ExtractionReply:
    """Parse a reply, or the replies to the pieces of a text, with `find_triples`; a bad reply does not affect others.

    An empty reply means no facts (so encoder-decoder models learn it).
    """
    found, malformed, unreadable = list[Triple](), 0, False
    for text in filter(str.strip, texts):
        try:
            reply = find_triples(text)
        except UnusableReply:
            unreadable = True
        else:
            found += reply.triples
            malformed += reply.malformed
    distinct = tuple(dict.fromkeys(found))
    return ExtractionReply(distinct, malformed, unreadable, len(found) - len(distinct))
