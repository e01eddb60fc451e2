import asyncio

import pytest

from tests.fakes import Client, Facts, Shelf
from tripletune.core.calls import RepliesPending
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.llm.ledger import make_call
from tripletune.rag.systems import Tools
from tripletune.rag.systems.cirag import SYSTEM, CiragOptions
from tripletune.rag.systems.cirag.integration import Decision, decision_text

QUESTION = "Which river flows through the town where Ada was born?"
PAGES = {
    "Ada": Passage("Ada", "Ada was a writer. She was born in Kelm."),
    "Kelm": Passage("Kelm", "Kelm is a town. The Sarn flows through it."),
}
TRIPLES = {
    "Ada": (Triple("Ada", "occupation", "writer"), Triple("Ada", "born in", "Kelm")),
    "Kelm": (Triple("Kelm", "is", "town"), Triple("Sarn", "flows through", "Kelm"), Triple("Ada", "born in", "Kelm")),
}


def kelm_or_ada(query):
    """Ada's page for every query, and Kelm's for those that name the town."""
    return [PAGES["Kelm"], PAGES["Ada"]] if "Kelm" in query else [PAGES["Ada"]]


class Later:
    """Prefers triples that stand late."""

    async def scores(self, query, texts):
        return range(len(texts))


class Script(Client):
    """Integration replies in order, and one for each level of the cascade."""

    def __init__(self, *decisions, **answers):
        super().__init__(*decisions)
        self.answer = lambda asked: (
            self.replies.pop(0)
            if asked.role.startswith("cirag.integrate")
            else answers.get(asked.role.rsplit(".", 1)[1], "Answer: Sarn")
        )


def says(query, *triples):
    return decision_text(Decision("So it is.", tuple(Triple(*triple) for triple in triples), query))


FIRST = says("Which river flows through Kelm?", ("Ada", "born in", "Kelm"))
SECOND = says("", ("Sarn", "flows through", "Kelm"))


def run(script, shelf=None, store=None, **options):
    store = store or Facts(lambda passage: TRIPLES.get(passage.title))
    tools = Tools(
        retriever=shelf or Shelf(kelm_or_ada), store=store, llm=script, reranker=Later(), question_id="q7",
    )  # fmt: skip
    return asyncio.run(SYSTEM.run(QUESTION, QUESTION, tools, CiragOptions(**{"extraction": "store"} | options)))


def test_two_rounds_as_in_the_paper():
    script, shelf = Script(FIRST, SECOND), Shelf(kelm_or_ada)
    trace = run(script, shelf=shelf)
    assert shelf.queries == [(QUESTION, 10), ("Which river flows through Kelm?", 10)]
    assert (trace.answer, trace.stop_reason, trace.details["granularity"]) == ("Sarn", "no_question", "triples")
    assert [step.triples for step in trace.steps] == [
        [["Ada", "born in", "Kelm"], ["Ada", "occupation", "writer"]],
        [["Ada", "occupation", "writer"], ["Ada", "born in", "Kelm"], ["Sarn", "flows through", "Kelm"],
         ["Kelm", "is", "town"]],
    ]  # fmt: skip
    assert [action.action for action in trace.actions] == ["question", "no_question"]
    assert trace.details["rounds"][0] == {
        "thought": "So it is.",
        "core_triples": [["Ada", "born in", "Kelm"]],
        "next_query": "Which river flows through Kelm?",
        "faults": [],
    }
    assert trace.details["core_passages"] == [PAGES["Ada"].id, PAGES["Kelm"].id]
    assert (trace.calls, trace.prompt_tokens, trace.completion_tokens) == (3, 30, 6)
    assert script.roles == ["cirag.integrate", "cirag.integrate", "cirag.answer.triples"]
    assert {asked.question_id for asked in script.asked} == {"q7"}
    assert trace.tallies == {
        "calls.cirag.integrate": 2, "calls.cirag.answer.triples": 1, "core_triples": 2, "answered.triples": 1
    }  # fmt: skip


def test_the_integrator_sees_its_decisions_as_they_were_understood():
    invented = FIRST.replace('["Ada", "born in", "Kelm"]', '["Ada", "wrote", "notes"], ["ada", "born in", "kelm"]')
    script = Script(invented, SECOND)
    trace = run(script)
    history = script.asked[1].messages[2]["content"]
    assert history == FIRST
    assert trace.details["rounds"][0]["faults"] == ["invented_triple", "respelled_triple"]
    assert (trace.tallies["integration.invented_triple"], trace.tallies["core_triples"]) == (1, 2)


def test_core_triples_of_another_round_are_dropped_and_told_from_invented_ones():
    again = says("", ("Ada", "born in", "Kelm"), ("Ada", "occupation", "writer"), ("Kelm", "is", "town"))
    trace = run(Script(FIRST, again), candidates=1)
    assert [step.triples for step in trace.steps] == [[["Ada", "born in", "Kelm"]], [["Ada", "occupation", "writer"]]]
    assert trace.details["rounds"][1]["core_triples"] == [["Ada", "occupation", "writer"]]
    assert trace.details["rounds"][1]["faults"] == ["earlier_triple", "invented_triple"]


