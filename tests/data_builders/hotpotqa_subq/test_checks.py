import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.data_builders.hotpotqa_subq import DropReason, Question
from tripletune.data_builders.hotpotqa_subq.checks import (
    BARE_NUMBERS,
    LABEL,
    MORE_TEXT,
    OTHER_KEYS,
    TEXT_VALUES,
    KeptDocuments,
    check_answer_kept,
    check_subquery,
    read_documents,
    read_subquery,
    read_triples,
)
from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm.replies import REPAIRED, UnusableReply

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


U, W, Q = DropReason.UNREADABLE_REPLY, DropReason.WRONG_DOCUMENTS, DropReason.NOT_ONE_QUESTION
REFUSED = [
    *((lambda text: read_documents(text, 2), text, U) for text in (
        "", "The first one.", '{"documents": [1, 2', '{"documents": [true]}', '{"documents": [1.5]}',
        '{"documents": [1], "answerable": "maybe"}', '{"helpful": [1]}')),
    *((lambda text: read_documents(text, 2), text, W) for text in ('{"documents": [3]}', '{"documents": [0]}', "1, 1")),
    *((lambda text: read_subquery(text, "Dune"), text, U) for text in (
        "", '{"question": ""}', '{"question": ["Who?"]}', '{"question": "Who wrote Du')),
    *((lambda text: read_subquery(text, "Dune"), text, Q) for text in (
        "Tell me who wrote Dune.", "Who wrote Dune? Tell me.", "Who? When?")),
    *((read_triples, text, U) for text in ("", '{"triples": [["a", "b", "c"], ["d"')),
    *((read_triples, text, DropReason.NO_TRIPLES) for text in (
        '{"facts": []}', '{"triples": []}', '{"triples": [["a", "b"], "c", null]}')),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text", "reason"), REFUSED)
def test_replies_that_are_rejected(read, text, reason):
    with pytest.raises(UnusableReply) as caught:
        read(text)
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
    triples, malformed = read_triples(text)
    assert triples == tuple(Triple(*t.split("|")) for t in expected)
    assert malformed == (len(expected) == 2 or "broken" in text)


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
    assert read_triples(json.dumps({"triples": rows}))[0] == tuple(Triple(*row) for row in rows)


@given(st.permutations(range(1, 6)), st.integers(1, 5))
def test_documents_survive_json(order, count):
    kept = tuple(order[:count])
    assert read_documents(json.dumps({"documents": kept}), 5).numbers == kept


@pytest.mark.parametrize(
    ("text", "expected", "name"),
    [
        ("Documents 1, 3", (1, 3), BARE_NUMBERS),
        ("documents: 3 and 1.", (3, 1), BARE_NUMBERS),
        ("[1] [3]", (1, 3), BARE_NUMBERS),
        ("[3], [1]", (3, 1), BARE_NUMBERS),
        ("The relevant documents are [1] and [2].", (1, 2), BARE_NUMBERS),
        ("Document 2 is needed.", (2,), BARE_NUMBERS),
        ("<think>all?</think>Document [2]", (2,), BARE_NUMBERS),
        ("{documents: [2, 1], answerable: true}", (2, 1), BARE_NUMBERS),
        ("{'documents': [2, 1], 'answerable': True}", (2, 1), REPAIRED),
        ('{"documents": ["[2]", "Document 1"]}', (2, 1), TEXT_VALUES),
        ('{"documents": "1, 3"}', (1, 3), TEXT_VALUES),
        ('{"documents": [1], "answerable": "Yes"}', (1,), TEXT_VALUES),
        ('{"kept": [3, 1]}', (3, 1), OTHER_KEYS),
    ],
)
def test_documents_that_can_be_read_in_one_way(text, expected, name):
    notes = Counter()
    assert read_documents(text, 3, notes) == KeptDocuments(expected)
    assert notes == {name: 1}


def test_a_reply_that_says_no_in_words_is_a_judgement():
    assert read_documents("Documents 1, 2, answerable: false", 3) == KeptDocuments((1, 2), False)
    assert not read_documents('{"documents": [1], "answerable": "false"}', 3).answerable


@pytest.mark.parametrize(
    "text",
    [
        "Documents 1 or 3",
        "Not document 1, document 3",
        "Documents 1-3",
        "2 documents",
        "Documents: 2",
        "The answer is 2.",
        "1. Document 3\n2. Document 1",
        "1. Document 3",
        "Documents 1,",
        'Documents: {"documents": [2, 1]',
        '{"documents": [2, 1]',
        '{"documents": 2}',
        '{"rejected": [2]}',
        '{"kept": [1], "docs": [2]}',
        '{"documents": [1], "answerable": "maybe"}',
        '{"documents": ["Dune"]}',
        "Documents 10000, 20000",
    ],
)
def test_documents_that_could_mean_two_things_are_refused(text):
    with pytest.raises(UnusableReply) as caught:
        read_documents(text, 3)
    assert caught.value.reason == DropReason.UNREADABLE_REPLY.value


def test_what_is_asked_for_is_no_recovery():
    notes = Counter()
    for text in ('{"documents": [2, "1"], "answerable": true}', "2, 1", "[2, 1]", '```\n{"documents": [2, 1]}\n```'):
        assert read_documents(text, 3, notes).numbers == (2, 1)
    for text in ('{"question": "Who?"}', '"Who?"', "Who\nis it?"):
        read_subquery(text, "", notes)
    assert not notes


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Sub-query: Who wrote Dune?", LABEL),
        ('{"question": "Sub-question 2: Who wrote Dune?"}', LABEL),
        ("1. Who wrote Dune?", LABEL),
        ('**Question:** "Who wrote Dune?"', LABEL),
        ("Here is the sub-query:\n\nWho wrote Dune?", LABEL),
        ("Who wrote Dune?\n\nThis asks for the author.", MORE_TEXT),
        ('{"sub_query": "Who wrote Dune?"}', OTHER_KEYS),
        ("{'question': 'Who wrote Dune?'}", REPAIRED),
    ],
)
def test_subqueries_that_can_be_read_in_one_way(text, name):
    notes = Counter()
    assert read_subquery(text, "Dune", notes) == "Who wrote Dune?"
    assert notes == {name: 1}


