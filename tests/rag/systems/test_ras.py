import asyncio

import pytest

from tests.fakes import Client, Facts, Model, Shelf
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Action, Step
from tripletune.core.data.rendering import Plan
from tripletune.core.data.triples import Triple
from tripletune.rag.systems import LoopOptions, Tools
from tripletune.rag.systems.ras import SYSTEM, _query_or_stop, ras

QUESTION = "Who directed Alien?"


def two_facts(passage):
    """Two facts a passage, of which one is common to both passages of a query."""
    query, number = passage.title.rsplit(" ", 1)
    return (Triple(query, "has", "common"), Triple(query, "has", number))


FACTS = Facts(two_facts)
NOTHING = Facts(lambda passage: None)


def run(script, options=None, facts=FACTS, search=QUESTION):
    shelf = Shelf()
    trace = asyncio.run(ras(QUESTION, search, Tools(script, script, shelf, facts), options or LoopOptions()))
    return trace, [query for query, _ in shelf.queries]


def test_two_rounds_as_in_the_paper():
    script = Model(f"[SUBQ] {QUESTION}", "[SUBQ] Who is Ridley Scott?", "[SUFFICIENT]")
    trace, queries = run(script)
    assert queries == [QUESTION, "Who is Ridley Scott?"]
    assert trace.answer == "Ridley Scott"
    assert trace.stop_reason == "sufficient"
    tasks = [(sample.task, len(sample.steps)) for sample, _, _ in script.inputs]
    assert tasks == [("planning", 0), ("planning", 1), ("planning", 2), ("answering", 2)]
    last = script.inputs[-1][0]
    assert last.steps[1].triples == (
        Triple("Who is Ridley Scott?", "has", "common"),
        Triple("Who is Ridley Scott?", "has", "1"),
        Triple("Who is Ridley Scott?", "has", "2"),
    )
    assert last.steps[0].text == f"{QUESTION} 1\ntext 1 of {QUESTION}\n{QUESTION} 2\ntext 2 of {QUESTION}"
    assert [limit for _, limit, _ in script.inputs] == [64, 64, 64, 100]
    assert (trace.calls, trace.prompt_tokens, trace.completion_tokens, trace.truncated_triples) == (4, 40, 8, 4)
    assert (trace.malformed, trace.unexpected) == (0, 0)


def test_the_answer_reads_what_was_found_as_one_search():
    script = Model(f"[SUBQ] {QUESTION}", "[SUBQ] Who is Ridley Scott?", "[SUFFICIENT]")
    shared = Facts(lambda passage: (Triple("both", "have", "this"), Triple(passage.title, "is", "found")))
    trace, _ = run(script, LoopOptions(answer_history="merged", top_k=1), shared)
    plan, answer = script.inputs[-2][0], script.inputs[-1][0]
    assert [step.query for step in plan.steps] == [QUESTION, "Who is Ridley Scott?"], "the planner reads the steps"
    (step,) = answer.steps
    assert step.query == QUESTION
    assert step.triples == (
        Triple("both", "have", "this"),
        Triple(f"{QUESTION} 1", "is", "found"),
        Triple("Who is Ridley Scott? 1", "is", "found"),
    )
    assert step.text == f"{QUESTION} 1\ntext 1 of {QUESTION}\nWho is Ridley Scott? 1\ntext 1 of Who is Ridley Scott?"
    assert len(trace.steps) == 2
    script = Model("[NO_RETRIEVAL]")
    alone, _ = run(script, LoopOptions(answer_history="merged"))
    assert script.inputs[-1][0].steps == ()
    assert alone.stop_reason == "no_retrieval"


def test_the_trace_says_why_the_first_sub_query_was_not_searched():
    trace, _ = run(Model("[SUBQ] something else", "[SUBQ] more", "[SUFFICIENT]"))
    notes = [action.note for action in trace.actions]
    assert notes == ["not searched: the first search is for the main question (--first-query main_question)", "", ""]
    trace, _ = run(Model("[SUBQ] something else", "[SUFFICIENT]"), LoopOptions(first_query="generated"))
    assert trace.actions[0].note == ""
    trace, _ = run(Model("[SUBQ] None"))
    assert (trace.stop_reason, trace.steps) == ("no_question", [])
    assert trace.actions[0].note == "not searched: this sub-query asks nothing"