def test_a_triple_of_two_passages_belongs_to_the_better_ranked():
    script = Script(
        says("What of Kelm?"), says("", ("Ada", "born in", "Kelm")), triples="Answer: Unanswerable",
        sentences="Answer: Unanswerable",
    )  # fmt: skip
    trace = run(script)
    assert trace.details["granularity"] == "passages"
    assert trace.details["core_passages"] == [PAGES["Kelm"].id]
    assert "[Kelm]" in script.asked[3].messages[1]["content"]


def test_at_most_l_rounds_and_none_for_a_repeated_query():
    replies = [says(f"What about Kelm {n}?") for n in range(9)]
    trace = run(Script(*replies))
    assert (len(trace.steps), trace.stop_reason, trace.tallies["calls.cirag.integrate"]) == (4, "max_rounds", 4)
    assert run(Script(*replies), max_rounds=2).tallies["calls.cirag.integrate"] == 2
    # In the last round "no question" is still the integrator's own decision.
    assert run(Script(says("")), max_rounds=1).stop_reason == "no_question"
    for again in (QUESTION, "which river flows through  town where Ada was born"):
        trace = run(Script(says(again, ("Ada", "born in", "Kelm"))))
        assert (len(trace.steps), trace.stop_reason, trace.answer) == (1, "repeated_subquery", "Sarn")


def test_an_unreadable_decision_ends_the_loop_with_what_was_kept():
    bad = FIRST.split("[[## question")[0]
    trace = run(Script(bad, bad))
    assert (trace.stop_reason, trace.malformed, trace.answer) == ("malformed", 1, "Sarn")
    assert trace.actions[0].action is None
    assert trace.details["rounds"][0]["core_triples"] == [["Ada", "born in", "Kelm"]]
    assert trace.tallies["integration.repaired"] == 1


def test_every_call_of_a_round_is_made_before_a_pending_one_is_told():
    script = Client(*[RepliesPending("waits")] * 2)
    with pytest.raises(RepliesPending):
        run(script, Shelf(lambda query: list(PAGES.values())), extraction="two_step")
    assert script.roles == ["cirag.entities"] * 2


def test_the_history_can_be_a_section():
    script = Script(FIRST, SECOND)
    run(script, history="section")
    assert [len(asked.messages) for asked in script.asked[:2]] == [2, 2]
    assert "[[## historical_context ##]]" in script.asked[1].text


class Counting(Script):
    """A model on this machine, whose tokens are its words."""

    def count_tokens(self, messages):
        return sum(len(message["content"].split()) for message in messages)


def test_long_prompts_lose_their_oldest_candidates():
    whole = Counting(FIRST, SECOND)
    run(whole)
    longest = whole.count_tokens(whole.asked[1].messages)
    script = Counting(FIRST, SECOND)
    trace = run(script, max_prompt_tokens=longest - 1)
    assert trace.answer == "Sarn"
    assert (trace.tallies["shortened_prompts"], trace.tallies["candidates_left_out"]) == (1, 1)
    assert script.count_tokens(script.asked[1].messages) < longest
    assert '{"fact": [["Ada", "born in", "Kelm"]]}' in script.asked[1].messages[1]["content"]
    assert script.asked[1].messages[-1] == whole.asked[1].messages[-1]
    assert run(Counting(FIRST, SECOND), max_prompt_tokens=longest).tallies.get("shortened_prompts") is None


def test_replies_that_ledgers_hold_are_found():
    """The keys of the calls of a question; where they change, every teacher is asked again."""
    pages = {"cirag.entities": '{"entities": ["Ada"]}', "cirag.triples": '{"triples": [["Ada", "born in", "Kelm"]]}'}
    decisions = iter([FIRST, "?", SECOND])
    script = Client(answer=lambda asked: pages.get(asked.role) or next(decisions, "Answer: Unanswerable"))
    run(script, extraction="two_step", max_rounds=2)
    found = [f"{asked.role} {make_call('teacher', asked.sampling, asked.messages).key[:6]}" for asked in script.asked]
    assert found == [
        "cirag.entities 9485c4", "cirag.triples 1103f9", "cirag.integrate 1ebbc4",
        "cirag.entities 04e471", "cirag.triples d9b7e0", "cirag.integrate 6cdd89", "cirag.integrate.repair 74cff8",
        "cirag.answer.triples 76d100", "cirag.answer.sentences d76f33", "cirag.answer.passages d2a9da",
    ]  # fmt: skip


def test_a_rule_keeps_the_first_candidates_and_asks_no_integrator():
    script = Script()
    trace = run(script, keep=1)
    assert trace.details["rounds"][0]["core_triples"] == [["Ada", "born in", "Kelm"]]
    assert (trace.stop_reason, len(trace.steps)) == ("no_question", 1)
    assert not [asked for asked in script.asked if asked.role == "cirag.integrate"]
