from __future__ import annotations

import json

import pytest

from tripletune.rag.triples.gold import read_gold


def test_gold_links_are_read_by_question(tmp_path):
    rows = [{"question_id": "q", "passages": ["a", "b"]}, {"question_id": "p", "passages": []}]
    (tmp_path / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_gold(tmp_path / "gold.jsonl") == {"q": {"a", "b"}, "p": frozenset()}


@pytest.mark.parametrize("line", ['{"question_id": "q"}', '{"passages": []}', '{"question_id": "q", "passages": [1]}'])
def test_other_lines_are_named(tmp_path, line):
    (tmp_path / "gold.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"gold\.jsonl:1: a gold link is"):
        read_gold(tmp_path / "gold.jsonl")
