"""Algorithm 1 with a teacher made up here, and the parts of the mix (ASQA, ARC-Easy), which have answers alone."""

import asyncio
import json
from collections import Counter
from dataclasses import replace

import pytest

from tests.cli import write_lines
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Annotation, DropReason, Hop, Question, UnlabelledQuestion
from tripletune.core.data.records import Action, Step, read_records
from tripletune.core.data.triples import Triple
from tripletune.data_builders.readers import get_reader
from tripletune.data_builders.self_rag import NO_ANSWER
from tripletune.data_builders.subq import gives_away_answer, label_question, step_of
from tripletune.data_builders.subq.annotations import PROMPT_FOLDER, PartTeacher, TripleLookup, open_teacher
from tripletune.data_builders.subq.build import build
from tripletune.data_builders.subq.checks import missing_facts
from tripletune.data_builders.subq.options import BuildOptions, Source
from tripletune.data_builders.subq.searches import FailedSearches, GoldSearches, PassageTriples, RealSearches
from tripletune.eval import load_task
from tripletune.rag.search.retrievers import Retrieved

PASSAGES = (
    Passage("Dune", "By Frank Herbert."),
    Passage("Other 0", "x"),
    Passage("Frank Herbert", "Of Tacoma."),
    *(Passage(f"Other {number}", f"o{number}") for number in (1, 2, 3)),
)
ANSWERS = ("Tacoma", "Tacoma, Washington")
QUESTION = Question("q1", "Where was the author of Dune born?", ANSWERS, PASSAGES, (0, 2), "bridge", "hotpotqa")
ASKED = ("Who wrote Dune?", "Where was Herbert born?")
KNOWN = "What is known about Dune?"


class FakeTeacher:
    name = "fake"

    def __init__(self, documents=(0, 2), subqueries=ASKED, empty=None):
        self.documents, self.asked, self.empty = documents, subqueries, empty

    async def annotate(self, question):
        facts = {number: [Triple(question.passages[number].title, "is", "here")] * 2 for number in self.documents}
        facts |= {self.empty: []}
        return [Annotation(number, asked, facts[number], asked) for number, asked in zip(self.documents, self.asked)]


def label(teacher=None, direct_answer=False, first_subquery="main_question", searcher=None, **gold):
    searcher = searcher or GoldSearches(**gold)
    return asyncio.run(label_question(QUESTION, teacher or FakeTeacher(), direct_answer, first_subquery, searcher))


def test_two_documents_give_three_planning_records_and_one_answer():
    records = label()
    assert [(record.id, record.label) for record in records] == [
        ("hotpotqa:q1:plan0", "[SUBQ] Where was the author of Dune born?"),
        ("hotpotqa:q1:plan1", "[SUBQ] Where was Herbert born?"),
        ("hotpotqa:q1:plan2", "[SUFFICIENT]"),
        ("hotpotqa:q1:answer", "Tacoma"),
    ]
    queries = [QUESTION.question, "Where was Herbert born?"]
    assert [[step.query for step in record.steps] for record in records] == [[], queries[:1], queries, queries]
    assert [step.triples for step in records[-1].steps] == [
        (Triple("Dune", "is", "here"),),
        (Triple("Frank Herbert", "is", "here"),),
    ]
    assert records[-1].steps[1].text == "Frank Herbert\nOf Tacoma."
    assert {record.question_id for record in records} == {"q1"}


def test_direct_answer_leaves_the_chain_out():
    planning, answering = label(direct_answer=True)
    assert (planning.label, planning.steps) == ("[NO_RETRIEVAL]", ())
    assert (answering.label, answering.action.value, answering.steps) == ("Tacoma", "[NO_RETRIEVAL]", ())


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (FakeTeacher([]), DropReason.NO_HELPFUL),
        (FakeTeacher(empty=2), DropReason.NO_TRIPLES),
        (FakeTeacher(subqueries=["Who wrote Dune?", "Is Tacoma his town?"]), DropReason.ANSWER_IN_SUBQUERY),
    ],
)
def test_what_cannot_be_labelled(teacher, reason):
    with pytest.raises(UnlabelledQuestion) as caught:
        label(teacher)
    assert caught.value.reason is reason


