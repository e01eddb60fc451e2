"""Asks a text-to-triples model for the triples of every pair, and scores what it replies (RAS, section D.1).

A long text is cut into pieces as `tripletune rag extract` does. The reply to each piece is read by itself, as there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from tripletune.eval.suites.triples import Prediction
from tripletune.models.data.pairs import ExtractionPair, read_replies, read_reply
from tripletune.models.llm.client import RepliesPending, SetupError
from tripletune.models.llm.ledger_client import RetriesExhausted
from tripletune.models.local.generation import Completion
from tripletune.rag.triples.extract import source_pieces
from tripletune.rag.triples.extractor import TextExtractor
from tripletune.rag.triples.sentences import PIECE_LIMIT

logger = logging.getLogger(__name__)
# Pairs that are sorted by length together.
_WINDOW = 2048


async def extract_pairs(
    pairs: Iterable[ExtractionPair],
    extractor: TextExtractor,
    add: Callable[[dict[str, Any]], None],
    piece_limit: int = PIECE_LIMIT,
    window: int = _WINDOW,
) -> int:
    """Ask for the triples of pairs.

    Args:
        pairs: The pairs, streamed.
        extractor: The model.
        add: Takes the row of each pair as soon as it is there; see `result_row`.
        piece_limit: Longest text that the model gets, title included.
        window: Pairs that are sorted by length together.

    Returns:
        How many pairs wait for a batch's replies.

    Raises:
        SetupError: no call can succeed.
        RetriesExhausted: the server stays away.
    """
    slots, stream, waiting = asyncio.Semaphore(extractor.concurrency), iter(pairs), 0

    async def work(batch: list[ExtractionPair]) -> None:
        nonlocal waiting
        async with slots:
            for pair, found in await _replies(batch, extractor, piece_limit):
                if isinstance(found, RepliesPending):
                    waiting += 1
                else:
                    add(result_row(pair, found))

    while block := list(islice(stream, window)):
        block.sort(key=lambda pair: -len(pair.source_text))
        size = extractor.batch_size
        async with asyncio.TaskGroup() as group:
            for start in range(0, len(block), size):
                group.create_task(work(block[start : start + size]))
    return waiting


def result_row(pair: ExtractionPair, found: list[Completion] | Exception) -> dict[str, Any]:
    """The row of a pair: what the model replied, what could be read of it, and its cost.

    Args:
        pair: The pair.
        found: The replies to its pieces, or why there is none.
    """
    error = f"{type(found).__name__}: {found}" if isinstance(found, Exception) else ""
    completions = [] if isinstance(found, Exception) else found
    # Half characters, which JSON can spell, would end the run: no file can hold them.
    texts = [completion.text.encode("utf-8", "replace").decode("utf-8") for completion in completions]
    read = read_replies(texts)
    unreadable = sum(read_reply(text).unreadable for text in texts)
    return {
        "id": pair.id,
        "reply": "\n".join(texts),
        **({"replies": texts} if len(texts) > 1 else {}),
        "triples": [triple.as_list() for triple in read.triples],
        "malformed": read.malformed + unreadable,
        "pieces": len(completions),
        "cut_off": any(completion.finish_reason == "length" for completion in completions),
        "prompt_tokens": sum(completion.prompt_tokens for completion in completions),
        "completion_tokens": sum(completion.completion_tokens for completion in completions),
        "seconds": round(sum(completion.seconds for completion in completions), 6),
        "error": error,
    }


def predictions(pairs: Iterable[ExtractionPair], rows: Iterable[Mapping[str, Any]]) -> Iterator[Prediction]:
    """What is scored: each pair with the reply of its row, both in the same order.

    Raises:
        ValueError: a row is another pair's.
    """
    for pair, row in zip(pairs, rows, strict=True):
        if pair.id != row["id"]:
            raise ValueError(f"the results hold {row['id']!r} where the data has {pair.id!r}: pass --overwrite")
        yield Prediction.of(pair, row["reply"], tuple(row.get("replies") or ()), failed=bool(row.get("error")))


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and cost of all rows: errors, replies cut off at their limit, texts in pieces, tokens, seconds."""
    sums = dict.fromkeys(("errors", "cut_off", "texts_in_pieces", "prompt_tokens", "completion_tokens"), 0)
    texts, seconds = 0, 0.0
    for row in rows:
        texts += 1
        sums["errors"] += bool(row["error"])
        sums["cut_off"] += row["cut_off"]
        sums["texts_in_pieces"] += row["pieces"] > 1
        sums["prompt_tokens"] += row["prompt_tokens"]
        sums["completion_tokens"] += row["completion_tokens"]
        seconds += row["seconds"]
    each = max(1, texts)
    cost = {name: round(sums[name] / each, 3) for name in ("prompt_tokens", "completion_tokens")}
    return {"counts": sums, "cost_per_text": cost | {"seconds": round(seconds / each, 4)}}


async def _replies(
    batch: list[ExtractionPair], extractor: TextExtractor, piece_limit: int
) -> list[tuple[ExtractionPair, list[Completion] | Exception]]:
    """The replies to each pair's pieces; one bad text costs itself alone."""
    pieces = [source_pieces(pair.title, pair.text, piece_limit) for pair in batch]
    try:
        completions = await extractor.complete([text for texts in pieces for text in texts])
    except (SetupError, RetriesExhausted):
        raise
    except Exception as error:
        if len(batch) > 1:
            return [one for pair in batch for one in await _replies([pair], extractor, piece_limit)]
        if not isinstance(error, RepliesPending):
            logger.warning("pair %s failed: %s", batch[0].id, error)
        return [(batch[0], error)]
    rest = iter(completions)
    return [(pair, list(islice(rest, len(texts)))) for pair, texts in zip(batch, pieces)]
