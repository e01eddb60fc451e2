"""The benchmark of retrieval: what its oracle keeps and asks, and how recall is counted."""

import pytest

from benchmarks.retrieval import (
    _kept_triples,
    _next_query,
    _OracleReader,
    _recall_figures,
    _recall_gains,
    _Support,
    _triple_as_shown,
)
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Question
from tripletune.core.data.triples import Triple

BORN = Triple("Ada", "born in", "Oslo")
WROTE = Triple("Ada", "wrote", "Dune")
LIVES = Triple("Ada", "lives in", "Rome")
PASSAGES = (Passage("Ada", "Ada was born in Oslo.", "p0"), Passage("Eve", "Eve swims.", "p1"))
QUESTION = Question(
    id="q", question="Where was Ada born?", answers=("Oslo",), passages=PASSAGES, supporting=(0,), type="", source=""
)


def test_recall_at_each_cut_and_its_gain():
    before, after = [["p1", "x", "p0"]], [["p0"]]
    figures = _recall_figures([QUESTION], before)
    assert (figures["recall_2"]["mean"], figures["recall_5"]["mean"]) == (0.0, 1.0)
    assert figures["R@5"].startswith("100.0 (")
    gains = _recall_gains([QUESTION], before, after)
    assert (gains["gain_2"]["mean"], gains["gain_5"]["mean"]) == (1.0, 0.0)


class Store:
    """The triples of the passage about Ada."""

    def get(self, passage):
        return (LIVES, WROTE, BORN) if passage.title == "Ada" else None


@pytest.fixture
def reader():
    oracle = _OracleReader([QUESTION])
    oracle.triples = Store()
    return oracle


def test_the_oracle_knows_what_a_prompt_shows_of_a_supporting_passage(reader):
    """The triple with "born" is closest to the question; of the other two, the store's first."""
    nothing = reader._supports_in_prompt(QUESTION, "")
    assert nothing == [_Support(shown=False, kept=False, triples=[BORN, LIVES])]
    prompt = f"{PASSAGES[0].content}\n{_triple_as_shown(LIVES)}"
    assert reader._supports_in_prompt(QUESTION, prompt) == [_Support(shown=True, kept=True, triples=[BORN, LIVES])]


def test_shown_triples_are_kept_and_kept_names_are_searched_for():
    shown = _Support(shown=True, kept=False, triples=[BORN])
    kept = _Support(shown=False, kept=True, triples=[WROTE])
    assert _kept_triples([shown, kept]) == '["Ada", "born in", "Oslo"]'
    assert _kept_triples([kept]) == "none"
    assert _next_query(QUESTION, [shown, kept]) == "Where was Ada born? Ada Dune"
