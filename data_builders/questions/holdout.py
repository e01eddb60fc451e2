"""Choose the documents of the test questions, so that few paths lead from them to the other documents."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from tripletune.data_builders.datasets.split import drawn_number

_STARTS = 12
# How many times better a later selection must be, so that after a small change the same documents stay held out.
_BETTER = 1.25
# A selection ends with this share of the wanted facts, since its last document often adds more than is missing.
_FULL = 0.9


def hold_out(sizes: Mapping[str, int], links: Mapping[tuple[str, str], int], share: float, seed: int) -> set[str]:
    """Documents with about this share of all facts and few links to the other documents.

    From each of several starts, a selection grows by the document with the largest share of its links into the
    selection. The selection with the best ratio of kept to cut links is returned.

    Args:
        sizes: Number of facts per document.
        links: Number of links per pair of documents.
    """
    neighbours: dict[str, Counter[str]] = defaultdict(Counter)
    for (first, second), count in links.items():
        neighbours[first][second] = count
        neighbours[second][first] = count
    order = sorted(sizes, key=lambda name: drawn_number(seed, name))
    # Documents with links come first.
    starts = sorted(order, key=lambda name: not neighbours[name])[:_STARTS]
    best: set[str] = set()
    best_ratio = -1.0
    for start in starts:
        selected = _grow_selection(start, order, sizes, neighbours, _FULL * share * sum(sizes.values()))
        ratio = _kept_to_cut(selected, links)
        if ratio > _BETTER * best_ratio:
            best = selected
            best_ratio = ratio
    return best


def _grow_selection(
    start: str,
    order: Sequence[str],
    sizes: Mapping[str, int],
    neighbours: Mapping[str, Counter[str]],
    wanted_facts: float,
) -> set[str]:
    """A selection from `start` on with about this number of facts; at least one document stays outside.

    Args:
        order: The documents in the order in which they are taken when no document has links into the selection.
    """
    selected: set[str] = set()
    links_inside: Counter[str] = Counter()
    spare = iter(order)
    # A heap of minus the share of a document's links that lead into the selection, with the document. A document is
    # added again when its share has grown.
    waiting = [(0.0, start)]
    missing_facts = wanted_facts
    while missing_facts > 0 and len(selected) + 1 < len(sizes):
        if waiting:
            _, document = heapq.heappop(waiting)
        else:
            document = next(spare)
        if document in selected:
            continue
        selected.add(document)
        missing_facts -= sizes[document]
        links_inside.update(neighbours[document])
        for neighbour in neighbours[document].keys() - selected:
            share_inside = links_inside[neighbour] / neighbours[neighbour].total()
            heapq.heappush(waiting, (-share_inside, neighbour))
    return selected


def _kept_to_cut(selected: set[str], links: Mapping[tuple[str, str], int]) -> float:
    """The links inside a selection, divided by one more than the links that lead out of it, as none may lead out."""
    kept = 0
    cut = 0
    for (first, second), count in links.items():
        if first in selected and second in selected:
            kept += count
        elif first in selected or second in selected:
            cut += count
    return kept / (1 + cut)
