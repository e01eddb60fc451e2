import asyncio
from collections import Counter

import pytest

from tests.cli import write_lines
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import DropReason, Hop, Question, UnlabelledQuestion
from tripletune.core.data.triples import Triple
from tripletune.data_builders.subq.annotations import (
    MALFORMED_TRIPLES,
    DecomposingTeacher,
    TripleLookup,
    TwoWikiTeacher,
    hop_question,
    open_teacher,
)
from tripletune.data_builders.subq.recorded import RecordedTeacher
from tripletune.data_builders.subq.wordings import joined_question, relation_question, tidy_question


def question(*passages, text="Where?", hops=(), evidences=()):
    """A question; a passage is a title, or a title and a text."""
    found = tuple(Passage(one, f"About {one}.") if isinstance(one, str) else Passage(*one) for one in passages)
    facts = tuple(Triple(*evidence) for evidence in evidences)
    return Question("q1", text, ("Tacoma",), found, tuple(range(len(found))), "", "test", hops, facts)


RECORDED = {
    "_id": "q1",
    "helpful": ["B", "A"],
    "subqueries": [{"title": "A", "question": "Of A?"}, {"title": "B", "question": "Of B?"}],
    "triples": {"A": [["a", "is", "x"]], "B": [["b", "is", "y"]]},
    "closed_book": "Tacoma",
    "note": "",
}


def replies(teacher, asked):
    return [list(column) for column in zip(*(one[:3] for one in asyncio.run(teacher.annotate(asked))))]


def reason(teacher, asked):
    with pytest.raises(UnlabelledQuestion) as caught:
        replies(teacher, asked)
    return caught.value.reason


def test_recorded_replies_keep_the_reasoning_order(tmp_path):
    teacher = RecordedTeacher(write_lines(tmp_path / "t.jsonl", [RECORDED | {"_id": "q0"}, RECORDED]))
    assert replies(teacher, question("A", "B")) == [
        [1, 0],
        ["Of B?", "Of A?"],
        [[Triple("b", "is", "y")], [Triple("a", "is", "x")]],
    ]


def test_recorded_direct_comes_from_its_own_key_alone(tmp_path):
    asked = question("A", "B")
    assert not RecordedTeacher(write_lines(tmp_path / "a.jsonl", [RECORDED])).answers_directly(asked)
    assert RecordedTeacher(write_lines(tmp_path / "b.jsonl", [{"_id": "q1", "direct": True}])).answers_directly(asked)


