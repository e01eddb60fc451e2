"""Questions that a teacher LLM could not label: one line each in `dropped.ndjson`, a few of every reason in the card.

A line has the question, the stage and the reason, what was wrong, and the beginning of the reply that stayed unusable
after its repair turn, so that a reader can judge whether the teacher or the checks are at fault. The whole reply is in
the ledger. The file's ending keeps it apart from the shards of records, which are all `.jsonl` or `.parquet`.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tripletune.data_builders.datasets.card import DROPPED
from tripletune.data_builders.hotpotqa_subq.questions import Question, UnlabelledQuestion
from tripletune.models.data.records import read_jsonl

LONGEST_REPLY = 200
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class DroppedQuestion:
    """A question that was left out.

    Attributes:
        source: The source's name.
        row: Its place in the source, from 0.
        question_id: The benchmark's id.
        question: The main question.
        stage: The role of the call whose reply was unusable; empty when no reply was at fault.
        reason: As the card counts it.
        detail: What was wrong, as the teacher was told; may be empty.
        reply: The first characters of the reply.
    """

    source: str
    row: int
    question_id: str
    question: str
    stage: str
    reason: str
    detail: str
    reply: str

    @classmethod
    def of(cls, source: str, row: int, question: Question, error: UnlabelledQuestion) -> DroppedQuestion:
        """A question and why it was left out."""
        # Half a character, which a file can't hold, may stand in a reply.
        texts = (error.stage, error.reason.value, error.detail, error.reply[:LONGEST_REPLY])
        stage, reason, detail, reply = (text.encode("utf-8", "replace").decode("utf-8") for text in texts)
        return cls(source, row, question.id, question.question, stage, reason, detail, reply)


class DroppedWriter:
    """Writes the lines of a data set's `dropped.ndjson`, if there are any, and keeps examples; a context manager.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / DROPPED
        self._file: IO[str] | None = None
        # By reason: heaps of (minus the hash, place of the source, minus the row, line), so any order of questions and
        # any number of processes give the same examples.
        self._heaps: dict[str, list[tuple[int, str, int, DroppedQuestion]]] = {}

    def __enter__(self) -> DroppedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, dropped: DroppedQuestion) -> None:
        """Append a line."""
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8")
        self._file.write(json.dumps(asdict(dropped), ensure_ascii=False) + "\n")
        name = f"{dropped.source}\n{dropped.question_id}".encode()
        digest = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
        entry = (-digest, dropped.source, -dropped.row, dropped)
        heap = self._heaps.setdefault(dropped.reason, [])
        if len(heap) < EXAMPLES:
            heapq.heappush(heap, entry)
        elif entry[:3] > heap[0][:3]:
            heapq.heapreplace(heap, entry)

    def examples(self) -> dict[str, list[dict[str, Any]]]:
        """By reason, in alphabetical order, a few of the lines."""
        return {
            reason: [asdict(entry[3]) for entry in sorted(heap, key=lambda entry: entry[:3], reverse=True)]
            for reason, heap in sorted(self._heaps.items())
        }


def read_dropped(folder: str | Path) -> Iterator[DroppedQuestion]:
    """The lines of a data set's `dropped.ndjson`; none when it has none.

    Raises:
        ValueError: a line is malformed.
    """
    path = Path(folder) / DROPPED
    if not path.is_file():
        return
    for where, row in read_jsonl(path):
        try:
            yield DroppedQuestion(**row)
        except TypeError as error:
            raise ValueError(f"{where}: not a question that was left out ({error})") from None
