"""Rules that stop a loop, on ladders of answers whose outcomes are computed by hand."""

import numpy as np
import pytest

from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple
from tripletune.eval.suites._stopping_figures import TrainedBench, at_equal_cost, compare_rules
from tripletune.eval.suites._stopping_rules import (
    DepthAnswer,
    Ladder,
    best_depth_rule,
    calibration_curve,
    count_hits,
    counting_rule,
    outcome_at_depth,
    tasr_rule,
    words_rule,
)


def depth(number, answer, right, margin=1.0, searches=None, calls=None, **more):
    searches = number if searches is None else searches
    calls = number + 1 if calls is None else calls
    values = {"searches": searches, "calls": calls, "answer": answer, "stop_reason": "max_rounds", "margin": margin}
    return DepthAnswer(depth=number, scores={"exact_match": float(right)}, **values, **more)


def ladder(name, *depths):
    return Ladder(id=name, depths=list(depths))


def plan(action, *hits):
    steps = tuple(Step("Who wrote Dune?", (Triple("Dune" if hit else "Rome", "is", "there"),)) for hit in hits)
    return Record("p", "q", "planning", "Who?", action, steps, "Who?" if action is Action.SUBQ else "")


def test_counting_stops_where_most_labels_do():
    plans = [plan(Action.SUBQ), plan(Action.SUBQ, True), plan(Action.SUFFICIENT, True, True), plan(Action.SUBQ, True)]
    three = ladder("q", depth(0, "a", 0), depth(1, "b", 0), depth(2, "c", 1), depth(3, "d", 0))
    outcome = counting_rule(plans)(three)
    assert (outcome.searches, outcome.calls, outcome.scores) == (2, 3, {"exact_match": 1.0})
    never = [plan(Action.SUBQ, True)]
    assert counting_rule(never)(three).searches == 3, "a rule that never stops takes the last depth"
    assert counting_rule([])(three).searches == 3


def test_matching_words_sees_failed_searches():
    plans = [
        plan(Action.SUBQ),
        plan(Action.SUBQ, False),
        plan(Action.SUFFICIENT, True),
        plan(Action.SUFFICIENT, False, True),
    ]
    rule = words_rule(plans, "english")
    at_once = ladder("q", depth(1, "a", 1, hits=1, last_hit=True), depth(2, "b", 0, hits=2, last_hit=True))
    late = ladder("q", depth(1, "a", 0, hits=0), depth(2, "b", 1, hits=1, last_hit=True), depth(3, "c", 0, hits=2))
    assert [rule(at_once).searches, rule(late).searches] == [1, 2]


def test_stop_words_are_no_hit():
    searches = [("Who wrote Dune?", "Rome is old"), ("Where is the town of Rome?", "Rome")]
    assert count_hits(searches, "english") == (1, True)
    assert count_hits([("Who is the king of Spain?", "the age of reason")], "english") == (0, False)
    german = [("Wer ist der König?", "der Turm ist hoch")]
    assert [count_hits(german, language) for language in ("de", "english")] == [(0, False), (1, True)]
    assert count_hits([], "english") == (0, False)


def test_the_calibrated_margin_is_a_share_of_right_answers_that_never_falls():
    # Margins 1, 2, 3, 4 with shares 0, 1, 0, 1: isotonic regression pools 2 and 3.
    curve = calibration_curve([(1, 0), (2, 1), (3, 0), (4, 1)])
    assert [curve(margin) for margin in (0, 1, 2, 3, 4, 9)] == pytest.approx([0, 0, 0.5, 0.5, 1, 1])
    assert curve(1.5) == pytest.approx(0.25)
    # Two answers with one margin are one point of twice the weight: (0 + 1 + 0) / 3 pooled with (1).
    assert calibration_curve([(1, 0), (1, 1), (2, 0)])(2) == pytest.approx(1 / 3)
    assert calibration_curve([])(5) == 0


def test_tasr_stops_when_the_answer_repeats_with_a_large_margin():
    # Twenty others show that margin 4 is always right and margin 1 never.
    others = [ladder(f"o{number}", depth(1, "x", number % 2, margin=1 + 3 * (number % 2))) for number in range(20)]
    sure = ladder("a", depth(1, "The Rome", 1, 4.0), depth(2, "rome.", 1, 4.0), depth(3, "Oslo", 0, 4.0))
    unsure = ladder("b", depth(1, "Rome", 0, 1.0), depth(2, "Rome", 0, 1.0), depth(3, "Oslo", 1, 1.0))
    changing = ladder(
        "c", depth(0, "Rome", 0), depth(1, "Rome", 0, 4.0), depth(2, "Oslo", 1, 4.0), depth(3, "Oslo", 1, 4.0)
    )
    rule = tasr_rule([*others, sure, unsure, changing], "exact_match")
    # At two searches it has asked for an answer twice: 3 calls and 1 more.
    assert rule(sure)[:2] == (2, 4)
    assert rule(unsure)[:2] == (3, 6), "the answer repeats, but such answers are wrong"
    assert rule(changing)[:2] == (3, 6), "without a search there is no answer to repeat"
    assert tasr_rule([*others, ladder("d", depth(1, "x", 0, margin=None))], "exact_match") is None
    always = tasr_rule([*others, unsure], "exact_match", least=-1)
    assert always(unsure)[:2] == (2, 4)


