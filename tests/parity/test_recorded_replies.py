"""All replies of a strong model that were recorded are read; `replay_replies.py` compares them with another commit."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.parity.replay_replies import UNREADABLE, read

LEDGERS = Path(__file__).parents[3] / "shared" / "data" / "ledgers"


@pytest.mark.skipif(not LEDGERS.is_dir(), reason="../shared/data/ledgers is not there")
def test_only_a_refusal_to_select_is_unreadable():
    roles = Counter()
    unreadable = []
    for ledger in sorted(LEDGERS.glob("*.jsonl")):
        for line in ledger.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            role = row["uses"][0][0]
            roles[role] += 1
            if read(role, row["messages"][-1]["content"], row["text"]) == UNREADABLE:
                unreadable.append((role, row["text"]))
    assert unreadable == [("thrag.subtopics", "None of the subtopics fits the question.")]
    assert roles["ras.plan"] > 50
