"""The supporting passages that `--gold` names, for recall in a corpus and for systems that read gold passages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from tripletune.core.data.passages import Passage, read_corpus
from tripletune.rag.triple_store import read_gold_links

logger = logging.getLogger(__name__)
# Ids of the supporting passages in a corpus, by question.
GoldLinks = Mapping[str, frozenset[str]]


def read_links(path: str, questions: Sequence[str]) -> GoldLinks:
    """The links of a file of gold, which must have some of these questions; a file of another split has none.

    Questions without a link are only reported, since a corpus may lack passages of some questions.
    """
    gold = read_gold_links(path)
    without = [name for name in questions if name not in gold]
    if len(without) == len(questions):
        raise ValueError(f"--gold {path} has no links of these questions: is it the file of another split?")
    if without:
        logger.warning("%s: %d questions have no gold link, so the recall is over the others", path, len(without))
    return gold


def linked_passages(gold: GoldLinks, path: str, corpus: str | Path) -> dict[str, Passage]:
    """The passages of a corpus to which links lead, by id.

    Only these are kept in memory, since a corpus may have millions. If none is found, the links are those of another
    corpus, and every recall would be 0.

    Args:
        path: The file of the links, for the error.
    """
    ids = set().union(*gold.values())
    passages = {passage.id: passage for passage in read_corpus(corpus) if passage.id in ids}
    if not passages:
        raise ValueError(f"--gold {path} has no passage of {corpus}: give the links of this corpus")
    return passages