def test_a_mixture_of_two_depths_costs_what_the_rule_costs():
    depths = [(2.0, np.array([0.0, 1.0])), (0.0, np.array([0.0, 0.0])), (1.0, np.array([1.0, 0.0]))]
    assert at_equal_cost(1.25, depths).tolist() == [0.75, 0.25]
    assert at_equal_cost(1.0, depths).tolist() == [1.0, 0.0]
    assert at_equal_cost(-1, depths).tolist() == [0.0, 0.0]
    assert at_equal_cost(9, depths).tolist() == [0.0, 1.0]
    same = [(1.0, np.array([1.0])), (1.0, np.array([0.0]))]
    assert at_equal_cost(1.0, same).tolist() == [1.0], "depths that cost the same, as after repeated sub-queries"


def test_a_rule_is_compared_at_equal_searches_and_at_equal_calls():
    # One search is right on the first question alone, two on the second alone; a perfect rule knows which.
    both = [
        ladder("a", depth(1, "x", 1), depth(2, "y", 0)),
        ladder("b", depth(1, "x", 0), depth(2, "y", 1)),
    ]
    fixed = {"one": lambda asked: outcome_at_depth(asked, 0), "two": lambda asked: outcome_at_depth(asked, 1)}
    dear = {"knows": lambda asked: best_depth_rule("exact_match")(asked)._replace(calls=3)}
    bound = {"bound": best_depth_rule("exact_match")}
    figures = compare_rules([TrainedBench(both, dear)], fixed, bound, ["exact_match"])
    assert [figures[name].scores["exact_match"]["mean"] for name in ("one", "two", "knows", "bound")] == [
        0.5,
        0.5,
        1,
        1,
    ]
    assert [figures[name].searches["mean"] for name in figures] == [1, 2, 1.5, 1.5]
    rule = figures["knows"]
    # At 1.5 searches, half of each depth: 0.5 on both questions. At 3 calls, the second depth alone: 0 and 1.
    assert rule.at_searches["exact_match"]["mean"] == pytest.approx(0.5)
    assert rule.at_calls["exact_match"]["mean"] == pytest.approx(0.5)
    assert rule.at_calls["exact_match"]["high"] == 1
    assert rule.at_searches["exact_match"]["high"] < 1
    assert rule.at_calls["exact_match"]["p_holm"] >= rule.at_calls["exact_match"]["p_value"]
    assert figures["one"].at_searches is figures["bound"].at_calls is None


def test_of_several_seeds_each_rule_is_compared_with_its_own_model():
    def bench(right_after_one, right_after_two):
        ladders = []
        for number, (one, two) in enumerate(zip(right_after_one, right_after_two, strict=True)):
            ladders.append(ladder(str(number), depth(1, "x", one), depth(2, "y", two)))
        return ladders

    def always(place):
        return lambda asked: outcome_at_depth(asked, place)

    fixed = {"one": always(0), "two": always(1)}
    # The first model's rule goes on to two searches, the second model's stops after one.
    benches = [
        TrainedBench(bench([1, 0, 0, 0], [1, 1, 1, 0]), {"rule": always(1)}),
        TrainedBench(bench([1, 1, 1, 1], [0, 0, 0, 0]), {"rule": always(0)}),
    ]
    figures = compare_rules(benches, fixed, {}, ["exact_match"])
    assert figures["one"].scores["exact_match"]["mean"] == pytest.approx((0.25 + 1) / 2)
    assert figures["rule"].scores["exact_match"]["mean"] == pytest.approx((0.75 + 1) / 2)
    assert figures["rule"].searches["mean"] == 1.5
    assert figures["two"].searches["high"] == 2, "a cost has no upper bound of 1"
    # Each seed at its own cost: 0.75 - 0.75, and 1 - 1. At 1.5 searches of both, it would be 0.4 better.
    difference = figures["rule"].at_searches["exact_match"]
    assert difference["mean"] == 0
    assert difference["test"] == "two-level bootstrap"
    assert difference["n"] == 4
    alone = compare_rules(benches[:1], fixed, {}, ["exact_match"])["one"].scores["exact_match"]
    # Two seeds 75 points apart leave a wider interval than the questions of one.
    assert figures["one"].scores["exact_match"]["high"] > alone["high"]


def test_a_failed_question_scores_nothing_by_every_rule():
    failed = ladder("f")
    assert outcome_at_depth(failed, 1) == best_depth_rule("exact_match")(failed) == (0, 0, {}, None)
    assert counting_rule([plan(Action.SUBQ)])(failed) == (0, 0, {}, None)
    assert tasr_rule([failed], "exact_match")(failed) == (0, 0, {}, None)


def test_a_ladder_is_read_as_it_was_written():
    written = ladder("q", depth(1, "x", 1))
    written.planner = depth(3, "y", 0, margin=None)
    assert Ladder.from_json(written.to_json()) == written
