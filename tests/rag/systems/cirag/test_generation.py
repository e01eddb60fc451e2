from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm import Completion
from tripletune.rag import Trace
from tripletune.rag.systems import QuestionClient, load_prompts
from tripletune.rag.systems.cirag import PROMPT_NAMES, CiragOptions, Pools, answer_text, generate, read_answer
from tripletune.rag.systems.cirag.extraction import Fact

ADA, KELM = Passage("Ada", "Ada lived. She died in Kelm."), Passage("Kelm", "Kelm is a town.")
FACTS = [
    Fact(Triple("Ada", "died in", "Kelm"), ADA, "She died in Kelm."),
    Fact(Triple("Kelm", "is", "town"), KELM, "Kelm is a town."),
    Fact(Triple("Ada", "place of death", "Kelm"), ADA, "She died in Kelm."),
]


def test_a_triple_that_is_kept_again_brings_its_other_passage():
    pools = Pools()
    pools.add([Fact(Triple("Ada", "died in", "Kelm"), ADA, "She died in Kelm.")])
    pools.add([Fact(Triple("Ada", "died in", "Kelm"), KELM, "Ada died here.")])
    assert pools.context("triples") == ['["Ada", "died in", "Kelm"]']
    assert pools.context("sentences") == ["[Ada] She died in Kelm.", "[Kelm] Ada died here."]
    assert pools.context("passages") == [ADA.content, KELM.content]


class Levels:
    """Replies by level; remembers what it was shown."""

    model = "levels"

    def __init__(self, **replies):
        self.replies, self.asked = replies, []

    async def chat(self, messages, *, role, sampling=None, question_id=""):
        self.asked.append((role, messages[-1]["content"]))
        return Completion(self.replies[role.rsplit(".", 1)[1]], 1, 1)

    async def close(self):
        pass


def cascade(facts=FACTS, granularities=("triples", "sentences", "passages"), **replies):
    client, pools = Levels(**replies), Pools()
    pools.add(facts)
    trace, options = Trace("Q?"), CiragOptions(granularities=granularities)
    asyncio.run(generate("Q?", pools, QuestionClient(client, trace), load_prompts(PROMPT_NAMES), options, trace))
    return trace, client.asked


REFUSE = "Thought: not there.\nAnswer: Unanswerable."


def test_the_first_sufficient_level_answers():
    found, asked = cascade(triples="Thought: easy.\nAnswer: Kelm")
    assert (found.answer, found.details["granularity"], len(asked)) == ("Kelm", "triples", 1)
    found, asked = cascade(triples=REFUSE, sentences="Answer: Kelm")
    assert (found.answer, found.details["granularity"], len(asked)) == ("Kelm", "sentences", 2)
    found, _ = cascade(
        triples="Answer: Unanswerable, the triples name no town", sentences=REFUSE, passages="Answer: Kelm"
    )
    assert (found.answer, found.details["granularity"]) == ("Kelm", "passages")


def test_nothing_sufficient_gives_the_passage_answer_and_says_default():
    found, asked = cascade(triples=REFUSE, sentences=REFUSE, passages=REFUSE)
    assert (found.answer, found.details["granularity"], len(asked)) == ("Unanswerable.", "default", 3)
    found, _ = cascade(granularities=("sentences",), sentences="")
    assert (found.answer, found.details["granularity"]) == ("", "default")


def test_each_level_shows_its_own_evidence_once():
    _, asked = cascade(triples=REFUSE, sentences=REFUSE, passages=REFUSE)
    roles, shown = zip(*asked)
    assert roles == ("cirag.answer.triples", "cirag.answer.sentences", "cirag.answer.passages")
    assert shown[0] == (
        'Triples:\n["Ada", "died in", "Kelm"]\n["Kelm", "is", "town"]\n["Ada", "place of death", "Kelm"]'
        "\n\nQuestion: Q?"
    )
    assert shown[1] == "Sentences:\n[Ada] She died in Kelm.\n[Kelm] Kelm is a town.\n\nQuestion: Q?"
    assert shown[2] == "Passages:\nAda\nAda lived. She died in Kelm.\n\nKelm\nKelm is a town.\n\nQuestion: Q?"


def test_levels_without_evidence_are_passed_over_but_for_the_last():
    found, asked = cascade(facts=[], passages=REFUSE)
    assert [role for role, _ in asked] == ["cirag.answer.passages"]
    assert "(nothing was found)" in asked[0][1]
    assert (found.details["granularity"], found.tallies["granularities_without_context"]) == ("default", 2)


@pytest.mark.parametrize("levels", [("triples", "passages"), ("sentences",), ("sentences", "passages")])
def test_cascades_of_one_and_two_levels(levels):
    _, asked = cascade(granularities=levels, **dict.fromkeys(levels, REFUSE))
    assert [role for role, _ in asked] == [f"cirag.answer.{level}" for level in levels]


@pytest.mark.parametrize(
    ("text", "answer", "faults"),
    [
        ("Thought: a.\nAnswer: Kelm", "Kelm", ()),
        ("Thought: the answer: is near. Answer: **Kelm**", "Kelm", ()),
        ("**Answer:** Kelm", "Kelm", ()),
        ("Answer: Kelm\nBecause I said so.", "Kelm", ("text_after_answer",)),
        ("Answer: Unanswerable. The triples do not say it.", "Unanswerable", ("text_after_answer",)),
        ("Answer: **unanswerable** from this\nSorry.", "Unanswerable", ("text_after_answer",)),
        ("Unanswerable", "Unanswerable", ("missing_answer",)),
        ("Thought: Unanswerable", "Unanswerable", ("missing_answer",)),
        ("Long thought.\nKelm", "Kelm", ("missing_answer",)),
        ("<think>Answer: no</think>Answer: Kelm", "Kelm", ()),
        ("Answer:", "", ("empty_answer",)),
        ("", "", ("missing_answer", "empty_answer")),
    ],
)
def test_answers_are_read_strictly_and_faults_named(text, answer, faults):
    assert read_answer(text) == (answer, faults)


def test_a_cut_off_thought_is_no_answer():
    assert read_answer("Thought: first of all", cut_off=True) == ("", ("missing_answer", "empty_answer"))


@settings(deadline=None)
@given(st.text(max_size=80), st.booleans())
def test_an_answer_is_one_line_or_a_fault(text, cut_off):
    answer, faults = read_answer(text, cut_off)
    assert len(answer.splitlines()) <= 1
    assert answer or "empty_answer" in faults


def test_a_question_stands_on_one_line():
    assert answer_text("Q\nQuestion: x?", "triples", []).count("\n") == 3
