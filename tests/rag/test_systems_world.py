"""Acceptance of the systems on the fictional world: a teacher that knows the facts, but uses only what it is shown."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from tests.cli import write_lines
from tests.fakes import Words
from tripletune.core.calls import CALL_ROLE, Completion, PromptTooLong
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import one_line
from tripletune.data_builders.world.build import WorldOptions, generate_world
from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.llm.ledger_client import LedgerClient
from tripletune.llm.question_client import load_prompts
from tripletune.rag.chat_generator import CLOSED_BOOK, COMMON, COMMON_READER, FACTS_HEADING, READER
from tripletune.rag.search.retrievers import open_retriever
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import Tools, find_system, system_names
from tripletune.rag.triple_store import open_triples

OPTIONS = WorldOptions(
    seed=5, train=0, validation=0, test=60, common_knowledge=0, one_hop=0, two_hop=3, three_hop=3, four_hop=0,
    comparison=1, intersection=0,
)  # fmt: skip
# GEAR fuses lists of 10 passages; in a corpus of 121 they overlap so much that the first five hold 87 % of the answers.
LOOPS = {"ras": {}, "ircot": {}, "react": {}, "self_ask": {}, "gear": {"top_k": 3}, "thrag": {}, "t2rag": {}}

ASKING = [name for name in system_names() if find_system(name).model != "none"]
STORED = {"cirag": {"extraction": "store"}, "ppr": {"synonyms": None}}


@pytest.fixture(scope="module")
def world():
    return generate_world(OPTIONS, "test")


@pytest.fixture(scope="module")
def removed(world):
    """The second hop's article of some questions."""
    return {question.helpful[1] for question in world.questions[::6]}


