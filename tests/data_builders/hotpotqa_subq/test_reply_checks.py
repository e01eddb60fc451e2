import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question
from tripletune.data_builders.hotpotqa_subq.reply_checks import (
    KeptDocuments,
    ReadTriples,
    check_answer_kept,
    check_subquery,
    read_documents,
    read_subquery,
    read_triples,
)
from tripletune.models.data.passages import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm.replies import UnusableReply

QUESTION = Question(
    id="q",
    question="Where was the author of Dune born?",
    answers=("Tacoma",),
    passages=(Passage("Dune", "By Herbert."), Passage("Other", "Tacoma."), Passage("Herbert", "Born in Tacoma.")),
    supporting=(0, 2),
    type="",
    source="test",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"documents": [2, 1], "answerable": true}', KeptDocuments((2, 1))),
        ('```json\n{"documents": ["2"]}\n```', KeptDocuments((2,))),
        ('Both help.\n{"documents": [1, 2], "answerable": false}', KeptDocuments((1, 2), False)),
        ('{"documents": []}', KeptDocuments(())),
        ("2, 1", KeptDocuments((2, 1))),
        ("<think>1 or 2?</think>\n2.", KeptDocuments((2,))),
        ("[1]", KeptDocuments((1,))),
    ],
)
def test_documents_are_read(text, expected):
    assert read_documents(text, 2) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", DropReason.UNREADABLE_REPLY),
        ("The first one.", DropReason.UNREADABLE_REPLY),
        ('{"documents": [1, 2', DropReason.UNREADABLE_REPLY),
        ('{"documents": [true]}', DropReason.UNREADABLE_REPLY),
        ('{"documents": [1.5]}', DropReason.UNREADABLE_REPLY),
        ('{"documents": [1], "answerable": "maybe"}', DropReason.UNREADABLE_REPLY),
        ('{"helpful": [1]}', DropReason.UNREADABLE_REPLY),
        ('{"documents": [3]}', DropReason.WRONG_DOCUMENTS),
        ('{"documents": [0]}', DropReason.WRONG_DOCUMENTS),
        ("1, 1", DropReason.WRONG_DOCUMENTS),
    ],
)
def test_documents_that_are_turned_down(text, reason):
    with pytest.raises(UnusableReply) as caught:
        read_documents(text, 2)
    assert caught.value.reason == reason.value
    assert caught.value.explanation.endswith(".")


def test_a_supporting_document_with_the_answer_must_be_kept():
    check_answer_kept(QUESTION, (0, 2), [2])
    check_answer_kept(QUESTION, (0, 1, 2), [2, 0])
    # Document 1 names the answer by chance: it is none of the supporting ones.
    for shown, kept, number in (((0, 2), [0], "2"), ((0, 1, 2), [0, 1], "3")):
        with pytest.raises(UnusableReply, match=f"without document {number};") as caught:
            check_answer_kept(QUESTION, shown, kept)
        assert caught.value.reason == DropReason.ANSWER_NOT_KEPT.value


def test_where_no_document_names_the_answer_any_supporting_one_will_do():
    asked = Question("q", "Are both?", ("no",), QUESTION.passages, (0, 2), "", "test")
    check_answer_kept(asked, (0, 1, 2), [0])
    with pytest.raises(UnusableReply, match="without document 1 or 3"):
        check_answer_kept(asked, (0, 1, 2), [1])


