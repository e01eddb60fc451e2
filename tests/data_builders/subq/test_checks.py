import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.core.calls import UnusableReply
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import DropReason, Question
from tripletune.data_builders.subq.checks import (
    LABEL,
    OTHER_KEYS,
    TEXT_VALUES,
    check_answer_kept,
    read_documents,
    read_subquery,
    read_triples,
)
from tripletune.llm.reply_json import REPAIRED

PASSAGES = (Passage("Dune", "By Herbert."), Passage("Other", "Tacoma."), Passage("Herbert", "Born in Tacoma."))
QUESTION = Question("q", "Where was the author of Dune born?", ("Tacoma",), PASSAGES, (0, 2), "", "test")
DOCUMENTS = [
    # What is asked for, and the paper's form, need no note.
    ('{"documents": [2, 1], "answerable": true}', (2, 1), None),
    ('```json\n{"documents": ["2"]}\n```', (2,), None),
    ('{"documents": []}', (), None),
    ("2, 1", (2, 1), None),
    ("<think>1 or 2?</think>\n2.", (2,), None),
    ("[1] [3]", (1, 3), None),
    ("[2, 1]", (2, 1), None),
    ("{'documents': [2, 1], 'answerable': True}", (2, 1), REPAIRED),
    ('{"documents": ["[2]", "1"]}', (2, 1), None),
    ('{"documents": [1], "answerable": "Yes"}', (1,), TEXT_VALUES),
    ('{"kept": [3, 1]}', (3, 1), OTHER_KEYS),
]
SUBQUERIES = [
    ('{"question": "Who wrote\\n Dune?"}', None),
    ('"Who wrote Dune?"\n', None),
    ("<think>Dune? Herbert?</think>Who wrote Dune?", None),
    ("Sub-query: Who wrote Dune?", LABEL),
    ('{"question": "Sub-question 2: Who wrote Dune?"}', LABEL),
    ("1. Who wrote Dune?", LABEL),
    ('**Question:** "Who wrote Dune?"', LABEL),
    ("Here is the sub-query:\n\nWho wrote Dune?", LABEL),
    ('{"sub_query": "Who wrote Dune?"}', OTHER_KEYS),
    ("{'question': 'Who wrote Dune?'}", REPAIRED),
]


@pytest.mark.parametrize(("text", "expected", "note"), DOCUMENTS)
def test_documents_are_read(text, expected, note):
    notes = Counter()
    assert read_documents(text, 3, notes) == (list(expected), True)
    assert list(notes) == ([note] if note else [])


def test_a_reply_that_says_no_is_a_judgement():
    assert read_documents('No.\n{"documents": [1, 2], "answerable": "false"}', 3) == ([1, 2], False)


@pytest.mark.parametrize(("text", "note"), SUBQUERIES)
def test_subqueries_are_read(text, note):
    notes = Counter()
    assert read_subquery(text, "Dune", notes) == "Who wrote Dune?"
    assert list(notes) == ([note] if note else [])


def test_question_marks_of_a_title_are_not_counted():
    assert read_subquery('{"question": "Who sang \\"Why?\\" first?"}', "Why?") == 'Who sang "Why?" first?'


UNREADABLE = (DropReason.UNREADABLE_REPLY, "no_json", "bad_json", "no_triples")
U, W, Q = DropReason.UNREADABLE_REPLY, DropReason.WRONG_DOCUMENTS, DropReason.NOT_ONE_QUESTION
REFUSED = [
    *((lambda text: read_documents(text, 3), text, U) for text in (
        "", "The first one.", '{"documents": [1, 2', '{"documents": [true]}', '{"documents": [1.5]}',
        '{"documents": [1], "answerable": "maybe"}', '{"helpful": [1]}', '{"documents": 2}', '{"rejected": [2]}',
        '{"documents": ["Dune"]}',
        # What could mean two things.
        "Documents 1 or 3", "Not document 1, document 3", "Documents 1-3", "2 documents", "Documents: 2",
        "The answer is 2.", "1. Document 3\n2. Document 1", "1,", "[1, 3", "10000, 20000",
        'Documents: {"documents": [2, 1]', '{"kept": [1], "docs": [2]}')),
    *((lambda text: read_documents(text, 2), text, W) for text in ('{"documents": [3]}', '{"documents": [0]}', "1, 1")),
    *((lambda text: read_subquery(text, "Dune"), text, U) for text in (
        "", '{"question": ""}', '{"question": ["Who?"]}', '{"question": "Who wrote Du', '{"a": "Who wrote Dune?"}')),
    *((lambda text: read_subquery(text, "Dune"), text, Q) for text in (
        "Tell me who wrote Dune.", "Who wrote Dune? Tell me.", "Who? When?", "Who wrote Dune?\nWhere was he born?",
        "1. Who wrote Dune?\n2. Where was he born?", 'Who sang "Why?"', "Who wrote Dune?\nThis asks for the author.")),
    *((read_triples, text, U) for text in ("", '{"triples": [["a", "b", "c"], ["d"', '["a", "b", "c"]\n["d", "e"')),
    *((read_triples, text, DropReason.NO_TRIPLES) for text in (
        '{"facts": []}', '{"triples": []}', '{"triples": [["a", "b"], "c", null]}')),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text", "reason"), REFUSED)
def test_replies_that_are_rejected(read, text, reason):
    with pytest.raises(UnusableReply) as caught:
        read(text)
    assert caught.value.reason in (UNREADABLE if reason is U else [reason])
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
    asked = Question("q", "Are both?", ("no",), PASSAGES, (0, 2), "", "test")
    check_answer_kept(asked, (0, 1, 2), [0])
    with pytest.raises(UnusableReply, match="without document 1 or 3"):
        check_answer_kept(asked, (0, 1, 2), [1])


NAMES = ["documents", "question", "triples", "answerable", "x"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=12,
)


@given(st.text(max_size=60) | VALUES.map(json.dumps) | VALUES.map(lambda value: json.dumps({"triples": value})))
def test_any_text_is_read_or_turned_down_with_a_reason(text):
    reasons = {*DropReason, *UNREADABLE}
    for read in (lambda: read_documents(text, 3), lambda: read_subquery(text), lambda: read_triples(text)):
        try:
            read()
        except UnusableReply as error:
            assert error.reason in reasons and error.explanation  # noqa: PT017, PT018
