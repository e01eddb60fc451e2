import json
import re

import pytest

from tests.data_builders.rows import shared
from tripletune.eval.graph_match import edit_distance, same_graph, triple_matches
from tripletune.eval.statistics import flatten_means
from tripletune.eval.triples import Prediction, score_extractions
from tripletune.eval.webnlg import MEASURES, pair_scores, webnlg_scores
from tripletune.models.data.pairs import ExtractionPair
from tripletune.models.data.triples import Triple, format_triples

ADA = ("ada lovelace", "birth place", "london")


# What Evaluation_script.py at 2beba09 with nervaluate 0.1.8 gives, as precision and recall of strict, exact, partial
# and type.
@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (ADA, ADA, [(1, 1)] * 4),
        # A word more in front of the reference's first one is the same span, a longer one.
        (ADA, ("countess ada lovelace", "birth place", "london"), [(2 / 3, 2 / 3)] * 2 + [(5 / 6, 5 / 6), (1, 1)]),
        # "king" between two runs: one overlaps, the rest is spurious.
        (ADA, ("ada king lovelace", "birth place", "london"), [(2 / 5, 2 / 3)] * 2 + [(1 / 2, 5 / 6), (3 / 5, 1)]),
        # Subject and object exchanged: boundaries are right, labels are not.
        (ADA, ("london", "birth place", "ada lovelace"), [(1 / 3, 1 / 3), (1, 1), (1, 1), (1 / 3, 1 / 3)]),
        (ADA, ("oslo", "is in", "norway"), [(0, 0)] * 4),
    ],
)
def test_webnlg_measures_by_hand(reference, candidate, expected):
    found = pair_scores(reference, candidate)
    assert [score[:2] for score in found] == [pytest.approx(one) for one in expected]


def test_triples_are_paired_once_and_what_is_left_scores_nothing():
    gold = [Triple("Ada_Lovelace", "birthPlace", "London (England)"), Triple("Ada Lovelace", "born", "1815")]
    swapped = [Triple("ada lovelace", "born", "1815"), Triple("Ada Lovelace", "birth place", "London")]
    assert webnlg_scores(gold, swapped) == {name: [2.0, 2.0, 2.0] for name in MEASURES}
    assert webnlg_scores(gold, swapped[:1] * 3)["strict"][2] < 2
    assert webnlg_scores(gold, []) == {name: [0.0, 0.0, 0.0] for name in MEASURES}


def test_graph_scores_by_hand():
    gold = [Triple("a", "p", "b"), Triple("b", "q", "c")]
    assert triple_matches(gold, [Triple(" A", "P", "b"), Triple("b", "r", "c"), Triple("b", "r", "c")]) == (1, 2, 2)
    assert same_graph(gold, [Triple("x", "p", "y"), Triple("y", "q", "z")]), "names of nodes are not compared"
    assert not same_graph(gold, [Triple("a", "p", "b"), Triple("b", "r", "c")])
    # Five nodes and edges, and 30: one label changed; one edge and one node taken out; everything taken out.
    assert edit_distance(gold, [Triple("a", "p", "b"), Triple("b", "r", "c")]) == pytest.approx(1 / 35)
    assert edit_distance(gold, gold[:1]) == pytest.approx(2 / 35)
    assert edit_distance(gold, []) == pytest.approx(5 / 35)
    assert edit_distance(gold, gold[:1], seconds=1e-9) == pytest.approx((5 + 3) / 35), "out of time: the upper bound"


def test_published_scores_of_a_data_set():
    good = ExtractionPair("x", "t", "", (Triple("Ada", "birthPlace", "London"),))
    rows = [Prediction(good, [reply]) for reply in ("(S> ada| P> birth place| O> London)", "NONE")]
    rows.append(Prediction(good, [""], failed=True))
    flat = flatten_means(score_extractions(rows, published=True))
    assert flat["webnlg/strict/f1"] == pytest.approx(1 / 3)
    assert (flat["t_f1"], flat["g_f1"], flat["ged"]) == (0.0, 0.0, pytest.approx((1 / 33 + 3 / 33 + 1) / 3))


def test_gold_is_right_and_a_lost_triple_is_not_on_genwiki():
    for line in shared("genwiki_test.jsonl").read_text().splitlines()[:60]:
        gold = [Triple(*fields) for fields in json.loads(line)["triples"]]
        if any(not re.search(r"\w", name) for triple in gold for name in triple.as_list()):
            continue  # to the script a field without words is a spurious one, also where both are
        assert all(sums[2] == len(gold) for sums in webnlg_scores(gold, gold[::-1]).values()), format_triples(gold)
        assert edit_distance(gold, gold) == 0
        assert same_graph(gold, gold)
        assert all(sums[1] < len(gold) for sums in webnlg_scores(gold, gold[1:]).values())
