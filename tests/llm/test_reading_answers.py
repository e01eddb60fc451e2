"""The table of forms, continued: answers."""

import pytest

from tripletune.llm.reading.answers import marked_answer, phrased_answer, unlabelled_answer
from tripletune.rag.chat_generator import bare_answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"So it is \boxed{Green Bay}.", "Green Bay"),
        (r"\boxed{\text{Green Bay}}", r"\text{Green Bay}"),
        ("<answer>Green Bay</answer>", "Green Bay"),
        ("Green Bay", None),
    ],
)
def test_a_marked_answer(reply, answer):
    assert marked_answer(reply) == answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("The answer is Green Bay.", "Green Bay"),
        ("So the answer is: Green Bay.", "Green Bay"),
        ("Thus, the answer is: **Green Bay**", "Green Bay"),
        ("Therefore the final answer is Green Bay", "Green Bay"),
        ('The answer is "Green Bay".', "Green Bay"),
        ("The answer is the U.S.", "the U.S."),
        ("Green Bay", None),
    ],
)
def test_a_phrased_answer(reply, answer):
    assert phrased_answer(reply) == answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Green Bay", "Green Bay"),
        ("Green Bay\nBecause Tenement was founded there.", "Green Bay"),
        ("Green Bay\n\nExplanation: it is the seat.", "Green Bay"),
        ("Let me think.\n\nGreen Bay", "Green Bay"),
        ("Based on the passages:\n\nGreen Bay", "Green Bay"),
        ("Reasoning: it is the seat.\n\nGreen Bay", "Green Bay"),
        ("```text\nGreen Bay\n```", "Green Bay"),
    ],
)
def test_an_answer_without_a_label(reply, answer):
    assert unlabelled_answer(reply) == answer


@pytest.mark.parametrize(
    "reply",
    [
        "Green Bay", "**Green Bay**", "`Green Bay`", "> Green Bay", "- Green Bay", "• Green Bay", "1. Green Bay",
        "_Green Bay_",
        "### Green Bay", "✅ Green Bay", "(Green Bay)", "[Green Bay]", '"Green Bay"', "```\nGreen Bay\n```",
        "Answer: Green Bay", "**Short answer:** Green Bay", "Response: Green Bay", "Output: Green Bay",
        "Answer — Green Bay",
        "Answer:\nGreen Bay", "**Answer:**\n\nGreen Bay", "So, the answer: Green Bay", "The answer is **Green Bay**.",
        r"$\boxed{\text{Green Bay}}$", "<answer>Green Bay</answer>", "<reply>Green Bay</reply>",
        "<thought>It is the seat.</thought>\nGreen Bay", '{"answer": "Green Bay"}',
        '```json\n{"answer": "Green Bay"}\n```',
        "Green Bay (it is the county seat)", "Green Bay – because it is the seat", "Answer: Green Bay (see passage 2)",
    ],
)  # fmt: skip
def test_an_answer_in_any_form(reply):
    assert bare_answer(reply) == "Green Bay"


@pytest.mark.parametrize(
    "answer",
    [
        "280–275 B.C.", "M*A*S*H", "#1 Hit", "3:10 to Yuma", "300: Rise of an Empire", "(I Can't Get No) Satisfaction",
        "Alien (1979)", "Kristiania (from 1925)", 'Reuben J. "Rooster" Cogburn', "-5", "Yes - both", "Answer Me",
    ],
)  # fmt: skip
def test_an_answer_keeps_what_belongs_to_its_name(answer):
    assert bare_answer(answer) == answer
