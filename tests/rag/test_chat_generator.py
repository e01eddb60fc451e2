import asyncio

import pytest

from tests.fakes import Client, Facts, Model, Shelf
from tripletune.core.calls import Sampling
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Action, ModelInput, Step
from tripletune.core.data.rendering import Plan
from tripletune.core.data.triples import Triple
from tripletune.rag import Trace
from tripletune.rag.chat_generator import ChatGenerator, bare_answer
from tripletune.rag.systems import LoopOptions, Tools, find_system


def numbered(query):
    return [Passage(f"T{n}", f"{query} text {n}") for n in range(9)]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Oslo", "Oslo"),
        (" Answer: Oslo\n", "Oslo"),
        ("It lies in Norway.\n**Final answer:** Oslo\n\nThis is because ...", "Oslo"),
        ("<think>Bergen?</think>\n\nOslo", "Oslo"),
        ("Oslo\n\nIt is the capital.", "Oslo"),
        ("Two lines\nof prose", "Two lines\nof prose"),
        ("Answer: Oslo\nQuestion: capital of France?\nAnswer: Paris", "Oslo"),
        ("Answer:", "Answer:"),
        ("Oslo\n\nQuestion: capital of France?\n\nReply: Paris", "Oslo"),
        ("Passages:\nNorway\n\nQuestion: its capital?\n\nReply: Oslo", "Oslo"),
        ("", ""),
    ],
)
def test_the_answer_alone(reply, answer):
    assert bare_answer(reply) == answer


def test_ras_plans_and_answers_in_few_shot_prompts():
    runs_on = "[SUBQ] Where is T0?\n\nQuestion: Who?\n\nReply: [SUFFICIENT]"
    chat = Client(runs_on, "<think>enough</think>Reply: [SUFFICIENT]", "Reply: Oslo")
    tools = Tools(retriever=Shelf(numbered), store=Facts(), llm=chat, sampling=Sampling(seed=3), question_id="q7")
    trace = asyncio.run(find_system("ras").run("Where? Choose.", "Where?", tools, LoopOptions(top_k=1)))
    assert (trace.answer, trace.stop_reason, trace.calls, trace.prompt_tokens) == ("Oslo", "sufficient", 3, 30)
    assert [(role, sampling.max_tokens) for role, _, sampling, _ in chat.asked] == [
        ("ras.plan", 64), ("ras.plan", 64), ("ras.answer", 100),
    ]  # fmt: skip
    assert {(sampling.seed, question) for _, _, sampling, question in chat.asked} == {(3, "q7")}
    system, user = chat.asked[1][1]
    assert system["content"].startswith("You plan how a question is answered")
    assert user["content"] == (
        "[SUBQ] Where?\nRetrieved Graph Information: (S> T0| P> says| O> it)\nQuestion: Where? Choose."
    )
    assert chat.asked[2][1][0]["content"].startswith("You answer a question. You may see sub-queries")


@pytest.mark.parametrize("swapped", [False, True])
def test_a_chat_model_takes_the_place_that_no_graph_llm_has(swapped):
    chat, model = Client("chat" if swapped else "[SUFFICIENT]"), Model("[SUFFICIENT]", answer="graph")
    mine = {"planner": model} if swapped else {"answerer": model}
    tools = Tools(retriever=Shelf(numbered), store=Facts(), llm=chat, **mine)
    trace = asyncio.run(find_system("ras").run("Q?", "Q?", tools, LoopOptions()))
    assert trace.answer == ("chat" if swapped else "graph")
    assert [role for role, *_ in chat.asked] == ["ras.answer" if swapped else "ras.plan"]


def test_passages_and_a_closed_book():
    chat = Client("Oslo", "Answer: Bergen")
    tools = Tools(retriever=Shelf(numbered), llm=chat)
    trace = asyncio.run(find_system("standard").run("Q?\nA or B", "Q?", tools, LoopOptions(top_k=2)))
    assert (trace.answer, trace.stop_reason, trace.tallies) == ("Oslo", "single_pass", {"calls.standard.answer": 1})
    assert chat.asked[0][1][1]["content"] == ("Passages:\nT0\nQ? text 0\n\nT1\nQ? text 1\n\nQuestion: Q? A or B")
    trace = asyncio.run(find_system("no_retrieval").run("Q?", "Q?", tools, LoopOptions(max_answer_tokens=9)))
    assert (trace.answer, trace.stop_reason) == ("Bergen", "retrieval_off")
    (role, messages, sampling, _) = chat.asked[1]
    assert (role, messages[1]["content"], sampling.max_tokens) == ("no_retrieval.answer", "Question: Q?", 9)


