import asyncio
import json
from itertools import pairwise

import pytest

from tripletune.eval.suites.extraction import extract_pairs, predictions, result_row, totals
from tripletune.models.data.pairs import ExtractionPair
from tripletune.models.data.triples import Triple
from tripletune.models.llm.client import CallError, RepliesPending, SetupError
from tripletune.models.local.generation import Completion


class Rule:
    """Replies "(S> <text>| P> says| O> it)", or what is set for a text."""

    model, settings = "rule", "{}"

    def __init__(self, replies=None, batch_size=4, concurrency=2):
        self.replies, self.batch_size, self.concurrency = replies or {}, batch_size, concurrency
        self.batches, self.under_way, self.most = [], 0, 0

    async def complete(self, texts):
        self.batches.append(list(texts))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        found = [self.replies.get(text, f"(S> {text}| P> says| O> it)") for text in texts]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return [Completion(text, 10, 5, 0.5) for text in found]


def pairs(count):
    texts = (f"Text {n}{' more' * (n % 7)}." for n in range(count))
    return [ExtractionPair(f"p{n}", text, "", (Triple("a", "b", str(n)),)) for n, text in enumerate(texts)]


def extract(given, extractor, **options):
    rows = []
    waiting = asyncio.run(extract_pairs(given, extractor, rows.append, **options))
    return {row["id"]: row for row in rows}, waiting


@pytest.mark.parametrize("window", [3, 100])
def test_every_pair_gets_its_row_whatever_the_batches(window):
    extractor = Rule()
    rows, waiting = extract(iter(pairs(23)), extractor, window=window)
    assert (len(rows), waiting) == (23, 0)
    for pair in pairs(23):
        assert rows[pair.id]["triples"] == [[pair.text, "says", "it"]]
    assert max(map(len, extractor.batches)) <= 4
    assert extractor.most <= 2
    assert rows["p0"]["completion_tokens"] == 5


def test_batches_hold_texts_of_similar_length():
    extractor = Rule(concurrency=1)
    extract(pairs(20), extractor)
    lengths = [[len(text) for text in batch] for batch in extractor.batches]
    assert all(min(one) >= max(other) for one, other in pairwise(lengths))


def test_a_long_text_is_cut_and_its_replies_are_joined():
    pair = ExtractionPair("long", "Ada was born. Ada died. Ada was born.", "Ada")
    replies = {"Ada: Ada was born.": "(S> Ada| P> b| O> c", "Ada: Ada died.": "(S> d| P> e| O> f)"}
    rows, _ = extract([pair], Rule(replies), piece_limit=20)
    row = rows["long"]
    assert row["pieces"] == 3
    assert row["triples"] == [["d", "e", "f"]]
    assert row["malformed"] == 2
    assert (row["prompt_tokens"], row["seconds"]) == (30, 1.5)
    assert totals([row]) == {
        "counts": {"errors": 0, "cut_off": 0, "texts_in_pieces": 1, "prompt_tokens": 30, "completion_tokens": 15},
        "cost_per_text": {"prompt_tokens": 30.0, "completion_tokens": 15.0, "seconds": 1.5},
    }


def test_pieces_without_facts_are_no_malformed_output():
    pair = ExtractionPair("long", "Well, well. So it is.", "")
    rows, _ = extract([pair], Rule({"Well, well.": "NONE", "So it is.": "NONE"}), piece_limit=14)
    assert (rows["long"]["pieces"], rows["long"]["triples"], rows["long"]["malformed"]) == (2, [], 0)
    (prediction,) = predictions([pair], [rows["long"]])
    assert (prediction.parts, prediction.failed) == (("NONE", "NONE"), False)


def test_a_half_character_in_a_reply_can_be_stored():
    (pair,) = pairs(1)
    row = result_row(pair, [Completion("(S> a| P> b| O> \ud83d)")])
    json.dumps(row, ensure_ascii=False).encode()
    assert len(row["triples"]) == 1


def test_fifty_thousand_characters_cost_no_neighbour():
    given = [*pairs(3), ExtractionPair("long", "Ida Morn lived here. " * 2500), ExtractionPair("word", "x" * 50_000)]
    extractor = Rule()
    rows, _ = extract(given, extractor)
    assert len(rows) == 5
    assert rows["long"]["pieces"] > 20
    assert max(len(text) for batch in extractor.batches for text in batch) <= 1600


def test_a_bad_text_costs_itself_alone():
    given = pairs(6)
    rows, _ = extract(given, Rule({given[2].text: CallError("too long"), given[3].text: ValueError("odd")}))
    assert {name: row["error"] for name, row in rows.items() if row["error"]} == {
        "p2": "CallError: too long",
        "p3": "ValueError: odd",
    }
    assert rows["p2"]["triples"] == []
    assert [one.failed for one in predictions(given, [rows[pair.id] for pair in given])] == [False] * 2 + [True] * 2 + [
        False
    ] * 2
    assert totals(rows.values())["counts"]["errors"] == 2


def test_what_no_text_is_at_fault_for_stops():
    given = pairs(9)
    with pytest.raises(ExceptionGroup) as caught:
        extract(given, Rule({given[4].text: SetupError("refused key")}))
    assert caught.group_contains(SetupError, match="refused key")
    rows, waiting = extract(given, Rule({given[4].text: RepliesPending("waits")}, batch_size=1))
    assert (len(rows), waiting) == (8, 1)


def test_output_that_never_closes_a_bracket_is_counted():
    given = pairs(3)
    reply = "(S> a| P> b| O> c), (S> d| P> e| O> f " + "and on and on " * 500
    rows, _ = extract(given, Rule({given[0].text: reply}))
    assert rows["p0"]["triples"] == [["a", "b", "c"]]
    assert rows["p0"]["malformed"] == 1
    assert rows["p1"]["malformed"] == 0


def test_predictions_join_pairs_and_rows():
    given = pairs(2)
    rows = [result_row(pair, [Completion("(S> a| P> b| O> c)")]) for pair in given]
    found = list(predictions(given, rows))
    assert [one.id for one in found] == ["p0", "p1"]
    assert found[1].gold == given[1].triples
    with pytest.raises(ValueError, match="the results hold 'p1' where the data has 'p0'"):
        list(predictions(given, reversed(rows)))
