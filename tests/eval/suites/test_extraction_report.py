import json

import pytest

from tripletune.eval.statistics import bootstrap_ratio
from tripletune.eval.suites.extraction_report import PARTS, compare_extractions, scores_of
from tripletune.eval.suites.triples import Prediction, score_rows, summarise
from tripletune.models.data.triples import Triple


def rows(shift):
    """Rows of texts of one to three gold triples, with replies that are right up to a shift."""
    predictions = []
    for number in range(12):
        gold = tuple(Triple(f"Town {number}", "lies on", f"River {n}") for n in range(1 + number % 3))
        reply = ", ".join(f"(S> Town {number}| P> lies on| O> River {n + (number + shift) % 2})" for n in range(2))
        predictions.append(Prediction(f"t{number}", f"Town {number} River 0 River 1", gold, reply))
    return list(score_rows(predictions, rouge=True))


def test_the_parts_add_up_to_the_scores_of_a_data_set():
    found = rows(0)
    for name, value in scores_of(summarise(found)):
        again = bootstrap_ratio(*zip(*(PARTS[name](row) for row in found))).to_json()
        assert again == pytest.approx(value), name
    names = [name for name, _ in scores_of(summarise(found))]
    assert names == [name for name in PARTS if not name.startswith("soft")]


def folder(tmp_path, name, scores):
    place = tmp_path / name
    place.mkdir()
    (place / "metrics.json").write_text(json.dumps({"evaluation": "extraction", **summarise(scores)}))
    (place / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    return place


def test_differences_are_paired_by_text(tmp_path):
    first, second = rows(0), rows(1)
    places = [folder(tmp_path, "a", first), folder(tmp_path, "b", list(reversed(second)))]
    found = compare_extractions(places)
    for name in ("exact/micro/f1", "exact/macro/f1", "accuracy/object", "rougeL"):
        runs = found["scores"][name]
        means = [run["score"]["mean"] for run in runs]
        assert runs[1]["difference"]["mean"] == pytest.approx(means[1] - means[0])
        assert runs[0]["difference"] is None
    same = compare_extractions([places[0], folder(tmp_path, "c", first)])
    assert all(runs[1]["difference"]["low"] == runs[1]["difference"]["high"] == 0 for runs in same["scores"].values())
    only = compare_extractions(places, "exact")
    assert list(only["scores"]) == [name for name in PARTS if name.startswith("exact/")]
    with pytest.raises(ValueError, match="no text in common"):
        compare_extractions([places[0], folder(tmp_path, "d", [row | {"id": f"x{row['id']}"} for row in second])])