def test_gives_away_answer():
    for subquery, question, answer, expected in (
        ("When did Bob die?", "Who died first, Ann or Bob?", "Bob", False),
        ("Is there no lake?", "Are both lakes?", "no", False),
        ("What are the Normans?", "Who?", "Norman", False),
        ("Who lives in (New York), 1900?", "Which town?", "new york", True),
        ("内藤多仲是在长野出生的吗?", "东京塔的设计者出生在哪里？", "长野", True),
    ):
        assert gives_away_answer(subquery, replace(QUESTION, question=question, answers=(answer,))) is expected
    # An alias of two letters is found in many texts by chance.
    asked = replace(QUESTION, question="Which country?", answers=("Norway", "NO", "Norge"))
    assert [gives_away_answer(text, asked) for text in ("Is there no fjord?", "Where is Oslo, Norge?")] == [False, True]


@pytest.fixture
def triples_of(tmp_path):
    # "Other 3" is not covered: a passage without triples can't be a distractor.
    rows = [{"title": p.title, "text": p.text, "triples": [[p.title, "is", "there"]]} for p in PASSAGES[:-1]]
    return TripleLookup(write_lines(tmp_path / "triples.jsonl", rows), Counter())


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_distractors_join_every_step_and_are_never_kept_documents(triples_of, count):
    for gold, step in zip(("Dune", "Frank Herbert"), label(distractors=count, triples_of=triples_of)[-1].steps):
        subjects = [triple.subject for triple in step.triples]
        assert subjects.count(gold) == 1
        others = set(subjects) - {gold}
        assert len(others) == min(count, 3)
        assert others <= {"Other 0", "Other 1", "Other 2"}
        assert all(subject in step.text for subject in subjects)


