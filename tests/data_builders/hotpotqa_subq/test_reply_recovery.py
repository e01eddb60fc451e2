from collections import Counter

import pytest

from tripletune.data_builders.hotpotqa_subq import reply_recovery as recovery
from tripletune.data_builders.hotpotqa_subq.questions import DropReason
from tripletune.data_builders.hotpotqa_subq.reply_checks import (
    KeptDocuments,
    read_documents,
    read_subquery,
    read_triples,
)
from tripletune.models.data.triples import Triple
from tripletune.models.llm.replies import UnusableReply


@pytest.mark.parametrize(
    ("text", "expected", "name"),
    [
        ("Documents 1, 3", (1, 3), recovery.BARE_NUMBERS),
        ("documents: 3 and 1.", (3, 1), recovery.BARE_NUMBERS),
        ("[1] [3]", (1, 3), recovery.BARE_NUMBERS),
        ("[3], [1]", (3, 1), recovery.BARE_NUMBERS),
        ("The relevant documents are [1] and [2].", (1, 2), recovery.BARE_NUMBERS),
        ("Document 2 is needed.", (2,), recovery.BARE_NUMBERS),
        ("<think>all?</think>Document [2]", (2,), recovery.BARE_NUMBERS),
        ("{documents: [2, 1], answerable: true}", (2, 1), recovery.BARE_NUMBERS),
        ("{'documents': [2, 1], 'answerable': True}", (2, 1), recovery.PYTHON_LITERAL),
        ('{"documents": ["[2]", "Document 1"]}', (2, 1), recovery.TEXT_VALUES),
        ('{"documents": "1, 3"}', (1, 3), recovery.TEXT_VALUES),
        ('{"documents": [1], "answerable": "Yes"}', (1,), recovery.TEXT_VALUES),
        ('{"kept": [3, 1]}', (3, 1), recovery.OTHER_KEYS),
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
    notes = Counter()
    with pytest.raises(UnusableReply) as caught:
        read_documents(text, 3, notes)
    assert caught.value.reason == DropReason.UNREADABLE_REPLY.value
    assert not notes


def test_what_is_asked_for_is_no_recovery():
    notes = Counter()
    for text in ('{"documents": [2, "1"], "answerable": true}', "2, 1", "[2, 1]", '```\n{"documents": [2, 1]}\n```'):
        assert read_documents(text, 3, notes).numbers == (2, 1)
    for text in ('{"question": "Who?"}', '"Who?"', "Who\nis it?"):
        read_subquery(text, "", notes)
    for text in ('{"triples": [["a", "b", "c"]]}', '[["a", "b", "c"]]', "(S> a| P> b| O> c)"):
        read_triples(text, notes)
    assert not notes


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Sub-query: Who wrote Dune?", recovery.LABEL),
        ('{"question": "Sub-question 2: Who wrote Dune?"}', recovery.LABEL),
        ("1. Who wrote Dune?", recovery.LABEL),
        ('**Question:** "Who wrote Dune?"', recovery.LABEL),
        ("Here is the sub-query:\n\nWho wrote Dune?", recovery.LABEL),
        ("Who wrote Dune?\n\nThis asks for the author.", recovery.MORE_TEXT),
        ('{"sub_query": "Who wrote Dune?"}', recovery.OTHER_KEYS),
        ("{'question': 'Who wrote Dune?'}", recovery.PYTHON_LITERAL),
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


def test_a_label_that_is_all_there_is_stays():
    assert recovery.without_label("Question?") == "Question?"
    assert recovery.without_label("Q: ") == "Q:"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('["a", "b", "c"]\n["d", "e", "f"]', recovery.LOOSE_TRIPLES),
        ('["a", "b", "c"], ["d", "e", "f"]', recovery.LOOSE_TRIPLES),
        ('1. ["a", "b", "c"]\n2. ["d", "e", "f"]', recovery.LOOSE_TRIPLES),
        ('{"facts": [["a", "b", "c"], ["d", "e", "f"]]}', recovery.OTHER_KEYS),
        ("{'triples': [['a', 'b', 'c'], ['d', 'e', 'f']]}", recovery.PYTHON_LITERAL),
    ],
)
def test_triples_that_can_be_read_in_one_way(text, name):
    notes = Counter()
    assert read_triples(text, notes).triples == (Triple("a", "b", "c"), Triple("d", "e", "f"))
    assert notes == {name: 1}


@pytest.mark.parametrize(
    "text",
    [
        '["a", "b", "c"]\n["d", "e"',
        '["a", "b", "c"] is the first',
        '["a", "b"]\n["c", "d"]',
        '{"triples": [], "facts": [["a", "b", "c"]]}',
        '{"triples": [["T-Bolan", "1991"]]}',
    ],
)
def test_triples_that_are_not_all_there_are_refused(text):
    with pytest.raises(UnusableReply):
        read_triples(text, Counter())