def build(world, folder, without=()):
    """Retriever and triples of the world's articles, without some of them."""
    for name, triples in (("corpus", False), ("triples", True)):
        rows = (row for row in world.article_rows(triples=triples) if row["title"] not in without)
        write_lines(folder / f"{name}.jsonl", rows)
    retriever = open_retriever("bm25", folder / "corpus.jsonl", folder / "index")
    store = open_triples(folder / "triples.jsonl", folder / "triples.sqlite")
    triples = TripleIndex("bm25", retriever.passages, store, folder / "index")
    return Tools(retriever=retriever, store=store, triples=triples, reranker=Words())


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    return build(world, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def partial(world, removed, tmp_path_factory):
    return build(world, tmp_path_factory.mktemp("partial"), removed)


def gold_of(world, *questions):
    """The passages that support a question, or all of them."""
    titles = dict.fromkeys(title for question in questions or world.questions for title in question.helpful)
    return tuple(Passage(title, world.articles[title].text) for title in titles)


def answer_all(world, name, tools, ledger=None, oracle=WorldOracle, first=None, **settings):
    """Answer every question, or the first ones, all at once; the traces in order."""
    system = find_system(name)
    options = system.options(**settings)

    async def run():
        client = LedgerClient(oracle(world), ledger)
        calls = []
        for number, question in enumerate(world.questions[:first]):
            mine = replace(tools, llm=client, gold=gold_of(world, question), question_id=f"q{number}")
            calls.append(system.run(question.text, question.text, mine, options))
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def right(world, traces):
    return [normalize_answer(t.answer) == normalize_answer(q.answer) for q, t in zip(world.questions, traces)]


def check_shown(name, traces, tools, asked, beginning=None):
    """The shown passages are those whose text (or its `beginning`), or a fact of theirs, is in the last prompt."""
    for trace in traces:
        chats = (" ".join(" ".join(t["content"] for t in chat if t["role"] == "user").split()) for chat in asked)
        prompt = [text for text in chats if one_line(trace.question) in text][-1]
        every = {one.id: one for one in (*tools.retriever.passages, *trace.found.values())}.values()
        expected = {one.id for one in every if " ".join(one.content.split())[:beginning] in prompt}
        stating = {"ras": trace.found.values(), "cirag": trace.found.values(), "thrag": every}
        for one in stating.get(name, ()):
            facts = [] if name == "ras" else re.findall(r"\w[^.]+\.", one.text)
            for triple in tools.store.get(one):
                row = triple.as_list()
                facts += [" | ".join(row), json.dumps(row, ensure_ascii=False), str(triple)]
            expected |= {one.id for fact in facts if fact in prompt}
        assert set(trace.shown) == expected
        assert len(trace.shown) == len(expected)
        unknown = trace.found and not expected and name not in stating
        assert trace.details.get("unknown", []) == (["shown"] if unknown else [])


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_finds_the_chain(world, whole, name):
    traces = answer_all(world, name, whole, **LOOPS[name])
    for kind, least in (("2-hop", 0.95), ("3-hop", 0.9)):
        found = [hit for hit, question in zip(right(world, traces), world.questions) if question.kind == kind]
        assert len(found) >= 20
        assert sum(found) / len(found) >= least, (name, kind)


@pytest.mark.parametrize("name", LOOPS)
def test_without_a_hop_exactly_the_questions_that_need_it_fail(world, whole, partial, removed, name):
    settings = LOOPS[name] if name == "thrag" else {"top_k": 10, **LOOPS[name]}
    before, after = (right(world, answer_all(world, name, tools, **settings)) for tools in (whole, partial))
    for question, could, can in zip(world.questions, before, after):
        # A question that the whole corpus does not answer may be answered where fewer articles compete.
        needs = bool(removed & set(question.helpful))
        assert not (can if needs else could and not can), question


@pytest.mark.parametrize("name", ASKING)
def test_one_reader_answers_for_every_system(world, whole, name):
    asked = []

    class Watched(WorldOracle):
        async def complete(self, messages, sampling):
            if CALL_ROLE.get() == COMMON:
                asked.append((messages, sampling.max_tokens))
            return await super().complete(messages, sampling)

    few = {"reader_tokens": 400, "max_answer_tokens": 37, **LOOPS.get(name, {})}
    traces = answer_all(world, name, whole, oracle=Watched, first=9, reader="common", **few, **STORED.get(name, {}))
    assert len(asked) == len(traces) == len([1 for trace in traces if trace.tallies[f"calls.{COMMON}"] == 1])
    prompts = load_prompts(COMMON_READER).texts
    for messages, length in asked:
        system, user = (message["content"] for message in messages)
        if name == "no_retrieval":
            assert (system, user[:9]) == (prompts[CLOSED_BOOK], "Question:")
        else:
            assert system == prompts[READER]
            assert user.startswith((FACTS_HEADING, "Passages:\n"))
        assert length == 37
        assert len(user.encode()) <= 4 * 400 + 300
    check_shown(name, traces, whole, [messages for messages, _ in asked], beginning=60)
    assert any(trace.shown for trace in traces) == (name != "no_retrieval")
    own = {role for trace in traces for role in trace.details["calls"] if ".answer" in role} - {COMMON}
    assert own <= {"self_ask.answer"}, "its follow-up questions are answered in the loop"


@pytest.mark.parametrize("name", ASKING)
def test_a_long_answer_keeps_its_paragraphs(world, whole, name):
    class Writer(WorldOracle):
        async def complete(self, messages, sampling):
            if ".answer" in (role := CALL_ROLE.get()):
                start = "Thought: so.\nAnswer: " if role.startswith("cirag") else ""
                return Completion(f"{start}One.\n\nAnswer: two.\n\n- Three.", 1, 1)
            return await super().complete(messages, sampling)

    settings = STORED.get(name, {})
    for trace in answer_all(world, name, whole, oracle=Writer, first=9, answer="long", **settings):
        assert trace.answer == "One.\n\nAnswer: two.\n\n- Three."


@pytest.mark.parametrize("name", sorted({*ASKING} - {"no_retrieval"}))
def test_a_prompt_that_is_too_long_loses_evidence(world, whole, name):
    asked = []

    class Small(WorldOracle):
        async def complete(self, messages, sampling):
            if max(len(turn["content"]) for turn in messages if turn["role"] == "user") > 400:
                raise PromptTooLong("the context has 200 tokens")
            asked.append(messages)
            return await super().complete(messages, sampling)

    traces = answer_all(world, name, whole, oracle=Small, first=9, **STORED.get(name, {}))
    assert sum(tally.startswith("shortened.") for trace in traces for tally in trace.tallies)
    check_shown(name, traces, whole, asked)


def test_t2rag_needs_no_more_rounds_than_hops(world, whole):
    traces = answer_all(world, "t2rag", whole)
    for question, trace in zip(world.questions, traces):
        if trace.stop_reason == "sufficient":
            # One round a hop at most; a comparison searches both at once.
            assert len(trace.steps) <= (1 if question.kind == "comparison" else len(question.helpful))
    # This oracle reads propositions alone.
    assert right(world, answer_all(world, "t2rag", whole, passages=False)) == right(world, traces)


def test_gear_calls_and_remembers_as_its_paper_says(world, whole):
    traces = answer_all(world, "gear", whole)
    for question, trace in zip(world.questions, traces):
        rounds = len(trace.steps)
        reads = trace.tallies["calls.gear.read"]
        assert rounds <= reads <= 2 * rounds, "the same passages are read once"
        assert trace.tallies["calls.gear.reason"] == rounds == len(trace.actions)
        assert trace.tallies.get("calls.gear.rewrite", 0) == rounds - 1
        assert trace.calls == reads + 2 * rounds, "the answer is the last call"
        if trace.stop_reason == "sufficient":
            gist = {tuple(row) for row in trace.details["gist"]}
            facts = {(title, predicate) for title, predicate, _ in gist}
            assert facts == set(zip(question.helpful, question.predicates))
    assert {trace.stop_reason for trace in traces} <= {"sufficient", "repeated_subquery", "max_rounds"}
    assert sum(len(trace.steps) for trace in traces) < sum(
        len(trace.steps) for trace in answer_all(world, "ircot", whole)
    ), "the graph brings several hops at once"


def test_expansion_finds_more_than_retrieval_alone(world, whole):
    def found(name, calls, **settings):
        traces = answer_all(world, name, whole, top_k=5, **settings)
        assert {trace.calls for trace in traces} == {calls}
        titles = [{passage["title"] for passage in trace.steps[0].passages} for trace in traces]
        return sum(len(hits & set(one.helpful)) / len(one.helpful) for hits, one in zip(titles, world.questions))

    alone = found("standard", 1)
    assert found("gear", 1, variant="naive") > alone
    assert found("gear", 2, variant="sync") > alone
    assert found("ppr", 2, synonyms=None) > alone + 0.1 * len(world.questions)
    assert found("ppr", 1, synonyms=None, filter=False) > alone


def test_pagerank_searches_each_thought_of_ircot(world, whole):
    alone, graph = (answer_all(world, "ircot", whole, top_k=2, graph=on, synonyms=None) for on in (False, True))
    assert all(right(world, graph))
    assert sum(len(trace.steps) for trace in graph) < sum(len(trace.steps) for trace in alone)
    assert all(trace.tallies["calls.ircot.filter"] == len(trace.steps) for trace in graph)
