"""IRCoT, ReAct and Self-Ask on replies as models write them."""

import asyncio

import pytest

from tests.fakes import Client, Shelf
from tripletune.core.data.passages import Passage
from tripletune.rag.systems import Tools, find_system


def own_and_shared(query):
    """Every search finds a page of its own and one that all find."""
    return [Passage(query, "own"), Passage("Shared", "page")]


def run(name, *replies, **settings):
    chat, system = Client(*replies), find_system(name)
    tools = Tools(retriever=Shelf(own_and_shared), llm=chat)
    trace = asyncio.run(system.run("Main? A or B.", "Main?", tools, system.options(**settings)))
    assert not chat.replies
    return trace, [(asked.role, [turn["content"] for turn in asked.messages]) for asked in chat.asked]


def queries(trace):
    return [step.query for step in trace.steps]


def test_ircot_searches_with_its_first_sentence_and_ends_at_the_answer_phrase():
    trace, asked = run(
        "ircot", "1. Ada wrote it. So it was.\nSo the answer is: Rome.", "So the final answer is: Oslo.", "Oslo!"
    )
    assert queries(trace) == ["Main?", "Ada wrote it."]
    assert [action.action for action in trace.actions] == ["search", "answer"]
    assert (trace.answer, trace.stop_reason, trace.details["thoughts"][0]) == ("Oslo!", "sufficient", "Ada wrote it.")
    assert asked[1][1][1] == (
        "Passages:\nMain?\nown\n\nShared\npage\n\nAda wrote it.\nown\n\nQuestion: Main? A or B.\n\n"
        "Thoughts so far:\nAda wrote it."
    )
    assert [role for role, _ in asked] == ["ircot.think", "ircot.think", "ircot.answer"]


@pytest.mark.parametrize("thought", ["The evidence is not enough.", "The film is complete.", "Its river is not known."])
def test_ircot_searches_every_thought(thought):
    assert queries(run("ircot", thought, "So the answer is: x", "x")[0]) == ["Main?", thought]


def test_the_common_reader_gets_passages_and_neither_thoughts_nor_the_answer():
    _, asked = run("ircot", "Ada wrote it.", "So the final answer is: Oslo.", "Oslo!", reader="common")
    assert asked[-1][1][1].startswith("Passages:\nMain?\nown\n\n"), "a thought is no fact that was found"
    assert "Oslo" not in asked[-1][1][1]


def test_the_common_reader_answers_from_its_knowledge_if_nothing_was_searched():
    trace, asked = run("react", "Action: Finish[Oslo]", "Oslo!", reader="common")
    assert not queries(trace)
    role, (system, user) = asked[-1]
    assert (role, user) == ("reader.answer", "Question: Main? A or B.")
    assert system.startswith("You answer a question from your own knowledge.")


def test_a_prompt_keeps_the_best_passages_of_each_search():
    thoughts = ("One.", "Two.", "So the answer is: x", "x")
    _, asked = run("ircot", *thoughts, max_passages=3)
    shown = [line for line in asked[2][1][1].splitlines() if line in ("own", "page")]
    assert shown == ["own", "own", "own"], "the best of three searches, and not all of the first"


@pytest.mark.parametrize(
    "reply",
    [
        "Reply: Ada lived in Rome.", "**Thought:** Ada lived in Rome.", "Next thought: Ada lived in Rome.",
        "**Thought 2:** Ada lived in Rome.", "- Ada lived in Rome.\nThought: More.", '"Ada lived in Rome."',
        "```\nAda lived in Rome.\n```", "Thought:\nAda lived in Rome. She wrote it.",
        "Sure! Here is the next thought:\n\nAda lived in Rome.",
    ],
)  # fmt: skip
def test_ircot_reads_a_thought_behind_its_form(reply):
    assert queries(run("ircot", reply, "So the answer is: x", "x")[0]) == ["Main?", "Ada lived in Rome."]


def test_ircot_does_not_end_a_thought_at_an_abbreviation():
    thought = "Ivo Rand moved to the U.S. He built Kelm Bridge, so it is needed what it crosses."
    assert queries(run("ircot", f"{thought} It is long.", "So the answer is: x", "x")[0]) == ["Main?", thought]


@pytest.mark.parametrize(
    "reply",
    [
        "Ada lived in Rome.\nSo the answer is: Rome", "Ada lived in Rome.\n\nThus, the answer is: **Rome**.",
        "Ada lived in Rome. Therefore, the answer is Rome.", "**Thought:** Ada lived in Rome.\n**Answer:** Rome",
        "Final answer: Rome", "The answer is Rome.", "Ada left the U.S. She lived in Rome.\nThe answer is: Rome",
    ],
)  # fmt: skip
def test_ircot_ends_at_an_answer_in_any_form(reply):
    trace, _ = run("ircot", reply, last_thought=True)
    assert (trace.answer, trace.stop_reason) == ("Rome", "sufficient")


