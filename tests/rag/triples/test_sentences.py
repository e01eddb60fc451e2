import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.rag.triples.sentences import PIECE_LIMIT, provenance, source_sentence, split_passage, split_sentences


def bare(text):
    return "".join(text.split())


@settings(deadline=None)
@given(
    st.text(alphabet=st.one_of(st.sampled_from("ab .?!。\n\"'()"), st.characters(codec="utf-8"))), st.integers(1, 40)
)
def test_no_character_is_lost_and_no_piece_is_too_long(text, limit):
    pieces = split_passage(text, limit)
    assert "".join(map(bare, pieces)) == bare(text)
    assert all(piece and len(piece) <= limit for piece in pieces)


def test_a_short_text_is_left_whole():
    assert split_passage(" One.  Two. ") == ["One. Two."]
    assert split_passage(" \n ") == []


def test_pieces_end_between_sentences():
    text = "Dr. Ida Morn was born in the U.S. in 1871. She painted. Was she known? She was."
    assert split_passage(text, 45) == [
        "Dr. Ida Morn was born in the U.S. in 1871.",
        "She painted. Was she known? She was.",
    ]


def test_fifty_thousand_characters():
    text = "Ida Morn lived in house number 12 of this street. " * 1000
    pieces = split_passage(text)
    assert bare("".join(pieces)) == bare(text)
    assert all(piece.endswith(".") for piece in pieces)
    assert len(pieces) <= len(text) // PIECE_LIMIT * 1.1 + 1
    assert len(split_passage("x" * 50_000, 1000)) >= 50


def test_half_characters_can_be_read():
    assert split_passage("a\ud800. " * 3, 5) == ["a\ufffd.", "a\ufffd.", "a\ufffd."]


def test_an_unusable_limit():
    with pytest.raises(ValueError, match="piece limit 0"):
        split_passage("a", 0)


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
