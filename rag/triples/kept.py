"""What of an extractor's triples is kept: with the predicates of a vocabulary, and only what the passage supports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tripletune.core.data.stated import unsupported_reason
from tripletune.core.data.triples import Triple
from tripletune.rag.triples.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TripleRules:
    """What is kept, and how predicates are written.

    Attributes:
        vocabulary: Predicates that replace the extractor's spellings; None: all stay as they are.
        drop_outside: Whether triples are dropped whose predicate the vocabulary lacks.
        drop_unsupported: Whether triples are dropped whose names or numbers the passage lacks (`core.data.stated`).
    """

    vocabulary: Vocabulary | None = None
    drop_outside: bool = False
    drop_unsupported: bool = False

    @property
    def keep_all(self) -> bool:
        """Whether triples stay as they are."""
        return self.vocabulary is None and not self.drop_unsupported

    def kept(
        self, triples: Iterable[Triple], text: str, instruction: str = "", counts: Counter[str] | None = None
    ) -> tuple[Triple, ...]:
        """The triples of a passage that are kept.

        Args:
            text: The passage with its title.
            instruction: The extractor's prompt, from which it may have copied triples.
            counts: Counts what is changed and dropped, by `VocabularyCount` and `Unsupported`.
        """
        counts = Counter() if counts is None else counts
        if self.vocabulary is not None:
            triples = self.vocabulary.of(triples, counts, self.drop_outside)
        if not self.drop_unsupported:
            return tuple(triples)
        supported = []
        for triple in triples:
            reason = unsupported_reason(triple, text, instruction)
            if reason is None:
                supported.append(triple)
            else:
                counts[reason] += 1
        return tuple(supported)