def test_unreadable_plans_of_a_trained_model_are_counted_with_an_example():
    trace, _ = run(Model("[SUBQ] q", "I think so.", "[SUFFICIENT]"))
    assert (trace.malformed, trace.tallies) == (1, {"unreadable.plan": 1})
    assert trace.details["unreadable"] == {"plan": ["no_action", "I think so."]}


def test_the_triples_closest_to_the_sub_query_and_to_the_question():
    class Words:
        """Texts that share more words with a query are closer to it."""

        async def scores(self, query, texts):
            return [len(set(query.lower().split()) & set(text.lower().split())) for text in texts]

    triples = (Triple("x", "is", "y"), Triple("Ada", "wrote", "it"), Triple("directed", "is", "old"))
    facts = Facts(lambda passage: triples)
    options = LoopOptions(triples_per_step=2, triples_chosen="closest")
    tools = Tools(Model("[SUBQ] who", "[SUBQ] Ada wrote", "[SUFFICIENT]"), Model(), Shelf(), facts, reranker=Words())
    trace = asyncio.run(ras(QUESTION, QUESTION, tools, options))
    shown = [[triple[0] for triple in step.triples] for step in trace.steps]
    assert shown[1] == ["Ada", "directed"], "Ada for the sub-query, the other for the question, in passage order"
    assert SYSTEM.needs_reranker(options)
    assert not SYSTEM.needs_reranker(LoopOptions(triples_per_step=2))


@pytest.mark.parametrize("chosen", ["first", "closest"])
def test_a_repeated_triple_takes_no_place_in_the_prompt_of_a_chat_model(chosen):
    class Same:
        async def scores(self, query, texts):
            return [1.0] * len(texts)

    triples = (Triple("Ada", "is", "old"), Triple("Bo", "is", "old"), Triple("Cy", "is", "old"))
    options = LoopOptions(triples_per_step=1, triples_chosen=chosen, top_k=1)
    facts = Facts(lambda passage: triples)
    client = Client("[SUBQ] one", "[SUBQ] two", "[SUFFICIENT]", "Ridley Scott")
    trace = asyncio.run(
        ras(QUESTION, QUESTION, Tools(retriever=Shelf(), store=facts, llm=client, reranker=Same()), options)
    )
    assert [step.triples for step in trace.steps] == [[["Ada", "is", "old"]], [["Bo", "is", "old"]]]
    # A Graph-LLM was trained to read it again.
    trained = Model("[SUBQ] one", "[SUBQ] two", "[SUFFICIENT]")
    trace = asyncio.run(ras(QUESTION, QUESTION, Tools(trained, trained, Shelf(), facts, reranker=Same()), options))
    assert [step.triples for step in trace.steps] == [[["Ada", "is", "old"]]] * 2


def test_q0_is_the_question_its_search_form_or_the_generated_one():
    assert run(Model("[SUBQ] something else", "[SUFFICIENT]"))[1] == [QUESTION]
    generated = LoopOptions(first_query="generated")
    assert run(Model("[SUBQ] something else", "[SUFFICIENT]"), generated)[1] == ["something else"]
    assert run(Model("[SUBQ] q", "[SUFFICIENT]"), search="Alien director")[1] == ["Alien director"]