def test_recorded_gaps_have_reasons(tmp_path):
    for change, asked, expected in (
        ({"_id": "other"}, question("A", "B"), DropReason.NO_ANNOTATION),
        ({}, question("A"), DropReason.HELPFUL_NOT_IN_CONTEXT),
        ({"subqueries": RECORDED["subqueries"][:1]}, question("A", "B"), DropReason.NO_SUBQUERY),
    ):
        teacher = RecordedTeacher(write_lines(tmp_path / "a.jsonl", [RECORDED | change]))
        assert reason(teacher, asked) is expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([RECORDED, RECORDED], ":2: an earlier line annotates the same question"),
        ([RECORDED, {"helpful": []}], ":2: the row has no '_id' or 'id'"),
        ([RECORDED | {"subqueries": ["Of A?"]}], r":1: subqueries\[0\] must be an object"),
        ([RECORDED | {"triples": {"A": [["a", "is"]]}}], ":1: a triple must be"),
    ],
)
def test_recorded_file_is_checked_when_it_is_opened(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        RecordedTeacher(write_lines(tmp_path / "a.jsonl", rows))


HOPS = (Hop("Dune >> author", "Frank Herbert", 1), Hop("where was #1 born ?", "Tacoma", 0))


def test_tenth_reference_is_not_the_first_one():
    hops = (*(Hop(f"q{n}", f"answer {n}", 0) for n in range(1, 11)), Hop("about #10 and #1", "", 0))
    assert hop_question(question("A", hops=hops), 11) == "About answer 10 and answer 1?"


def test_reference_that_is_not_to_an_earlier_hop():
    for reference in ("#2", "#3", "#0"):
        asked = question("A", hops=(HOPS[0], Hop(f"where is {reference}", "x", 0)))
        with pytest.raises(UnlabelledQuestion) as caught:
            hop_question(asked, 2)
        assert caught.value.reason is DropReason.BROKEN_REFERENCE


def test_musique_documents_follow_the_hops_and_repeat_none(tmp_path):
    rows = [
        {"title": "Dune", "text": "About Dune.", "triples": [["Dune", "author", "Frank Herbert"]]},
        {"title": "Frank Herbert", "text": "About Frank Herbert.", "triples": []},
    ]
    path = write_lines(tmp_path / "t.jsonl", rows)
    asked = question("Frank Herbert", "Dune", hops=(*HOPS, Hop("who is #2", "x", 1)))
    documents, subqueries, triples = replies(DecomposingTeacher(path, Counter()), asked)
    assert documents == [1, 0]
    assert subqueries == ["Who is the author of Dune?", "Where was Frank Herbert born?"]
    assert triples == [[Triple("Dune", "author", "Frank Herbert")], []]


def test_triple_file_matches_content_and_counts_malformed_rows(tmp_path):
    issues: Counter[str] = Counter()
    rows = [
        {"title": "Alone", "text": "old text", "triples": [["a", "b", "c"], ["a", "b"], ["a", " ", "c"], "abc"]},
        {"title": "Twice", "text": "first", "triples": [["first", "is", "it"]]},
        {"title": "Twice", "text": "second\u00a0text ", "triples": [["second", "is", "it"]]},
    ]
    path = write_lines(tmp_path / "t.jsonl", rows)
    triples_of = TripleLookup(path, issues)
    assert issues[MALFORMED_TRIPLES] == 3
    assert triples_of(Passage("Twice", "second text")) == [Triple("second", "is", "it")]
    assert triples_of(Passage("Twice", "third")) == []
    assert triples_of(Passage("Alone", "old text")) == [Triple("a", "b", "c")]


def test_two_wiki_asks_by_names_the_planner_has_seen():
    asked = question(
        "Harold Young (director)",
        "Steel (1979 film)",
        text="Where did the director of film Steel (1979 Film) die?",
        evidences=[("Steel", "director", "Harold Young"), ("Harold Young", "place of death", "Rome")],
    )
    assert replies(TwoWikiTeacher(None, Counter()), asked) == [
        [1, 0],
        ["Who directed Steel (1979 film)?", "Where did Harold Young die?"],
        [[asked.evidences[0]], [asked.evidences[1]]],
    ]


def test_two_wiki_joins_what_is_asked_of_one_document():
    asked = question(
        "Ann",
        "Bob",
        text="Who lived longer, Ann or Bob?",
        evidences=[(n, r, "1900") for n in ("Ann", "Bob") for r in ("date of birth", "date of death")],
    )
    documents, subqueries, triples = replies(TwoWikiTeacher(None, Counter()), asked)
    assert documents == [0, 1]
    assert subqueries[1] == "When was Bob born and when did Bob die?"
    assert [len(found) for found in triples] == [2, 2]


def test_open_teacher_looks_into_the_file(tmp_path):
    recorded = write_lines(tmp_path / "r.jsonl", [RECORDED])
    triples = write_lines(tmp_path / "t.jsonl", [{"title": "A", "text": "x", "triples": []}])
    assert isinstance(open_teacher("hotpotqa", recorded, Counter()), RecordedTeacher)
    assert isinstance(open_teacher("musique", recorded, Counter()), RecordedTeacher)
    assert isinstance(open_teacher("musique", triples, Counter()), DecomposingTeacher)
    assert isinstance(open_teacher("two_wiki", None, Counter()), TwoWikiTeacher)
    with pytest.raises(ValueError, match="'hotpotqa' needs recorded teacher replies"):
        open_teacher("hotpotqa", triples, Counter())


def test_questions_of_relations_and_typed_ones():
    for relation, expected in (
        ("director", "Who directed {x}?"),
        ("place_of_birth", "Where was {x} born?"),
        ("Chief engineer", "What is the chief engineer of {x}?"),
        ("adapted from", "What is “adapted from” for {x}?"),
    ):
        # The subject holds braces: it must be put in as it is.
        assert relation_question("{x}", relation) == expected
    joined = joined_question(["When was A born?", "When did A die?", "When was A born?"])
    assert joined == "When was A born and when did A die?"
    assert tidy_question("what was Italy 's  currency ?") == "What was Italy's currency?"
