from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.data_builders.text_to_triples.cleaning import (
    CASE_CHANGED,
    ONLY_A_NAME,
    PREDICATE_CHANGED,
    REPEATED_TRIPLES,
    TEXT_CHANGED,
    TRIPLE_CHANGED,
    Cleaning,
    clean_row,
    clean_text,
    text_key,
    triples_key,
)
from tripletune.data_builders.text_to_triples.rows import MALFORMED_TRIPLES, PairRow
from tripletune.models.data.triples import Triple


def row(text, triples=(), title=""):
    return PairRow("file:1", "", title, text, tuple(Triple(*fields) for fields in triples))


def cleaned(given_row, **options):
    issues = Counter()
    clean = clean_row(given_row, Cleaning(**options), issues)
    return clean, {name: count for name, count in issues.items() if count}


def test_a_clean_row_is_left_alone_and_counts_nothing():
    given_row = row("Oslo is in Norway.", [("Oslo", "located in", "Norway")], "Oslo")
    clean, issues = cleaned(given_row)
    assert (clean.title, clean.text, clean.triples) == (given_row.title, given_row.text, given_row.triples)
    assert issues == {}


def test_every_change_is_counted():
    clean, issues = cleaned(
        row("Cafe\u0301  Oslo\x00\n", [("Cafe\u0301", "is", "x"), ("Café", "is", "x"), ("\u200b", "b", "c")])
    )
    assert clean.text == "Café Oslo"
    assert clean.triples == (Triple("Café", "is", "x"),)
    assert issues == {TEXT_CHANGED: 1, TRIPLE_CHANGED: 1, REPEATED_TRIPLES: 1, MALFORMED_TRIPLES: 1}


def test_a_row_that_loses_all_its_triples_is_no_row_without_facts():
    clean, _ = cleaned(row("Oslo.", [("\u200b", "b", "c")]))
    assert clean.malformed
    assert not cleaned(row("Oslo."))[0].malformed


def test_entities_get_the_spelling_of_the_text():
    text = '"Moanin\'" is a composition by Bobby Timmons, a pianist.'
    triples = [("Moanin'", "Composer", "Bobby timmons"), ("Bobby timmons", "Occupation", "Pianist"), ("X", "Y", "Pian")]
    clean, issues = cleaned(row(text, triples), entity_case="text")
    assert [tuple(triple.as_list()) for triple in clean.triples] == [
        ("Moanin'", "Composer", "Bobby Timmons"),
        ("Bobby Timmons", "Occupation", "pianist"),
        ("X", "Y", "Pian"),
    ]
    assert issues == {CASE_CHANGED: 2}


@pytest.mark.parametrize(
    ("name", "text", "spelt"),
    [
        ("Gha", "Ghana was abbreviated GHA.", "GHA"),
        ("Oslo", "OSLO, or Oslo, is a town.", "Oslo"),
        ("Oslo", "Osloer and oslos", "Oslo"),
    ],
)
def test_a_part_of_a_word_is_not_the_name(name, text, spelt):
    clean, _ = cleaned(row(text, [(name, "p", "o")]), entity_case="text")
    assert clean.triples[0].subject == spelt


def test_predicates_as_words():
    clean, issues = cleaned(row("text", [("a", "birthPlace", "b"), ("a", "born in", "b")]), predicates="words")
    assert [triple.predicate for triple in clean.triples] == ["birth place", "born in"]
    assert issues == {PREDICATE_CHANGED: 1}


def test_only_a_name_follows_the_papers_rule():
    clean, issues = cleaned(row("Oslo", title="Oslo"))
    assert clean.triples == (Triple("Oslo", "is", "Oslo"),)
    assert issues == {ONLY_A_NAME: 1}
    assert cleaned(row("Oslo", [("Oslo", "a", "b")], "Oslo"))[0].triples == (Triple("Oslo", "a", "b"),)


@settings(deadline=None)
@given(st.text())
def test_cleaning_twice_changes_nothing_and_can_be_written(text):
    once = clean_text(text + "\ud800")
    assert clean_text(once) == once
    assert once.encode("utf-8")


@settings(deadline=None)
@given(st.text(alphabet="aAbB ıİß.,"), st.text(alphabet="aAbBıİß", min_size=1, max_size=4))
def test_the_spelling_of_the_text_differs_in_case_alone(text, name):
    clean, _ = cleaned(row(f"x {text}", [(name, "p", "o")]), entity_case="text")
    assert clean.triples[0].subject.lower() == name.lower()


def test_keys():
    assert text_key("Ａ  b\nC") == text_key("a BC")
    assert text_key("a") != text_key("b")
    one, two = Triple("a", "b", "c"), Triple("d", "e", "f")
    assert triples_key((one, two)) == triples_key((two, one)) != triples_key((one,))