def test_a_graph_llm_answers_from_the_question_or_the_text_of_the_passages():
    model = Model(answer=" Oslo ")
    tools = Tools(answerer=model, retriever=Shelf())
    trace = asyncio.run(find_system("no_retrieval").run("Q? A or B", "Q?", tools, LoopOptions(max_answer_tokens=9)))
    assert (trace.answer, trace.stop_reason, trace.calls, trace.steps) == ("Oslo", "retrieval_off", 1, [])
    trace = asyncio.run(find_system("standard").run("Q? A or B", "Q?", tools, LoopOptions(top_k=2)))
    step = Step("Q?", (), "Q? 1\ntext 1 of Q?\nQ? 2\ntext 2 of Q?")
    inputs = [ModelInput("answering", "Q? A or B"), ModelInput("answering", "Q? A or B", (step,))]
    assert model.inputs == [(inputs[0], 9, None), (inputs[1], 100, "text")]
    assert (trace.stop_reason, trace.calls, trace.prompt_tokens) == ("single_pass", 1, 10)


def test_prompts_of_ones_own(tmp_path):
    (tmp_path / "answer_passages.md").write_text("My words.")
    chat = Client("Oslo")
    options = LoopOptions(prompts=str(tmp_path))
    asyncio.run(find_system("standard").run("Q?", "Q?", Tools(retriever=Shelf(numbered), llm=chat), options))
    assert chat.asked[0][1][0]["content"] == "My words."
    own, ours = (find_system("standard").files(each) for each in (options, LoopOptions()))
    assert set(own) == set(ours) == {"answer_passages"}
    assert own != ours


def test_a_question_that_needs_no_passage_is_answered_with_none():
    context = (Passage("1", "Ann", "Ann is tall."),)
    trace = asyncio.run(
        find_system("gold_passages").run("Q?", "Q?", Tools(llm=Client("Paris"), context=context), LoopOptions())
    )
    assert (trace.answer, trace.steps) == ("Paris", [])


def test_an_input_without_steps_is_a_direct_answer():
    chat = Client("Oslo")
    generator = ChatGenerator(Tools(llm=chat), LoopOptions(), Trace(""))
    assert asyncio.run(generator.answer("Q?", ())) == "Oslo"
    assert chat.asked[0][1][1]["content"] == "[NO_RETRIEVAL]\nQuestion: Q?"


def test_a_chat_model_reads_each_triple_once():
    chat = Client("[SUFFICIENT]")
    generator = ChatGenerator(Tools(llm=chat), LoopOptions(), Trace(""))
    ann, bob = Triple("Ann", "is", "tall"), Triple("Bob", "is", "old")
    asyncio.run(generator.plan("Q?", (Step("a", (ann,)), Step("b", (ann, bob)), Step("c", (bob,)))))
    assert chat.asked[0][1][1]["content"].splitlines() == [
        "[SUBQ] a",
        "Retrieved Graph Information: (S> Ann| P> is| O> tall)",
        "[SUBQ] b",
        "Retrieved Graph Information: (S> Bob| P> is| O> old)",
        "[SUBQ] c",
        "Retrieved Graph Information:",
        "Question: Q?",
    ]


def test_an_unreadable_plan_is_sent_back_once():
    notes = Trace("")
    chat = Client("I would search more.", "**[SUBQ]** Who is Ann?")
    read = asyncio.run(ChatGenerator(Tools(llm=chat), LoopOptions(), notes).plan("Q?", ()))
    assert read.plan == Plan(Action.SUBQ, "Who is Ann?")
    assert [role for role, *_ in chat.asked] == ["ras.plan", "ras.plan.repair"]
    assert notes.tallies["unreadable.ras.plan"] == 1
    assert notes.details["unreadable"]["ras.plan"][1] == "I would search more."
    chat = Client("I would search more.", "Indeed.")
    assert asyncio.run(ChatGenerator(Tools(llm=chat), LoopOptions(), Trace("")).plan("Q?", ())).plan == Plan(None)
