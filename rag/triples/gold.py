"""Gold links of a corpus: which of its passages support a question, one JSON object a line.

`{"question_id": "...", "passages": ["id", ...]}`; `data_builders.corpus` writes them beside the corpus it makes.
"""

from __future__ import annotations

from pathlib import Path

from tripletune.models.data.records import read_jsonl


def read_gold(path: str | Path) -> dict[str, frozenset[str]]:
    """Read gold links.

    Returns:
        Ids of the supporting passages by question id.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a gold link; the message has its number.
    """
    links: dict[str, frozenset[str]] = {}
    for where, row in read_jsonl(path):
        name, passages = row.get("question_id"), row.get("passages")
        if not isinstance(name, str) or not isinstance(passages, list) or not all(isinstance(p, str) for p in passages):
            raise ValueError(f'{where}: a gold link is {{"question_id": "...", "passages": ["id", ...]}}')
        links[name] = frozenset(passages)
    return links