ASQA = {
    "sample_id": "7",
    "ambiguous_question": "Who sang it?",
    "qa_pairs": [
        {"question": "Who sang it first?", "short_answers": ["Ann"], "wikipage": "Song", "context": "Ann sang it."},
        {"question": "Who sang it later?", "short_answers": ["Ben"], "context": "No context provided"},
    ],
    "annotations": [
        {"long_answer": "Ann sang it,\nlater Ben.", "knowledge": [{"content": "Ben sang it.", "wikipage": None}]},
        {"long_answer": "Ben did.", "knowledge": [{"content": "Unused.", "wikipage": "Other"}]},
    ],
}
ARC = {"id": "x1", "question": "Hot?", "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}, "answerKey": "2"}
SELF_RAG = [
    {"id": "arc_easy_0", "dataset_name": "arc_easy", "input": "", "output": "[No Retrieval]B[Utility:5]",
     "instruction": "Choose the best answer.## Input:\n\nHot?\nA: ice\nB: fire"},
    {"id": "asqa_0", "dataset_name": "asqa", "instruction": "Answer in long form.## Input:\n\nWho sang it?",
     "output": "[Retrieval]<paragraph>Song\nAnn sang it.\nTwice.</paragraph>[Relevant]Ann [sic] sang it."
     "[Fully supported][Continue to Use Evidence]Ben too."
     "[Retrieval]<paragraph>Tree\nNothing.</paragraph>[Irrelevant]End.[Utility:4]"},
    {"id": "asqa_1", "dataset_name": "asqa", "instruction": "Why?", "output": "[No Retrieval][Utility:1]"},
    {"id": "flan_1", "dataset_name": "flan_v2", "instruction": "Translate.", "output": "Ja."},
]  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """Reads rows of a part of the mix; gives the questions and what was counted."""

    def call(reader, *rows):
        issues = Counter()
        return list(get_reader(reader)(write_lines(tmp_path / "rows.jsonl", rows), issues)), issues

    return call


def test_asqa_takes_the_first_long_answer_and_the_knowledge_behind_it(read):
    (question,), _ = read("asqa", ASQA)
    assert (question.id, question.question, question.source) == ("7", "Who sang it?", "asqa")
    assert question.answers == ("Ann sang it, later Ben.", "Ben did.")
    assert [(p.title, p.text) for p in question.passages] == [("", "Ben sang it."), ("Song", "Ann sang it.")]
    assert question.supporting == (0, 1)


@pytest.mark.parametrize(("part", "task"), [("asqa", "asqa"), ("arc_easy", "arc")])
def test_a_part_has_the_words_of_its_evaluation(part, task):
    assert (PROMPT_FOLDER / f"{part}.md").read_text("utf-8").strip() == load_task(task).template


def test_official_asqa_file_is_read_by_its_train_split(tmp_path):
    row = {key: value for key, value in ASQA.items() if key != "sample_id"}
    path = tmp_path / "ASQA.json"
    for content, ids in (
        ({"dev": {"d": row}, "train": {"t1": row, "t2": row}}, ["t1", "t2"]),
        ({"dev": {"d": row}}, ["d"]),
        ([ASQA], ["7"]),
    ):
        path.write_text(json.dumps(content, indent=1))
        assert [question.id for question in get_reader("asqa")(str(path))] == ids
    path.write_text(json.dumps({"train": {"t1": "oops"}}))
    with pytest.raises(ValueError, match=r"ASQA\.json: train\.t1 must be an object"):
        list(get_reader("asqa")(str(path)))


def test_self_rag_rows_are_told_apart_and_stripped_of_reflection(read):
    (arc,), _ = read("arc_easy", *SELF_RAG)
    assert (arc.id, arc.question, arc.answers, arc.passages) == ("arc_easy_0", "Hot? A: ice B: fire", ("B",), ())
    assert arc.search == "Hot?"
    (asqa,), issues = read("asqa", *SELF_RAG)
    assert (asqa.question, asqa.answers) == ("Who sang it?", ("Ann [sic] sang it. Ben too. End.",))
    assert [(p.title, p.text) for p in asqa.passages] == [("Song", "Ann sang it.\nTwice.")]
    assert issues[NO_ANSWER] == 1


def test_triples_of_the_passages_make_one_step(tmp_path, read):
    rows = [
        {"title": "", "text": "Ben  sang it.", "triples": [["Ben", "sang", "it"]]},
        {"title": "Song", "text": "Ann sang it.", "triples": [["Ann", "sang", "it"], ["Ben", "sang", "it"]]},
    ]
    ((question,), _) = read("asqa", ASQA)
    teacher = PartTeacher("asqa", write_lines(tmp_path / "triples.jsonl", rows), Counter())
    (record,) = asyncio.run(teacher.records(question))
    facts = (Triple("Ben", "sang", "it"), Triple("Ann", "sang", "it"))
    assert record.steps == (Step("Who sang it?", facts, "Ben sang it.\nSong\nAnn sang it."),)
    assert record.action is Action.SUFFICIENT
    assert record.question.startswith("Who sang it? ")
    assert record.question.endswith("[Long Form]")


def test_parts_join_a_build_as_sources(tmp_path):
    asqa = write_lines(tmp_path / "asqa.jsonl", [ASQA])
    arc = write_lines(tmp_path / "arc.jsonl", [ARC | {"id": f"{number}"} for number in range(5)])
    sources = [Source.parse(f"asqa:{asqa}"), Source.parse(f"arc_easy:{arc}")]
    numbers = build(sources, BuildOptions(output=str(tmp_path / "out"), split_name="train", arc_easy_count=3))
    assert numbers["tasks"]["planning"]["records"] == 0
    assert [record.id for record in read_records(tmp_path / "out")] == [
        "asqa:7:answer",
        *(f"arc_easy:{number}:answer" for number in range(3)),
    ]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "asqa (asqa) gave 1 of the 3,897" in card
    assert "arc_easy (arc_easy) gave" not in card


WROTE, BORN = Triple("Dune", "by", "Frank Herbert"), Triple("he", "is", "born in Tacoma, Washington")


class Knows(FakeTeacher):
    """A teacher with these triples of its two documents."""

    def __init__(self, first, second, subqueries=ASKED):
        super().__init__(subqueries=subqueries)
        self.facts = (first, second)

    async def annotate(self, question):
        found = zip(self.documents, self.asked, self.facts)
        return [Annotation(number, asked, [fact]) for number, asked, fact in found]


NAMED = ("Who wrote Dune?", "Where was Frank Herbert born?")
EMPTY = Triple("x", "is", "y")
ANSWER, NAME = (DropReason.ANSWER_NOT_IN_FACTS, "Tacoma"), (DropReason.NAME_NOT_IN_FACTS, "Frank Herbert")


@pytest.mark.parametrize(
    ("teacher", "change", "expected"),
    [
        (Knows(WROTE, BORN, NAMED), {}, []),
        (Knows(WROTE, EMPTY, NAMED), {}, [ANSWER]),
        (Knows(EMPTY, BORN, NAMED), {}, [NAME]),
        (Knows(EMPTY, EMPTY, NAMED), {}, [NAME, ANSWER]),
        # The name stands only in the facts that the sub-query is to find.
        (Knows(EMPTY, Triple("Frank Herbert", "born in", "Tacoma"), NAMED), {}, [NAME]),
        (Knows(EMPTY, BORN), {}, []),
        (Knows(EMPTY, BORN, NAMED), {"question": "Where was Frank Herbert born?"}, []),
        # A name may be made of words that stand apart.
        (Knows(Triple("Dune", "by", "Herbert, Frank"), BORN, NAMED), {}, []),
        # A hop's answer, where no passage is called so; an evidence triple's subject.
        (Knows(EMPTY, BORN, ("Who?", "Where is Arrakis?")), {}, []),
        (Knows(EMPTY, BORN, ("Who?", "Where is Arrakis?")), {"hops": (Hop("?", "Arrakis", 0),)},
         [(DropReason.NAME_NOT_IN_FACTS, "Arrakis")]),
        (Knows(EMPTY, BORN, ("Who?", "Where is Arrakis?")), {"evidences": (Triple("Arrakis", "in", "Dune"),)},
         [(DropReason.NAME_NOT_IN_FACTS, "Arrakis")]),
        # A name inside text without spaces.
        (Knows(EMPTY, BORN, ("?", "赫伯特在哪里出生?")), {"hops": (Hop("?", "赫伯特", 0),)},
         [(DropReason.NAME_NOT_IN_FACTS, "赫伯特")]),
        (Knows(EMPTY, BORN, ("?", "赫伯特在哪里出生?")),
         {"hops": (Hop("?", "赫伯特", 0),), "question": "作家赫伯特的出生地在哪里?"}, []),
        (Knows(WROTE, EMPTY, NAMED), {"answers": ("yes",)}, []),
        (Knows(WROTE, EMPTY, NAMED), {"type": "bridge_comparison"}, []),
        (Knows(WROTE, EMPTY, NAMED), {"question": "Was it Tacoma or Oslo?"}, []),
        # A part of a word is no answer; an alias is.
        (Knows(WROTE, Triple("he", "likes", "Tacomas"), NAMED), {}, [ANSWER]),
        (Knows(WROTE, Triple("he", "from", "T-Town"), NAMED), {"answers": ("Tacoma", "T-Town")}, []),
    ],
)  # fmt: skip
def test_labels_that_nothing_before_them_supports(teacher, change, expected):
    question = replace(QUESTION, **change)
    records = asyncio.run(label_question(question, teacher))
    assert missing_facts(question, records) == expected


def test_a_generated_first_subquery_must_not_name_what_is_to_be_found():
    teacher = Knows(WROTE, BORN, ("Which book did Frank Herbert write?", "Where was he born?"))
    records = asyncio.run(label_question(QUESTION, teacher, first_subquery="generated"))
    assert missing_facts(QUESTION, records) == [NAME]


def test_after_a_failed_search_the_label_asks_again_and_gold_facts_follow(triples_of):
    seen = set()
    for seed in range(30):
        failing = FailedSearches(0.5, 1, lambda _: "train", seed, triples_of)
        records = label(failures=failing)
        assert records == label(failures=failing)
        plans, steps = records[:-1], records[-1].steps
        assert [plan.steps for plan in plans] == [steps[:number] for number in range(len(plans))]
        assert [plan.subquery for plan in plans] == [*(step.query for step in steps), ""]
        failed = [step.triples[0].subject.startswith("Other") for step in steps]
        assert [plan.id.endswith("-again") for plan in plans] == [False, *failed]
        assert sum(not one for one in failed) == 2
        wordings = [QUESTION.question, ASKED[0], KNOWN]  # the second search has one: it never fails
        assert [step.query for step in steps] == [*wordings[: len(steps) - 1], ASKED[1]]
        seen.add(tuple(failed))
    assert seen == {(False, False), (True, False, False), (True, True, False, False)}
    assert all(a == b for a, b in zip(label(), label(failures=FailedSearches(0.0, 1, str))))


@pytest.mark.parametrize(
    ("asked", "first", "expected"),
    [(ASKED, "generated", [ASKED[0], QUESTION.question, KNOWN, ASKED[1]]),
     (ASKED[:1] * 2, "main_question", [QUESTION.question, KNOWN, ASKED[0]])],
)  # fmt: skip
def test_after_failed_searches_no_label_repeats_an_earlier_one(asked, first, expected):
    class TwoFailures:
        def draw(self, *_):
            return [[PassageTriples(PASSAGES[1], [Triple("Other 0", "is", "there")])]] * 2

    records = label(FakeTeacher(subqueries=asked), failures=TwoFailures(), first_subquery=first)
    assert [step.query for step in records[-1].steps] == expected


def test_failed_searches_name_nothing_that_is_sought_and_may_come_from_other_questions():
    failing = FailedSearches(0.9, 1, lambda _: "train", 1)
    facts = [("Alan", "is", "here"), ("Alan", "lived in", "Tacoma"), ("Bea", "knew", "Frank Herbert")]

    class Others(FakeTeacher):
        async def annotate(self, question):
            return [Annotation(1, "?", [Triple(*fact)]) for fact in facts]

    asyncio.run(failing.collect(iter([QUESTION]), Others()))
    brought = {t for step in label(failures=failing)[-1].steps for t in step.triples if t.object != "there"}
    assert brought == {Triple("Dune", "is", "here"), Triple("Frank Herbert", "is", "here"), Triple(*facts[0])}


def test_a_triple_file_gives_two_wiki_the_facts_of_its_passages(tmp_path):
    evidences = (Triple("Dune", "author", "Frank Herbert"), Triple("Frank Herbert", "place of birth", "Tacoma"))
    rows = [{"title": "Dune", "text": "By Frank Herbert.", "triples": [["Dune", "by", "Frank Herbert"]]},
        {"title": "Frank Herbert", "text": "Of Tacoma.", "triples": [["he", "was", "bald"]]}]  # fmt: skip
    teacher = open_teacher("two_wiki", write_lines(tmp_path / "t.jsonl", rows), Counter())
    first, second = asyncio.run(teacher.annotate(replace(QUESTION, evidences=evidences)))
    assert first.triples == [Triple("Dune", "by", "Frank Herbert")]
    assert second.triples == [Triple("he", "was", "bald"), evidences[1]]
    assert (second.subquery, second.reworded) == (
        "Where was Frank Herbert born?", "What is the place of birth of Frank Herbert?"
    )  # fmt: skip


def test_each_step_of_a_real_search_shows_what_the_retriever_brings():
    dune, other, herbert = PASSAGES[:3]

    class FixedRetriever:
        """Brings the passages of a query, else another one."""

        def __init__(self, **found):
            self.found = {query.replace("_", " "): passages for query, passages in found.items()}

        async def retrieve(self, query, k):
            hits = [*self.found.get(query.strip("?"), ()), other]
            return [Retrieved(passage, 1.0) for passage in hits[:k]]

    def searched(share=0.0, **found):
        searches = RealSearches(FixedRetriever(**found), lambda one: [Triple(one.title, "is", "read")], 1, share, 0)
        records = label(searcher=searches)
        assert [record.label for record in records[-2:]] == ["[SUFFICIENT]", "Tacoma"]
        assert all(record.steps == records[-1].steps[: len(record.steps)] for record in records)
        shown = [(step.query, step.triples[0].subject) for step in records[-1].steps]
        return shown, [record.id.rpartition(":")[2] for record in records[:-2]], dict(*searches.outcomes.values())

    first, (who, where) = QUESTION.question, ASKED
    found = {"Where_was_the_author_of_Dune_born": [herbert], "Who_wrote_Dune": [dune]}
    assert searched(**found) == (
        [(first, herbert.title), (who, "Dune")],
        ["plan0", "plan1"],
        {"searches that found a helpful document": 2},
    )
    # No search finds a document: each wording is asked once, then the document is shown.
    shown, names, counts = searched()
    assert shown == [(first, other.title), (who, other.title), (KNOWN, "Dune"), (where, herbert.title)]
    assert names == ["plan0", "plan1-again", "plan2-again", "plan3"]
    assert counts == {"searches that failed": 2, "searches that show a document they did not find": 2}
    assert searched(0.99, **found)[0][0] == (first, other.title)
    assert step_of("q", []).triples == ()