@pytest.mark.parametrize(
    ("plans", "options", "queries", "stop", "counts"),
    [
        (["[SUBQ] q", "[SUBQ] Is it [SUFFICIENT]?", "[SUFFICIENT]"], {}, [QUESTION, "Is it [SUFFICIENT]?"],
         "sufficient", (4, 0, 0)),
        (["[SUBQ] q", f"[SUBQ] {QUESTION}"], {}, [QUESTION], "repeated_subquery", (3, 0, 0)),
        (["[SUBQ] q", "[SUBQ] who directed  the alien"], {}, [QUESTION], "repeated_subquery", (3, 0, 0)),
        # One more plan could change nothing.
        (["[SUBQ] a", "[SUBQ] b", "[SUBQ] c"], {"max_rounds": 2}, [QUESTION, "b"], "max_rounds", (3, 0, 0)),
        (["[NO_RETRIEVAL]"], {}, [], "no_retrieval", (2, 0, 0)),
        ([], {"max_rounds": 0}, [], "max_rounds", (1, 0, 0)),
        ([], {"retrieval": False}, [], "retrieval_off", (1, 0, 0)),
        ([], {"planning": False, "top_k": 3}, [QUESTION], "single_pass", (1, 0, 0)),
        # A plan that can't be read asks the question without a graph, and answers with one.
        (["I think", "The answer is near"], {}, [QUESTION], "malformed", (3, 2, 0)),
        (["[SUBQ] q", "[NO_RETRIEVAL]"], {}, [QUESTION], "sufficient", (3, 0, 1)),
        (["[SUFFICIENT]"], {}, [], "sufficient", (2, 0, 1)),
    ],
)  # fmt: skip
def test_how_planning_ends(plans, options, queries, stop, counts):
    script = Model(*plans)
    trace, found = run(script, LoopOptions(**options))
    assert (found, trace.stop_reason, trace.answer) == (queries, stop, "Ridley Scott")
    assert (trace.calls, trace.malformed, trace.unexpected) == counts
    assert [len(step.triples) for step in script.inputs[-1][0].steps] == [3] * len(queries)


UNREAD = (Step("Q", (), ""),)
READ = (Step("Q", (Triple("a", "is", "b"),), "text"),)


@pytest.mark.parametrize(
    ("plan", "steps", "expected"),
    [
        (Plan(Action.SUBQ, "Who?"), READ, ("Who?", "")),
        (Plan(Action.SUBQ, "None"), READ, ("", "no_question")),
        (Plan(Action.SUFFICIENT), (), ("", "sufficient")),
        (Plan(Action.NO_RETRIEVAL), (), ("", "no_retrieval")),
        (Plan(Action.NO_RETRIEVAL), READ, ("", "sufficient")),
        (Plan(None), READ, ("", "malformed")),
        (Plan(None), UNREAD, ("the question", "")),
    ],
)
def test_what_a_plan_means_for_the_loop(plan, steps, expected):
    assert _query_or_stop(plan, steps, "the question", LoopOptions()) == expected


def test_malformed_plan_after_a_step_without_evidence_asks_the_question():
    shelf, script = Shelf(lambda query: []), Model("[SUBQ] other", "garbage", "garbage")
    options = LoopOptions(first_query="generated", top_k=3)
    trace = asyncio.run(ras(QUESTION, QUESTION, Tools(script, script, shelf, FACTS), options))
    assert shelf.queries == [("other", 3), (QUESTION, 3)]
    assert (trace.stop_reason, trace.malformed) == ("repeated_subquery", 2)
    trace, queries = run(Model("x", "x"), facts=NOTHING)
    assert (queries, trace.stop_reason, trace.malformed) == ([QUESTION], "repeated_subquery", 2)
    trace, _ = run(Model("x", "x"), LoopOptions(evidence="text"), facts=NOTHING)
    assert trace.stop_reason == "malformed"


def test_passages_without_triples_are_counted_and_triples_capped():
    first = Facts(lambda passage: two_facts(passage) if passage.title.endswith("1") else None)
    trace, _ = run(Model("[SUBQ] q", "[SUFFICIENT]"), facts=first)
    assert trace.steps[0].passages_without_triples == 1
    assert len(trace.steps[0].triples) == 2
    assert trace.shown == [trace.steps[0].passages[0]["id"]], "the other passage gave the model nothing"
    trace, _ = run(Model("[SUBQ] q", "[SUFFICIENT]"), LoopOptions(triples_per_step=1))
    assert trace.steps[0].triples == [[QUESTION, "has", "common"]]


