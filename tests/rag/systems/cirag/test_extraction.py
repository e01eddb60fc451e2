from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rag.fakes import Client
from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm import CallError, Sampling, SetupError
from tripletune.models.llm.ledger_client import RetriesExhausted
from tripletune.models.llm.replies import UnusableReply
from tripletune.rag import Trace
from tripletune.rag.systems import QuestionClient, load_prompts
from tripletune.rag.systems.cirag import PROMPT_NAMES
from tripletune.rag.systems.cirag.extraction import (
    LLMExtractor,
    StoredExtractor,
    provenance,
    read_entities,
    read_passage_triples,
    source_sentence,
    split_sentences,
)

PASSAGE = Passage("Kelm\n town", "Kelm is a town.\nIt lies on the Sarn.")  # a line break opens no new line
ENTITIES = '{"entities": ["Kelm", "Sarn"]}'
TRIPLES = '{"triples": [["Kelm", "is", "town"], ["Kelm", "lies on", "Sarn"], ["Kelm", "is", "town"]]}'


def extract(*replies, entities="cirag_entities", triples="cirag_triples"):
    client, trace = Client(*replies), Trace("Q?")
    llm = QuestionClient(client, trace, "q1", Sampling(temperature=0.5, seed=3))
    extractor = LLMExtractor(load_prompts(PROMPT_NAMES), triples, entities, max_tokens=99)
    return asyncio.run(extractor.extract(PASSAGE, llm)), client, trace


def test_two_steps_name_the_entities_in_the_second_prompt():
    found, client, trace = extract(ENTITIES, TRIPLES)
    assert found.triples == (Triple("Kelm", "is", "town"), Triple("Kelm", "lies on", "Sarn"))
    assert (found.known, dict(found.issues)) == (True, {})
    assert client.roles == ["cirag.entities", "cirag.triples"]
    assert client.asked[0].text == "Title: Kelm town\nText: Kelm is a town. It lies on the Sarn."
    assert client.asked[1].text == client.asked[0].text + '\nEntities: ["Kelm", "Sarn"]'
    assert client.asked[0][2:] == (Sampling(temperature=0.5, seed=3, max_tokens=99), "q1")
    assert (trace.calls, trace.prompt_tokens, trace.completion_tokens) == (2, 20, 4)
    assert trace.tallies == {"calls.cirag.entities": 1, "calls.cirag.triples": 1}


def test_one_prompt_asks_for_both():
    found, client, _ = extract(TRIPLES, entities=None, triples="cirag_joint")
    assert len(found.triples) == 2
    assert client.roles == ["cirag.joint"]


def test_a_refused_passage_costs_no_question_but_a_server_that_is_down_does():
    found, client, _ = extract(CallError("content filter"), TRIPLES)
    assert client.asked[1].text.endswith("\nEntities: []")
    assert (len(found.triples), found.known, dict(found.issues)) == (2, True, {"refused.cirag.entities": 1})
    found, _, _ = extract(ENTITIES, CallError("content filter"))
    assert (found.triples, found.known, dict(found.issues)) == ((), False, {"refused.cirag.triples": 1})
    for error in (RetriesExhausted("down"), SetupError("no key")):
        with pytest.raises(type(error)):
            extract(ENTITIES, error)


def test_an_unreadable_reply_is_sent_back_once_and_then_given_up():
    found, client, trace = extract("no idea...", ENTITIES, TRIPLES)
    assert client.roles == ["cirag.entities", "cirag.entities.repair", "cirag.triples"]
    assert dict(found.issues) == {"repairs.cirag.entities": 1}
    assert trace.tallies["cut_off.cirag.entities"] == 1
    found, client, _ = extract("?", "?", TRIPLES)
    assert client.asked[2].text.endswith("\nEntities: []")
    assert (len(found.triples), found.issues["unreadable.cirag.entities"]) == (2, 1)
    found, _, _ = extract(ENTITIES, "?", "[[]]")
    assert (found.triples, found.known) == ((), False)
    assert dict(found.issues) == {"unreadable.cirag.triples": 1, "repairs.cirag.triples": 1}


def test_malformed_triples_are_counted_and_cost_no_neighbour():
    found, _, _ = extract(ENTITIES, '{"triples": [["Kelm", "founded in", 1203], ["Kelm", "is"], ["", "a", "b"]]}')
    assert found.triples == (Triple("Kelm", "founded in", "1203"),)
    assert dict(found.issues) == {"malformed_triples": 2}
    assert extract(ENTITIES, '{"triples": []}')[0].known


