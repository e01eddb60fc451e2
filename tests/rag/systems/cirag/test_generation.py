import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import Client
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.rag import Trace
from tripletune.rag.chat_generator import read_answer
from tripletune.rag.search.retrievers import Fact
from tripletune.rag.systems.cirag import PROMPT_NAMES, CiragOptions, answer_text, context_of, generate

ADA, KELM = Passage("Ada", "Ada lived. She died in Kelm."), Passage("Kelm", "Kelm is a town.")
FACTS = [
    Fact(Triple("Ada", "died in", "Kelm"), ADA, "She died in Kelm."),
    Fact(Triple("Kelm", "is", "town"), KELM, "Kelm is a town."),
    Fact(Triple("Ada", "place of death", "Kelm"), ADA, "She died in Kelm."),
]


def pools(facts):
    return {(fact.triple, fact.passage.id): fact for fact in facts}


def test_a_triple_that_is_kept_again_brings_its_other_passage():
    pool = pools([FACTS[0], Fact(FACTS[0].triple, KELM, "Ada died here.")])
    assert context_of(pool, "triples") == ['["Ada", "died in", "Kelm"]']
    assert context_of(pool, "sentences") == ["[Ada] She died in Kelm.", "[Kelm] Ada died here."]
    assert context_of(pool, "passages") == [ADA.content, KELM.content]


def cascade(facts=FACTS, granularities=("triples", "sentences", "passages"), **replies):
    client = Client(answer=lambda asked: replies[asked.role.rsplit(".", 1)[1]])
    trace, options = Trace("Q?"), CiragOptions(granularities=granularities)
    llm = QuestionClient(client, trace, prompts=load_prompts(PROMPT_NAMES))
    trace.answer = asyncio.run(generate("Q?", pools(facts), llm, options, trace))
    return (trace.answer, trace.details["granularity"]), client, trace


REFUSE = "Thought: not there.\nAnswer: Unanswerable."


def test_the_first_sufficient_level_answers():
    found, client, _ = cascade(triples="Thought: easy.\nAnswer: Kelm")
    assert (found, len(client.asked)) == (("Kelm", "triples"), 1)
    found, client, _ = cascade(triples=REFUSE, sentences="Answer: Kelm")
    assert (found, len(client.asked)) == (("Kelm", "sentences"), 2)
    unsure = "Answer: Unanswerable, the triples name no town"
    assert cascade(triples=unsure, sentences=REFUSE, passages="Answer: Kelm")[0] == ("Kelm", "passages")
    other = "Answer: It cannot be determined from the given triples."
    found, _, trace = cascade(triples=other, sentences="Answer: Kelm")
    assert (found, trace.tallies["answer.refused_in_other_words"]) == (("Kelm", "sentences"), 1)


def test_nothing_sufficient_gives_the_passage_answer_and_says_default():
    found, client, _ = cascade(triples=REFUSE, sentences=REFUSE, passages=REFUSE)
    assert (found, len(client.asked)) == (("Unanswerable.", "default"), 3)
    assert cascade(granularities=("sentences",), sentences="")[0] == ("", "default")


def test_each_level_shows_its_own_evidence_once():
    _, client, _ = cascade(triples=REFUSE, sentences=REFUSE, passages=REFUSE)
    assert client.roles == ["cirag.answer.triples", "cirag.answer.sentences", "cirag.answer.passages"]
    assert [asked.text for asked in client.asked] == [
        'Triples:\n["Ada", "died in", "Kelm"]\n["Kelm", "is", "town"]\n["Ada", "place of death", "Kelm"]'
        "\n\nQuestion: Q?",
        "Sentences:\n[Ada] She died in Kelm.\n[Kelm] Kelm is a town.\n\nQuestion: Q?",
        "Passages:\nAda\nAda lived. She died in Kelm.\n\nKelm\nKelm is a town.\n\nQuestion: Q?",
    ]
    assert answer_text("Q\nQuestion: x?", "triples", []).count("\n") == 3


def test_levels_without_evidence_are_passed_over_but_for_the_last():
    found, client, trace = cascade(facts=[], passages=REFUSE)
    assert client.roles == ["cirag.answer.passages"]
    assert "(nothing was found)" in client.asked[0].text
    assert (found[1], trace.tallies["granularities_without_context"]) == ("default", 2)


@pytest.mark.parametrize(
    ("text", "answer", "faults"),
    [
        ("Thought: a.\nAnswer: Kelm", "Kelm", ()),
        ("Thought: the answer: is near. Answer: **Kelm**", "Kelm", ()),
        ("Answer: Kelm\nBecause I said so.", "Kelm", ("text_after_answer",)),
        ("Answer: Unanswerable. The triples do not say it.", "Unanswerable", ("text_after_answer",)),
        ("Answer: **unanswerable** from this\nSorry.", "Unanswerable", ("text_after_answer",)),
        ("Unanswerable", "Unanswerable", ("missing_answer",)),
        ("Thought: Unanswerable", "Unanswerable", ("missing_answer",)),
        ("Long thought.\nKelm", "Kelm", ("missing_answer",)),
        ("<think>Answer: no</think>Answer: Kelm", "Kelm", ()),
        ("Thought: a.\nAnswer: Sarn\n\nQuestion: capital of France?\nThought: b.\nAnswer: Paris", "Sarn", ("runs_on",)),
        ("Answer: Sarn\nTriples:\n[]\nQuestion: x?\nAnswer: Paris", "Sarn", ("runs_on",)),
        ("Thought: I look for the answer: a river.\nTriples: a | b | c\nAnswer: Sarn", "Sarn", ()),
        ("Answer:", "", ("empty_answer",)),
        ("", "", ("missing_answer", "empty_answer")),
    ],
)
def test_answers_are_read_strictly_and_faults_named(text, answer, faults):
    assert read_answer(text) == (answer, faults)
    # A thought that was cut off is no answer, but a long answer is all of its paragraphs.
    assert read_answer("A.\n\nB.\n\nC", True, True)[0] == "A.\n\nB.\n\nC"
    assert read_answer("Thought: first of all", cut_off=True) == ("", ("missing_answer", "empty_answer"))


@given(st.text(max_size=80), st.booleans())
def test_an_answer_is_one_line_or_a_fault(text, cut_off):
    answer, faults = read_answer(text, cut_off)
    assert len(answer.splitlines()) <= 1
    assert answer or "empty_answer" in faults
