import json
import math

import pytest

from tests.cli import write_lines
from tripletune.core.files import file_digest
from tripletune.eval.__main__ import main
from tripletune.eval.metrics import mrr, ndcg, precision, recall, retrieval_f1
from tripletune.eval.rescore import final_ranking
from tripletune.eval.result_log import ResultLog
from tripletune.eval.results import mean_recalls, read_rows_with_added_scores, recalls_of
from tripletune.rag.results import ResultRow, StoredTrace

SETTINGS = {"system": "standard", "task": {"name": "hotpotqa", "metrics": ["exact_match"]}, "data": "digest"}


def test_rankings_by_hand():
    ranking, wanted = ["x", "a", "y", "b", "z"], {"a", "b", "c"}
    assert [recall(ranking, wanted, k) for k in (1, 2, 5, 10)] == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3])
    assert [precision(ranking, wanted, k) for k in (2, 5, 10)] == pytest.approx([1 / 2, 2 / 5, 2 / 10])
    # Two hits: of the three places, precision 1/3 and recall 1/3; of all five, 2/5 and 2/3.
    assert [retrieval_f1(ranking, wanted, k) for k in (3, None)] == pytest.approx([1 / 3, 1 / 2])
    assert retrieval_f1([], wanted) == 0
    assert mrr(ranking, wanted) == 1 / 2
    # Places 2 and 4 of the best three: (0.6309 + 0.4307) / (1 + 0.6309 + 0.5).
    gain = 1 / math.log2(3) + 1 / math.log2(5)
    assert ndcg(ranking, wanted, 5) == pytest.approx(gain / (1 + 1 / math.log2(3) + 1 / 2))
    assert ndcg(ranking, wanted, 2) == pytest.approx((1 / math.log2(3)) / (1 + 1 / math.log2(3)))
    assert ndcg(["b", "a"], {"a", "b"}, 10) == pytest.approx(1)
    assert mrr([], wanted) == 0


def test_a_ranking_is_the_systems_own_or_that_of_its_rounds():
    rounds = [["a", "b"], ["b", "c"]]
    trace = {"steps": [{"passages": [{"id": one} for one in found]} for found in rounds], "details": {}}
    assert final_ranking(StoredTrace.from_json(trace)) == ["a", "b", "c"]
    trace["details"] = {"ranking": ["c", "a", "c"]}
    assert final_ranking(StoredTrace.from_json(trace)) == ["c", "a"]


@pytest.mark.parametrize(
    ("found", "shown", "error", "expected"),
    [
        # Three rankings of a question with the supporting passages a and b, at 2, 5 and 15 passages as far as they go.
        ([["x", "a"], ["x", "a", "y", "z", "b"]], ["b", "x", "a"], "", [[0.5], [0.5, 1], [0.5, 1]]),
        ([["x", "x", "a", "b"]], ["a"], "", [[0.5, 1], [0.5, 1], [0.5]]),
        ([[], list("uvwxyzabcd")], [], "", [[0], [0, 0, 1], [0]]),
        ([], [], "", [[0], [0], [0]]),
        ([["a", "b", "c"]], ["a", "b"], "TimeoutError", [[0, 0], [0, 0], [0]]),
        ([["a", "b"]], None, "", [[1], [1]]),
    ],
)
def test_recall_has_three_rankings_and_fixed_budgets_for_every_system(found, shown, error, expected):
    trace = {"steps": [{"passages": [{"id": one} for one in step]} for step in found], "details": {"ranking": ["b"]}}
    known = [] if shown is None else ["shown"]
    row = {"id": "q", "supporting": ["a", "b"], "error": error, "trace": trace | ({"shown": shown} if known else {})}
    scores = recalls_of(ResultRow.from_json(row))
    of_rankings = {}
    for ranking, shares in zip(("first", "retrieved", *known), expected, strict=True):
        of_rankings |= {f"{ranking}@{k}": share for k, share in zip((2, 5, 15), shares)}
    assert scores == of_rankings
    assert recalls_of(ResultRow.from_json(row | {"supporting": []})) == {}
    for unknown, left in (("shown", {"first", "retrieved"}), ("passages", set())):
        other = row | {"trace": row["trace"] | {"details": {"unknown": [unknown]}}}
        assert {name.split("@")[0] for name in recalls_of(ResultRow.from_json(other))} == left