@pytest.mark.parametrize(
    "text",
    [
        "Who wrote Dune?\nWhere was he born?",
        "1. Who wrote Dune?\n2. Where was he born?",
        "The question is who wrote Dune.",
        '{"a": "Who wrote Dune?"}',
        'Who sang "Why?"',
        "Who wrote Dune\nThis asks for the author.",
    ],
)
def test_subqueries_that_are_not_one_are_refused(text):
    with pytest.raises(UnusableReply):
        read_subquery(text, "Dune", Counter())


@pytest.mark.parametrize(
    ("text"),
    [
        '["a", "b", "c"]\n["d", "e", "f"]',
        '["a", "b", "c"], ["d", "e", "f"]',
        '1. ["a", "b", "c"]\n2. ["d", "e", "f"]',
        '{"facts": [["a", "b", "c"], ["d", "e", "f"]]}',
        "{'triples': [['a', 'b', 'c'], ['d', 'e', 'f']]}",
    ],
)
def test_triples_that_can_be_read_in_one_way(text):
    assert read_triples(text) == ((Triple("a", "b", "c"), Triple("d", "e", "f")), 0)


@pytest.mark.parametrize(
    "text",
    [
        '["a", "b", "c"]\n["d", "e"',
        '["a", "b"]\n["c", "d"]',
        '{"triples": [], "facts": [["a", "b", "c"]]}',
        '{"triples": [["T-Bolan", "1991"]]}',
    ],
)
def test_triples_that_are_not_all_there_are_refused(text):
    with pytest.raises(UnusableReply):
        read_triples(text)
