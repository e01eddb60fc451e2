"""Tests of the rate of replies that could not be read."""

from tripletune.eval.results.unreadable import UnreadableCounter
from tripletune.rag import TraceAction
from tripletune.rag.results import StoredTrace


def trace(tallies, actions=0, **examples):
    plans = [TraceAction("reply", None)] * actions
    return StoredTrace("q", tallies=tallies, actions=plans, details={"unreadable": examples})


def test_a_role_is_reported_above_five_in_a_hundred_with_its_first_example():
    counter = UnreadableCounter()
    counter.add(
        trace({"calls.gear.read": 19, "unreadable.gear.read": 1}, **{"gear.read": ["no_triples", "Nothing.\nI"]})
    )
    counter.add(trace({"calls.gear.read": 1, "calls.gear.reason": 20}))
    assert counter.roles_to_report() == [], "1 of 20 is 5 %"
    counter.add(trace({"calls.gear.read": 1, "unreadable.gear.read": 1}, **{"gear.read": ["no_triples", "Later"]}))
    (replies,) = counter.roles_to_report()
    assert replies.sentence == "2 of 21 replies of gear.read could not be read, for example (no_triples): Nothing. I"


def test_repaired_replies_count_as_unreadable_and_repair_turns_as_replies():
    counter = UnreadableCounter()
    counter.add(trace({"calls.ras.plan": 3, "calls.ras.plan.repair": 1, "unreadable.ras.plan": 1}))
    (replies,) = counter.roles_to_report()
    assert (replies.role, replies.replies, replies.unreadable) == ("ras.plan", 4, 1)


def test_plans_of_a_trained_model():
    counter = UnreadableCounter()
    counter.add(trace({"unreadable.plan": 1}, actions=4, plan=["no_action", "I think so."]))
    counter.add(trace({}, actions=6))
    (replies,) = counter.roles_to_report()
    assert (replies.replies, replies.unreadable, replies.example) == (10, 1, "I think so.")


def test_the_corpus_is_read_once_for_all_questions():
    details = {
        "index": {"thrag.extract": [3, 90, 9], "thrag.extract.repair": [3, 90, 9]},
        "index_unreadable": {"thrag.extract": 6},
        "unreadable": {"thrag.extract": ["no_json", "I see."]},
    }
    counter = UnreadableCounter()
    for _ in range(2):
        counter.add(StoredTrace("q", tallies={"calls.thrag.answer": 1}, details=details))
    (replies,) = counter.roles_to_report()
    assert replies.sentence == "6 of 6 replies of thrag.extract could not be read, for example (no_json): I see."