def test_what_an_older_row_does_not_say_is_not_known():
    rows = [{"first@2": 1.0, "shown@2": 1.0}, {}, {"first@2": 0.0}]
    assert {name: (one["mean"], one["n"]) for name, one in mean_recalls(rows).items()} == {"first@2": (0.5, 2)}
    assert mean_recalls([{}]) == {}


def test_recall_at_a_rank_that_no_ranking_reaches_is_left_out():
    rows = [{"first@2": 0.5}, {"first@2": 0.0, "first@5": 1.0}]
    means = {name: interval["mean"] for name, interval in mean_recalls(rows).items()}
    # The first question's ranking ends before rank 5, and its recall stays what it is.
    assert means == {"first@2": 0.25, "first@5": 0.75}


def row(name, prediction, passages, supporting, error=""):
    trace = {
        "steps": [
            {"query": "q", "passages": [{"id": n} for n in passages], "passages_without_triples": 0, "triples": []}
        ],
        "stop_reason": "single_pass", "calls": 1, "prompt_tokens": 1, "completion_tokens": 1, "seconds": 1.0,
        "question": "Q", "tallies": {}, "malformed": 0, "unexpected": 0, "actions": [], "details": {},
    }  # fmt: skip
    scores = {"exact_match": float(prediction == "Paris" and not error)}
    return {
        "id": name, "question": "?", "type": "", "answers": ["Paris"], "prediction": prediction, "scores": scores,
        "supporting": supporting, "error": error, "trace": trace,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """`run(name, predictions)`: the folder of a finished run over four questions."""

    def make(name, predictions):
        rows = [
            row("1", predictions[0], ["a", "x"], ["a", "b"]),
            row("2", predictions[1], ["x", "y", "c"], ["c"]),
            row("3", predictions[2], ["x"], []),
            row("4", predictions[3], ["a"], ["a"], "TimeoutError"),
        ]
        folder = tmp_path / name
        write_lines(folder / "results.jsonl", rows)
        (folder / "settings.json").write_text(json.dumps(SETTINGS))
        (folder / "run.json").write_text(json.dumps({"questions": 4}))
        metrics = {"system": "standard", "task": "hotpotqa", "primary": "exact_match", "cost_per_question": {}}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        return folder

    return make


def scores_of(folder):
    return {row.id: row.scores for row in read_rows_with_added_scores(folder)}


def test_new_scores_stand_beside_the_old_and_in_comparisons(run, tmp_path, capsys):
    one, two = run("runs/one", ["Paris", "It is Paris", "Rome", "Paris"]), run("runs/two", ["Paris"] * 4)
    stored = (one / "results.jsonl").read_bytes()
    assert main(["score", str(tmp_path / "runs"), "--metrics", "f1,recall@2,mrr"]) == 0
    shown = capsys.readouterr().out
    assert "Share of the supporting passages that are in the first 2 places" in shown
    assert (one / "results.jsonl").read_bytes() == stored
    assert scores_of(one) == {
        "1": {"exact_match": 1, "f1": 1, "recall@2": 0.5, "mrr": 1},
        "2": {"exact_match": 0, "f1": 0.5, "recall@2": 0, "mrr": pytest.approx(1 / 3)},
        # Without gold passages a ranking has no score; a question that failed has 0.
        "3": {"exact_match": 0, "f1": 0},
        "4": {"exact_match": 0, "f1": 0, "recall@2": 0, "mrr": 0},
    }
    assert main(["score", str(one), "--metrics", "golden_match"]) == 0
    assert (scores_of(one)["2"]["golden_match"], scores_of(one)["2"]["f1"]) == (1, 0.5)
    assert main(["compare", str(tmp_path / "runs"), "--metric", "f1"]) == 0

    assert main(["compare", str(one), str(two), "--metric", "f1", "--output", str(tmp_path / "c.json")]) == 0
    found = json.loads((tmp_path / "c.json").read_text())["scores"]["f1"]
    assert (found[0]["score"]["mean"], found[1]["difference"]["mean"]) == pytest.approx((0.375, 0.375))
    assert "no difference shown" in capsys.readouterr().out
    assert main(["report", str(one), str(two), "--output", str(tmp_path / "report")]) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["groups"][0]["metrics"] == ["exact_match", "f1", "recall@2", "mrr"]
    assert report["groups"][0]["runs"][0]["figures"]["scores"]["mrr"]["n"] == 3
    assert any("golden_match, which other runs of the task lack" in told for told in report["missing"])


def test_gold_links_may_come_later(run, tmp_path, error_of):
    folder = run("one", ["Paris"] * 4)
    rows = [{**one.to_json(), "supporting": []} for one in read_rows_with_added_scores(folder)]
    write_lines(folder / "results.jsonl", rows)
    assert main(["score", str(folder), "--metrics", "recall@5"]) == 2
    assert "recall@5 need gold passages, but no question has any" in error_of()
    assert not (folder / "scores.jsonl").exists()
    assert main(["score", str(folder), "--metrics", "recall@5,golden_match"]) == 0
    assert scores_of(folder)["1"] == {"exact_match": 1, "golden_match": 1}, "what needs no gold passage is scored"
    gold = write_lines(tmp_path / "gold.jsonl", [{"question_id": "3", "passages": ["x", "q"]}])
    assert main(["score", str(folder), "--metrics", "recall@5", "--gold", str(gold)]) == 0
    assert scores_of(folder)["3"]["recall@5"] == 0.5
    other = run("two", ["Paris"] * 4)
    assert main(["score", str(other), "--metrics", "recall@5,f1"]) == 0
    assert main(["compare", str(folder), str(other)]) == 2
    digest = file_digest(gold)
    assert f"differ in gold ({digest[:12]} and links in the results), so" in error_of()
    assert main(["score", str(other), "--metrics", "recall@5", "--gold", str(gold)]) == 0
    assert scores_of(other)["1"] == {"exact_match": 1, "f1": 1}, "scores of other gold links are removed"
    assert main(["compare", str(folder), str(other), "--metric", "recall@5"]) == 0
    write_lines(gold, [{"question_id": "3", "passages": ["x"]}])
    assert main(["score", str(other), "--metrics", "mrr", "--gold", str(gold)]) == 0
    assert main(["compare", str(folder), str(other)]) == 2
    assert f"differ in gold ({digest[:12]} and {' and '.join(sorted((digest, file_digest(gold))))[:12]}" in error_of()
    write_lines(gold, [{"question_id": "3", "passages": ["of another corpus"]}])
    assert main(["score", str(folder), "--metrics", "recall@5", "--gold", str(gold)]) == 2
    assert "--gold has no passage that the run found" in error_of()


def test_a_run_that_cannot_be_scored_stops_no_other(run, tmp_path, error_of):
    empty, whole = run("runs/a", ["Paris"] * 4), run("runs/b", ["Paris"] * 4)
    (empty / "results.jsonl").write_text("")
    assert main(["score", str(tmp_path / "runs"), "--metrics", "recall@5"]) == 2
    assert f"1 of 2 runs could not be scored: {empty}: no question has a result yet" in error_of()
    assert "recall@5" in scores_of(whole)["1"]
    assert not (empty / "scores.jsonl").exists()


def test_a_run_that_goes_on_loses_its_added_scores(run):
    folder = run("one", ["Paris"] * 4)
    assert main(["score", str(folder), "--metrics", "f1"]) == 0
    log = ResultLog(folder, SETTINGS)
    assert "f1" in scores_of(folder)["1"]
    log.append(row("5", "Rome", [], []))
    log.close()
    assert list(scores_of(folder)["1"]) == ["exact_match"]


@pytest.mark.parametrize(("metric", "said"), [("recal@5", "(did you mean recall@5?)"), ("str_em", "short answers")])
def test_metrics_that_these_runs_do_not_have(run, error_of, metric, said):
    assert main(["score", str(run("one", ["Paris"] * 4)), "--metrics", metric]) == 2
    assert said in error_of()
