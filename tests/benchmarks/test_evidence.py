"""What the benchmark of TH-RAG's evidence reads, without its encoder."""

import json

import pytest

from benchmarks import evidence
from benchmarks.evidence import EvidenceOptions, _cut_into_chunks, _read_source, _Way

ROWS = [
    {"question": f"Who lives in town {number}?", "answer": "x",
     "supporting_facts": [[f"Town {number}", 1], ["Common", 0], ["Common", 9]],
     "context": [["Common", ["All towns lie in Velsund."]],
                 [f"Town {number}", [f"Town {number} is small.", f" Person {number} lives there."]]]}
    for number in range(4)
]  # fmt: skip


@pytest.fixture
def options(tmp_path):
    (tmp_path / "hotpot.json").write_text(json.dumps(ROWS))
    return EvidenceOptions(data=str(tmp_path / "hotpot.json"), questions=2, skip=1, window=20, overlap=5)


def test_passages_and_gold_sentences(options):
    source = _read_source(options)
    assert [asked.gold for asked in source.questions] == [
        ("Person 1 lives there.", "All towns lie in Velsund."),
        ("Person 2 lives there.", "All towns lie in Velsund."),
    ], "a sentence index out of range is left out"
    assert [passage.title for passage in source.passages] == ["Common", "Town 1", "Town 2"], "each passage once"
    with pytest.raises(ValueError, match="has no questions after the first 9: lower --skip"):
        _read_source(EvidenceOptions(data=options.data, skip=9))


@pytest.mark.parametrize("order", ["file", "shuffled"])
@pytest.mark.parametrize("cut", ["windows", "windows, overlap"])
def test_no_sentence_is_lost_in_windows(options, cut, order):
    source = _read_source(options)
    chunks = _cut_into_chunks(source, _Way(cut, order, False, "passages"), options)
    wanted = {sentence for sentences in source.passages.values() for sentence in sentences}
    assert {sentence for chunk in chunks for sentence in chunk.sentences} == wanted
    assert all(sentence in chunk.passage.text for chunk in chunks for sentence in chunk.sentences)


def test_a_gold_sentence_is_read_among_the_shown_ones_or_in_a_chunk():
    asked = evidence._AskedQuestion("Who?", ("One two.", "Three."))
    scores = evidence._score_question(asked, {"One two."}, ["Three. Four."])
    assert scores == (False, False, True, 1, 4)
    nothing = evidence._score_question(asked, set(), [])
    assert nothing == (False, False, False, 0, 0)
    cells = evidence._mean_cells([scores, nothing], [nothing, nothing])
    assert cells["read"].startswith("50.0 (")
    assert cells["more_than_first_interval"]["mean"] == 0.5
    assert (cells["chunks_read"], cells["words"]) == (0.5, 2)