@pytest.mark.parametrize(
    "reply",
    [
        '{"triples": [["a","b","c"],["d","e","f"],["g","h',
        '{"entities": ["x","y","z"], "triples": [["a","b","c"],["d","e","f"],["g"',
        '{"triples": [["a","b","c"] ["d","e","f"]]}',
    ],
)
def test_a_reply_that_is_cut_off_keeps_its_complete_triples_and_is_not_asked_for_again(reply):
    found, _, _ = extract(ENTITIES, reply)
    assert found.triples == (Triple("a", "b", "c"), Triple("d", "e", "f"))
    assert found.issues["cut_off.cirag.triples"] == 1
    assert not found.issues["repairs.cirag.triples"]


def test_other_forms_are_read():
    assert read_entities('{"named entities": ["A", "A", " "]}') == ("A",)
    assert read_entities('["A", 1902]') == ("A", "1902")
    objects = read_passage_triples('{"triples": [{"subject": "a", "predicate": "b", "object": "c"}]}')
    assert objects.triples == (Triple("a", "b", "c"),)
    assert read_passage_triples("(S> a| P> b| O> c)").triples == (Triple("a", "b", "c"),)
    for text in ("", "[1", '{"other": 1}', '{"entities": "A"}', '{"entities": [["A"]]}'):
        with pytest.raises(UnusableReply):
            read_entities(text)


PIECES = ['{"triples": [', '["a","b","c"]', ",", "]}", "[", "S>", "(S> a|"]


@settings(deadline=None)
@given(st.text(max_size=60) | st.lists(st.sampled_from(PIECES)).map("".join))
def test_readers_give_triples_or_refuse(text):
    with contextlib.suppress(UnusableReply):
        found = read_passage_triples(text)
        assert found.malformed >= 0
        assert len(set(found.triples)) == len(found.triples)
    with contextlib.suppress(UnusableReply):
        assert all(name.strip() for name in read_entities(text))


def test_stored_triples_need_no_call():
    class Store:
        def get(self, passage):
            return (Triple("a", "b", "c"), Triple("a", "b", "c")) if passage == PASSAGE else None

    llm = QuestionClient(Client(), Trace("Q?"))
    known = asyncio.run(StoredExtractor(Store()).extract(PASSAGE, llm))
    assert (known.triples, known.known) == ((Triple("a", "b", "c"),), True)
    unknown = asyncio.run(StoredExtractor(Store()).extract(Passage("X", "x"), llm))
    assert (unknown.triples, unknown.known) == ((), False)


TEXT = "Dr. A. Halde (1871-1940) was a painter. She was born in Kelm, St. Mary parish. In 1902 she married Ivo Rand."


def test_sentences_end_neither_at_abbreviations_nor_at_line_breaks():
    assert split_sentences(TEXT) == (
        "Dr. A. Halde (1871-1940) was a painter.",
        "She was born in Kelm, St. Mary parish.",
        "In 1902 she married Ivo Rand.",
    )
    assert split_sentences("A \ud800 b\nand so on. There is more.") == ("A ? b and so on.", "There is more.")


def test_a_triple_comes_from_the_sentence_with_its_object():
    passage = Passage("A. Halde", TEXT)
    triples = [
        Triple("A. Halde", "occupation", "painter"),
        Triple("A. Halde", "born in", "Kelm"),
        Triple("A. Halde", "spouse", "Ivo Rand"),
    ]
    facts = provenance(passage, triples)
    assert [fact.sentence for fact in facts] == list(split_sentences(TEXT))
    assert {fact.passage for fact in facts} == {passage}
    # Strangers and equals go to the first sentence.
    assert source_sentence(Triple("x", "y", "z"), ["a b", "c d"]) == 0
    assert source_sentence(Triple("a", "b", "c"), ["a b c", "a b c"]) == 0
    assert source_sentence(Triple("...", "!", "c"), ["a", "c"]) == 1


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=80))
def test_every_text_has_a_sentence(text):
    sentences = split_sentences(text)
    assert sentences
    assert all(sentence == sentence.strip() for sentence in sentences)
    if text.strip():
        assert all(sentences)
        assert "".join("".join(sentences).split()) == "".join(text.split())