def test_ircot_without_its_reader():
    trace, asked = run("ircot", "Ada wrote it. So the answer is: Oslo.", last_thought=True)
    assert (trace.answer, len(asked)) == ("Oslo", 1)
    trace, asked = run("ircot", "One.", "One.", "read", last_thought=True)
    assert (trace.answer, trace.stop_reason) == ("read", "repeated_subquery")


def test_react_searches_and_finishes():
    first = "Thought: I Search[...] it\nAction: Search[Ada]\nObservation\nPassages: made up\nAction: Finish[wrong]"
    trace, asked = run("react", first, "<think>x</think>Action 2: finish[Oslo]")
    assert (queries(trace), trace.answer, trace.stop_reason) == (["Ada"], "Oslo", "sufficient")
    assert asked[1][1][2:] == [
        "Thought: I Search[...] it\nAction: Search[Ada]",
        "Observation\nPassages:\nAda\nown\n\nShared\npage\n\nSearches left: 3",
    ]


def test_react_at_its_limit_and_on_a_repeated_search_leaves_the_answer_to_the_reader():
    trace, asked = run("react", "Search[a]", "Search[b]", "by reader", max_rounds=1)
    assert (trace.answer, trace.stop_reason, queries(trace)) == ("by reader", "max_rounds", ["a"])
    assert "No search is left: finish now" in asked[1][1][-1]
    trace, _ = run("react", "Search[Ada]", "Search[the ada]", "by reader")
    assert (trace.stop_reason, trace.tallies["answered_by_reader"]) == ("repeated_subquery", 1)


@pytest.mark.parametrize(("name", "call"), [("react", "act"), ("self_ask", "follow_up"), ("ircot", "think")])
def test_a_reply_that_cannot_be_read_is_repaired_once_then_the_reader_answers(name, call):
    bad = "" if name == "ircot" else "Let me see."
    trace, asked = run(name, bad, bad, "by reader")
    assert [role for role, _ in asked] == [f"{name}.{call}", f"{name}.{call}.repair", f"{name}.answer"]
    assert (trace.answer, trace.stop_reason, trace.malformed) == ("by reader", "malformed", 1)
    assert trace.actions[0].action is None
    assert queries(trace) == ["Main?"]


def test_self_ask_answers_each_follow_up_from_its_own_search():
    trace, asked = run(
        "self_ask", "Yes.\nFollow up: Who wrote it?\nIntermediate answer: Bob", "Ada",
        "So the final answer is: Oslo.\nFollow up: more?",
    )  # fmt: skip
    assert (queries(trace), trace.answer, trace.stop_reason) == (["Who wrote it?"], "Oslo", "sufficient")
    assert asked[1] == (
        "self_ask.answer",
        [asked[1][1][0], "Passages:\nWho wrote it?\nown\n\nShared\npage\n\nQuestion: Who wrote it?"],
    )
    told = "Question: Main? A or B.\nFollow up: Who wrote it?\nIntermediate answer: Ada"
    assert asked[2][1][1] == told
    assert trace.details["follow_ups"] == told.splitlines()[1:]


@pytest.mark.parametrize(
    "reply",
    [
        "Follow up: Who?", "**Follow up:** Who?", "- Follow-up: Who?", "Follow up: `Who?`", 'Follow up: "Who?"',
        "Follow up question: Who?", "Follow up 2: **Who?**", "Follow up:\nWho?", "Yes. Follow up: Who?",
        "Are follow up questions needed here: Yes.\n1. Follow up: Who?\nIntermediate answer: the answer is Bob",
    ],
)  # fmt: skip
def test_self_ask_reads_a_follow_up_question_behind_its_form(reply):
    assert queries(run("self_ask", reply, "Bob", "So the final answer is: x")[0]) == ["Who?"]


@pytest.mark.parametrize(
    "reply",
    [
        "So the final answer is: Oslo", "**So the final answer is:** Oslo", "So the final answer is **Oslo**.",
        "Therefore, the answer is Oslo.", "Final answer: Oslo", "- Answer: Oslo\nFollow up: more?",
    ],
)  # fmt: skip
def test_self_ask_ends_at_an_answer_in_any_form(reply):
    trace, _ = run("self_ask", reply)
    assert (trace.answer, trace.stop_reason) == ("Oslo", "sufficient")


@pytest.mark.parametrize(
    "reply", ["Action: Search[Ada [writer]]", '**Action:** `Search["Ada [writer]"]`', "Search[**Ada [writer]**]"]
)
def test_react_reads_what_to_search_behind_its_form(reply):
    assert queries(run("react", reply, "Finish[**Oslo**]")[0]) == ["Ada [writer]"]


def test_the_answer_of_self_ask_may_stand_on_the_next_line():
    trace, _ = run("self_ask", "So the final answer is: ...", "So the final answer is:\nSarn")
    assert (trace.answer, trace.stop_reason) == ("Sarn", "sufficient")


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("react", "Action: Search[no further search is needed]"),
        ("self_ask", "Follow up: none needed"),
    ],
)
def test_what_asks_nothing_is_not_searched(name, reply):
    trace, _ = run(name, reply, "by reader")
    assert (queries(trace), trace.answer, trace.stop_reason) == (["Main?"], "by reader", "no_question")