def test_a_share_of_the_triples_is_drawn_by_seed_and_keeps_its_order():
    def kept(**options):
        trace, _ = run(Model("[SUBQ] q", "[SUBQ] r", "[SUFFICIENT]"), LoopOptions(**options))
        return [[triple[2] for triple in step.triples] for step in trace.steps]

    assert kept(triples_share=1.0) == [["common", "1", "2"]] * 2
    drawn = [kept(triples_share=0.67, share_seed=seed) for seed in range(8)]
    assert all(step in (["common", "1"], ["common", "2"], ["1", "2"]) for steps in drawn for step in steps)
    assert len({str(steps) for steps in drawn}) > 2
    assert kept(triples_share=0.67, share_seed=3) == drawn[3]
    assert [len(step) for step in kept(triples_share=0.1)] == [1, 1], "a step with triples keeps one"
    shuffled = [kept(triples_shuffled=True, share_seed=seed)[0] for seed in range(8)]
    assert {frozenset(step) for step in shuffled} == {frozenset(("common", "1", "2"))}
    assert len({str(step) for step in shuffled}) > 2


OWN = tuple(Passage(f"own {number}", f"text {number}") for number in range(1, 8))


def test_the_passages_of_a_question_are_its_initial_context():
    script, shelf = Model("[SUBQ] q", "[SUBQ] r", "[SUFFICIENT]"), Shelf()
    tools = Tools(script, script, shelf, FACTS, context=OWN)
    trace = asyncio.run(ras(QUESTION, QUESTION, tools, LoopOptions(context="first", top_k=2)))
    titles = [[passage["title"] for passage in step.passages] for step in trace.steps]
    assert (titles[0], [query for query, _ in shelf.queries]) == (["own 1", "own 2"], ["r"])
    assert trace.steps[0].triples == [["own", "has", "common"], ["own", "has", "1"], ["own", "has", "2"]]
    assert "searched_without_context" not in trace.tallies


def test_a_question_without_passages_is_searched_and_counted():
    script, shelf = Model("[SUBQ] q", "[SUBQ] r", "[SUFFICIENT]"), Shelf()
    tools = Tools(script, script, shelf, FACTS, context=())
    trace = asyncio.run(ras(QUESTION, QUESTION, tools, LoopOptions(context="first", top_k=2)))
    assert [query for query, _ in shelf.queries] == [QUESTION, "r"]
    assert trace.tallies["searched_without_context"] == 1


def test_a_static_context_is_read_in_fixed_rounds_without_plans():
    options = LoopOptions(context="static")
    trace = asyncio.run(ras(QUESTION, "search", Tools(*[Model()] * 2, store=FACTS, context=OWN), options))
    assert [step.triples[1][2] for step in trace.steps] == ["1", "2", "3", "4", "5"]
    assert (trace.stop_reason, trace.calls, trace.steps[4].query) == ("static_context", 1, "search")
    assert not SYSTEM.needs_corpus(options)
    with pytest.raises(ValueError, match="needs 'context'"):
        asyncio.run(ras(QUESTION, QUESTION, Tools(*[Model()] * 2, store=FACTS), options))


def test_text_evidence_needs_no_store():
    script = Model("[SUBQ] q", "[SUFFICIENT]")
    assert not SYSTEM.needs_triples(LoopOptions(evidence="text"))
    trace = asyncio.run(ras(QUESTION, QUESTION, Tools(script, script, Shelf()), LoopOptions(evidence="text")))
    assert {evidence for _, _, evidence in script.inputs} == {"text"}
    assert trace.steps[0].triples == []
    with pytest.raises(ValueError, match="needs 'store'"):
        asyncio.run(ras(QUESTION, QUESTION, Tools(Model("[SUBQ] q"), script, Shelf()), LoopOptions()))
