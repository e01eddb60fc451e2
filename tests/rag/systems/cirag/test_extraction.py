import asyncio
import contextlib
from collections import Counter
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import Client
from tripletune.core.calls import CallError, Sampling, SetupError, UnusableReply
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.llm.ledger_client import RetriesExhausted
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.rag import Trace
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.extractor import TextExtractor, read_entities
from tripletune.rag.search.retrievers import provenance, source_sentence, split_sentences
from tripletune.rag.systems.cirag import PROMPT_NAMES, CiragOptions, passage_triples, read_passage_triples
from tripletune.rag.triple_store import StoredTriples, TripleStore

PASSAGE = Passage("Kelm\n town", "Kelm is a town.\nIt lies on the Sarn.")  # a line break opens no new line
ENTITIES = '{"entities": ["Kelm", "Sarn"]}'
TRIPLES = '{"triples": [["Kelm", "is", "town"], ["Kelm", "lies on", "Sarn"], ["Kelm", "is", "town"]]}'


def read(*replies, **more):
    client, trace, issues = Client(*replies), Trace("Q?"), Counter()
    prompts = load_prompts(PROMPT_NAMES)
    llm = QuestionClient(client, trace, "q1", Sampling(temperature=0.5, seed=3), system="cirag", prompts=prompts)
    options = CiragOptions(max_extraction_tokens=99, **more)
    found = asyncio.run(passage_triples(PASSAGE, llm, issues, options))
    return found, dict(+issues), client, trace


def test_two_steps_name_the_entities_in_the_second_prompt():
    found, issues, client, trace = read(ENTITIES, TRIPLES)
    assert found == (Triple("Kelm", "is", "town"), Triple("Kelm", "lies on", "Sarn"))
    assert issues == {}
    assert client.roles == ["cirag.entities", "cirag.triples"]
    assert client.asked[0].text == "Title: Kelm town\nText: Kelm is a town. It lies on the Sarn."
    assert client.asked[1].text == client.asked[0].text + '\nEntities: ["Kelm", "Sarn"]'
    assert client.asked[0][2:] == (Sampling(temperature=0.5, seed=3, max_tokens=99), "q1")
    assert (trace.calls, trace.prompt_tokens, trace.completion_tokens) == (2, 20, 4)
    assert trace.tallies == {"calls.cirag.entities": 1, "calls.cirag.triples": 1}


def test_a_refused_passage_costs_no_question_but_a_server_that_is_down_does():
    found, issues, client, _ = read(CallError("content filter"), TRIPLES)
    assert client.asked[1].text.endswith("\nEntities: []")
    assert (len(found), issues) == (2, {"refused.cirag.entities": 1})
    assert read(ENTITIES, CallError("content filter"))[:2] == (None, {"refused.cirag.triples": 1})
    for error in (RetriesExhausted("down"), SetupError("no key")):
        with pytest.raises(type(error)):
            read(ENTITIES, error)


def test_an_unreadable_reply_is_sent_back_once_and_then_given_up():
    _, issues, client, trace = read("no idea...", ENTITIES, TRIPLES)
    assert client.roles == ["cirag.entities", "cirag.entities.repair", "cirag.triples"]
    assert issues == {"repairs.cirag.entities": 1}
    assert trace.tallies["cut_off.cirag.entities"] == 1
    found, issues, client, trace = read("?", "?", TRIPLES)
    assert client.asked[2].text.endswith("\nEntities: []")
    assert (len(found), issues) == (2, {"repairs.cirag.entities": 1})
    # The passage that is given up is no third reply.
    assert trace.tallies["unreadable.cirag.entities"] == 2
    assert read(ENTITIES, "?", "[[]]")[:2] == (None, {"repairs.cirag.triples": 1})


@pytest.mark.parametrize(("of", "extraction"), [("cirag", "two_step"), ("ppr", "two_step"), ("gear", "joint")])
def test_a_corpus_is_read_with_the_chats_of_the_loop(tmp_path, of, extraction):
    replies = (ENTITIES, TRIPLES) if extraction == "two_step" else ('{"entities": ["a", "b", "c"], ' + TRIPLES[1:],)
    found, _, loop, _ = read(*replies, extraction=extraction)
    client, sampling = Client(*replies), Sampling(temperature=0.5, seed=3, max_tokens=99)
    with closing(TripleStore(tmp_path / "s.sqlite")) as store:
        run = CorpusExtraction(TextExtractor(client, "", sampling=sampling, prompts_of=of), store)
        counts = asyncio.run(run.run([PASSAGE]))
        assert StoredTriples(store, run.id).get(PASSAGE) == found
        assert store.extractors()[0].settings.count("Reply with one JSON object") == len(replies)
    assert [(one.messages, one.sampling) for one in client.asked] == [
        (one.messages, one.sampling) for one in loop.asked
    ]
    assert (counts.extracted, counts.tokens_read) == (1, 10 * len(replies))


def test_malformed_triples_are_counted_and_cost_no_neighbour():
    found, issues, _, _ = read(ENTITIES, '{"triples": [["Kelm", "founded in", 1203], ["Kelm", "is"], ["", "a", "b"]]}')
    assert found == (Triple("Kelm", "founded in", "1203"),)
    assert issues == {"malformed_triples": 2}
    assert read(ENTITIES, '{"triples": []}')[0] == ()


def test_a_reply_that_is_cut_off_keeps_its_complete_triples_and_is_not_asked_for_again():
    cut_off = '{"entities": ["x","y","z"], "triples": [["a","b","c"],["d","e","f"],["g"'
    found, issues, _, _ = read(ENTITIES, cut_off)
    assert found == (Triple("a", "b", "c"), Triple("d", "e", "f"))
    assert issues["incomplete_json"] == 1
    assert issues.keys() <= {"incomplete_json", "malformed_triples"}, "the client counts cut_off.<role>"


def test_other_forms_are_read():
    assert read_entities('{"named entities": ["A", "A", " "]}') == ("A",)
    assert read_entities('["A", 1902]') == ("A", "1902")
    assert read_passage_triples("(S> a| P> b| O> c)").triples == (Triple("a", "b", "c"),)
    for text in ("", "[1", '{"other": 1}', '{"entities": "A"}', '{"entities": [["A"]]}'):
        with pytest.raises(UnusableReply):
            read_entities(text)


PIECES = ['{"triples": [', '["a","b","c"]', ",", "]}", "[", "S>", "(S> a|"]


@given(st.text(max_size=60) | st.lists(st.sampled_from(PIECES)).map("".join))
def test_readers_give_triples_or_refuse(text):
    with contextlib.suppress(UnusableReply):
        found = read_passage_triples(text)
        assert found.malformed >= 0
        assert len(set(found.triples)) == len(found.triples)
    with contextlib.suppress(UnusableReply):
        assert all(name.strip() for name in read_entities(text))


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


@settings(max_examples=60)
@given(st.text(max_size=80))
def test_every_text_has_a_sentence(text):
    sentences = split_sentences(text)
    assert sentences
    assert all(sentence == sentence.strip() for sentence in sentences)
    if text.strip():
        assert all(sentences)
        assert "".join("".join(sentences).split()) == "".join(text.split())
