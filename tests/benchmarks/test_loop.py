"""The benchmark of loops: what it says of two ways' answers."""

from benchmarks import Way
from benchmarks.loop import _differences_in_words, _row_of_way
from tripletune.rag import Trace, TraceAction, TraceStep


def trace(answer, reply, steps=1):
    return Trace(
        "Who?",
        answer=answer,
        actions=[TraceAction(reply, None)],
        steps=[TraceStep("Who?", [], []) for _ in range(steps)],
        calls=3,
        prompt_tokens=10,
        completion_tokens=4,
    )


def test_answers_and_decisions_that_differ_are_counted_apart():
    alone = [trace("Ada", "[SUFFICIENT]"), trace("Eve", "[SUFFICIENT]"), trace("Bob", "[SUFFICIENT]")]
    together = [trace("Ada", "[SUFFICIENT]"), trace("Ada", "[SUBQ] Who?"), trace("Bob", "[SUBQ] Who?")]
    assert _differences_in_words(alone, together) == ("of 3 questions, 1 get another answer and 2 get another decision")


def test_the_row_of_a_way_has_means_of_calls_and_sums_of_tokens():
    way = Way("together", lambda: None, seconds=[4.0, 2.0, 8.0])
    row = _row_of_way(way, [trace("Ada", "", steps=1), trace("Eve", "", steps=2)])
    assert (row["questions_per_second"], row["calls_per_question"], row["rounds_per_question"]) == (0.5, 3.0, 1.5)
    assert (row["tokens_read"], row["tokens_written"]) == (20, 8)
