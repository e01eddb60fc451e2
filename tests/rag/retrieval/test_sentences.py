from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.models.data.passages import Passage
from tripletune.models.data.triples import Triple
from tripletune.rag.triples.sentences import provenance, source_sentence, split_sentences

TEXT = "Dr. A. Halde (1871-1940) was a painter. She was born in Kelm, St. Mary parish. In 1902 she married Ivo Rand."


def test_abbreviations_do_not_end_a_sentence():
    assert split_sentences(TEXT) == (
        "Dr. A. Halde (1871-1940) was a painter.",
        "She was born in Kelm, St. Mary parish.",
        "In 1902 she married Ivo Rand.",
    )


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


def test_half_characters_and_line_breaks_are_no_error():
    assert split_sentences("A \ud800 b\nand so on. There is more.") == ("A ? b and so on.", "There is more.")


def test_equals_and_strangers_go_to_the_first_sentence():
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