@pytest.mark.parametrize(
    ("text", "title", "expected"),
    [
        ('{"question": "Who wrote\\n Dune?"}', "Dune", "Who wrote Dune?"),
        ('"Who wrote Dune?"\n', "Dune", "Who wrote Dune?"),
        ("<think>Dune? Herbert?</think>Who wrote Dune?", "Dune", "Who wrote Dune?"),
        ("{Dune}? Herbert?</think>Who wrote Dune?", "Dune", "Who wrote Dune?"),
        ('{"question": "Who sang \\"Why?\\" first?"}', "Why?", 'Who sang "Why?" first?'),
        ('{"question": "Who sang Why?"}', "Why?", "Who sang Why?"),
    ],
)
def test_subqueries_are_read(text, title, expected):
    assert read_subquery(text, title) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", DropReason.UNREADABLE_REPLY),
        ('{"question": ""}', DropReason.UNREADABLE_REPLY),
        ('{"question": ["Who?"]}', DropReason.UNREADABLE_REPLY),
        ('{"question": "Who wrote Du', DropReason.UNREADABLE_REPLY),
        ("Tell me who wrote Dune.", DropReason.NOT_ONE_QUESTION),
        ("Who wrote Dune? Tell me.", DropReason.NOT_ONE_QUESTION),
        ("Who? When?", DropReason.NOT_ONE_QUESTION),
    ],
)
def test_subqueries_that_are_turned_down(text, reason):
    with pytest.raises(UnusableReply) as caught:
        read_subquery(text, "Dune")
    assert caught.value.reason == reason.value


@pytest.mark.parametrize(
    ("subquery", "earlier", "reason"),
    [
        ("Where was author of DUNE born?", [], DropReason.COPIED_QUESTION),
        ("Who wrote Dune?", ["Who wrote the Dune ?"], DropReason.COPIED_QUESTION),
        ("Is Tacoma his town?", [], DropReason.ANSWER_IN_SUBQUERY),
    ],
)
def test_a_subquery_must_be_new_and_without_the_answer(subquery, earlier, reason):
    with pytest.raises(UnusableReply) as caught:
        check_subquery(subquery, QUESTION, earlier)
    assert caught.value.reason == reason.value


def test_a_subquery_is_refused_only_where_it_repeats_an_earlier_one():
    check_subquery("Where was Herbert born?", QUESTION, ["Who wrote Dune?"])
    with pytest.raises(UnusableReply):
        check_subquery("Where was Herbert born?", QUESTION, ["Who wrote Dune?", "where was Herbert born"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"triples": [["a", "b", "c"], ["a", "b", ""], ["a", "year", 1965]]}', ("a|b|c", "a|year|1965")),
        ('[["a", "b", "c"]]', ("a|b|c",)),
        ('{"triples": [{"subject": "a", "predicate": "b", "object": "c"}]}', ("a|b|c",)),
        ("(S> a| P> b| O> c), (S> broken| P> x", ("a|b|c",)),
    ],
)
def test_triples_are_read_and_malformed_ones_counted(text, expected):
    found = read_triples(text)
    assert found == ReadTriples(tuple(Triple(*t.split("|")) for t in expected), found.malformed)
    assert found.malformed == (len(expected) == 2 or "broken" in text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", DropReason.UNREADABLE_REPLY),
        ('{"triples": [["a", "b", "c"], ["d"', DropReason.UNREADABLE_REPLY),
        ('{"facts": []}', DropReason.UNREADABLE_REPLY),
        ('{"triples": []}', DropReason.NO_TRIPLES),
        ('{"triples": [["a", "b"], "c", null]}', DropReason.NO_TRIPLES),
    ],
)
def test_triples_that_are_turned_down(text, reason):
    with pytest.raises(UnusableReply) as caught:
        read_triples(text)
    assert caught.value.reason == reason.value


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["documents", "question", "triples", "answerable", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.text(max_size=60) | VALUES.map(json.dumps) | VALUES.map(lambda value: json.dumps({"triples": value})))
def test_any_text_is_read_or_turned_down_with_a_reason(text):
    reasons = {reason.value for reason in DropReason}
    for read in (lambda: read_documents(text, 3), lambda: read_subquery(text), lambda: read_triples(text)):
        found = None
        try:
            read()
        except UnusableReply as error:
            found = error
        assert found is None or (found.reason in reasons and found.explanation)


NAMES = st.text(min_size=1, max_size=12).filter(str.strip)


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=1, max_size=5))
def test_triples_survive_json(rows):
    assert read_triples(json.dumps({"triples": rows})).triples == tuple(Triple(*row) for row in rows)


@given(st.permutations(range(1, 6)), st.integers(1, 5))
def test_documents_survive_json(order, count):
    kept = tuple(order[:count])
    assert read_documents(json.dumps({"documents": kept}), 5).numbers == kept
