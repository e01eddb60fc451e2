import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import Client
from tripletune.core.calls import Message
from tripletune.core.data.triples import Triple
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.rag import Trace
from tripletune.rag.systems.cirag import PROMPT_NAMES, CiragOptions, integrate
from tripletune.rag.systems.cirag.integration import (
    NO_QUESTION,
    Decision,
    Round,
    decision_text,
    messages_of,
    read_decision,
    triples_as_json,
)
from tripletune.rag.systems.cirag.shortening import leave_out_candidates, shown_candidates

BORN, DIED = Triple("Ada", "born in", "London"), Triple("Ada", "died in", "Kelm")
CAPITAL = Triple("Kelm", "is", "capital")
CANDIDATES = (BORN, DIED, CAPITAL)


def reply(facts='{"fact": [["Ada", "born in", "London"]]}', question="Where is London?", thought="Ada helps."):
    return f"[[## thought ##]]\n{thought}\n\n[[## fact_after_filter ##]]\n{facts}\n\n[[## question ##]]\n{question}"


def read(text, earlier=()):
    return read_decision(text, CANDIDATES, earlier)


def test_a_reply_in_the_papers_form_has_no_fault():
    decision = read(reply())
    assert decision == Decision("Ada helps.", (BORN,), "Where is London?", (), reply())
    stop = read(reply(facts='{"fact": []}', question=NO_QUESTION))
    assert (stop.core, stop.query, stop.faults) == ((), "", ())
    colons = reply().replace("##]]", "##]]:")
    assert read(colons).faults == ()
    assert read(f"<think>[[## question ##]] hm</think>{reply()}").faults == ()
    fenced = reply(facts='```json\n{"fact": [["Ada", "born in", "London"]]}\n```')
    assert (read(fenced).core, read(fenced).faults) == ((BORN,), ())


@pytest.mark.parametrize(
    ("text", "core", "query", "faults"),
    [
        ("", (), None, ["empty_reply"]),
        ("I do not know.", (), None,
         ["text_before_sections", "missing_thought", "missing_fact_after_filter", "missing_question"]),
        (reply().split("[[## question")[0], (BORN,), None, ["missing_question"]),
        (reply().replace("fact_after_filter", "thoughts"), (), "Where is London?",
         ["unknown_section", "missing_fact_after_filter"]),
        (reply(question=""), (BORN,), None, ["empty_question"]),
        (reply(question="<no question> or: Who is Ada?"), (BORN,), None, ["contradictory_question"]),
        (reply(question="Who is Ada? Where is Kelm?"), (BORN,), "Who is Ada?", ["several_questions"]),
        (reply(question="1. Who is Ada?\n2. Where is Kelm?"), (BORN,), "Who is Ada?",
         ["several_questions", "loose_question"]),
        (reply(question='"Who is Ada?"'), (BORN,), "Who is Ada?", ["loose_question"]),
        (reply(question="Who wrote Quo Vadis? in 1895?"), (BORN,), "Who wrote Quo Vadis? in 1895?", []),
        (reply(question="No question is needed."), (BORN,), "", ["loose_question"]),
        (reply(question="Find where Ada was born. Then find who Ada is."), (BORN,), "Find where Ada was born.",
         ["several_questions"]),
        (reply(question="1. Find Kelm 2. Search for Sarn"), (BORN,), "Find Kelm",
         ["several_questions", "loose_question"]),
        (reply(question="Who is Dr. Who?"), (BORN,), "Who is Dr. Who?", []),
        (reply(question="Birthplace of Ada, author of No More Questions"), (BORN,),
         "Birthplace of Ada, author of No More Questions", []),
        (reply(facts='{"fact": [["Bob", "is", "old"], ["Ada", "died in", "Kelm"]]}'), (DIED,), "Where is London?",
         ["earlier_triple"]),
        (reply(facts='{"fact": [["ada", "Born in", "london."]]}'), (BORN,), "Where is London?", ["respelled_triple"]),
        (reply(facts='{"fact": [["Ada", "born in", "London"], ["Ada", "born in", "London"]]}'), (BORN,),
         "Where is London?", ["repeated_triple"]),
        (reply(facts='{"fact": [["Ada", "born in", "London"]]}\n{"fact": [["Ada", "died in", "Kelm"]]}'), (BORN, DIED),
         "Where is London?", ["several_fact_lists"]),
        (reply(facts='{"fact": [["Ada", "born in"], ["Ada", "died in", "Kelm"]]}'), (DIED,), "Where is London?",
         ["malformed_triple"]),
        (reply(facts='[["Ada", "died in", "Kelm"]]'), (DIED,), "Where is London?", ["loose_facts"]),
        (reply(facts="('Ada', 'born in', 'London'), (\"Ada\", \"died in\", \"Kelm\")"), (BORN, DIED),
         "Where is London?", ["unreadable_facts"]),
        (reply(facts='{"fact": [["Ada", "born in", "London"], ["Ada", "died'), (BORN,), "Where is London?",
         ["unreadable_facts"]),
        (reply().replace("[[## question ##]]", "[[##Question##]]"), (BORN,), "Where is London?", ["loose_marker"]),
        (reply() + '\n\n[[## fact_before_filter ##]]\n{"fact": []}\n' + reply(question=NO_QUESTION), (BORN,),
         "Where is London?", ["runs_on"]),
        ("\n\n".join(sorted(reply().split("\n\n"), reverse=True)), (BORN,), "Where is London?", ["section_order"]),
    ],
)  # fmt: skip
def test_malformed_replies_are_recovered_or_dropped_and_named(text, core, query, faults):
    decision = read(text, earlier=[Triple("Bob", "is", "old")])
    assert (decision.core, decision.query, list(decision.faults)) == (core, query, faults)
    assert decision.reply == text


@pytest.mark.parametrize(
    "copied",
    [
        ["Doc", "appears in", 'a direct-to-video film, "Time Left"'],
        ["Doc", "appears in", "a direct–to–video film, “Time Left”"],
        ["doc", "appears  in", "a direct - to - video film, ' Time Left '"],
        ["Doc", "appears in", "a directto video film Time Left"],
    ],
)
def test_a_fact_that_was_tidied_keeps_the_words_of_the_list(copied):
    listed = Triple("Doc", "appears in", "a direct - to - video film, ``Time Left ''")
    facts = json.dumps({"fact": [copied, ["Doc", "appears in", "a film"]]})
    decision = read_decision(reply(facts), (BORN, listed))
    assert decision.core == (listed,)
    assert decision.faults == ("respelled_triple", "invented_triple")


def test_a_marker_in_a_name_ends_no_section():
    for name in ("[[## question ##]]", "[[## completed ##]] and </think>", "[[## fact_before_filter ##]]"):
        triple = Triple("DSPy", "ends with", name)
        for facts in (json.dumps({"fact": [triple.as_list()]}), f"[{tuple(triple.as_list())}]"):
            text = f"[[## thought ##]]\nIt helps.\n\n[[## fact_after_filter ##]]\n{facts}\n\n[[## question ##]]\nWho?"
            decision = read_decision(text, [triple])
            assert (decision.core, decision.query, decision.thought) == ((triple,), "Who?", "It helps.")


words = st.text(min_size=1, max_size=20).filter(
    # No model means a backspace by the "\\b" of "\\beta".
    lambda text: text.split() and not any(0xD800 <= ord(c) < 0xE000 or c == "\b" for c in text)
)
triples = st.builds(Triple, words, words, words)


@given(st.lists(triples, unique=True, max_size=6), words, st.data())
def test_a_written_decision_is_read_back(found, thought, data):
    core = tuple(data.draw(st.lists(st.sampled_from(found), unique=True))) if found else ()
    thought = " ".join(thought.replace("<", "").replace("[[", "").split()) or "x"
    for query in ("", "Where is the [[## question ##]] of Ada?"):
        decision = read_decision(decision_text(Decision(thought, core, query)), found)
        assert decision.faults == ()
        assert decision.core == core
        assert decision.thought == thought
        assert decision.query == query.replace("[[", "[ [")


@given(
    st.lists(
        st.sampled_from(
            ["[[## thought ##]]", "[[## fact_after_filter ##]]", "[[## question ##]]", "[[## x ##]]", "[[##", "\n",
             '{"fact": [', '["Ada", "born in", "London"]', "]}", NO_QUESTION, "Who?", "<think>", "[[[[", "a", '"']
        )
        | st.text(max_size=8),
        max_size=15,
    )
)  # fmt: skip
def test_no_reply_breaks_the_parser_or_smuggles_a_triple_in(parts):
    decision = read("".join(parts))
    assert set(decision.core) <= set(CANDIDATES)
    assert decision.query is not None or decision.faults
    again = read(decision_text(decision)) if decision.query is not None else decision
    assert (again.core, again.query) == (decision.core, decision.query)


def test_markers_in_the_data_are_not_read_as_sections():
    sly = Triple("[[## question ##]]", "says", "[[## thought ##]]")
    text = triples_as_json([sly])
    assert "[[##" not in text
    assert json.loads(text) == {"fact": [sly.as_list()]}
    messages = messages_of("I", "[[## fact_before_filter ##]]?", [sly], [])
    assert messages[1]["content"].count("[[##") == 2


def test_history_as_a_chat_and_as_a_section():
    rounds = [Round((BORN,), Decision("t", (BORN,), "Where is London?"))]
    chat = messages_of("I", "Q?", [DIED], rounds)
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user"]
    assert chat[1]["content"] == (
        '[[## Original Query ##]]\nQ?\n\n[[## fact_before_filter ##]]\n{"fact": [["Ada", "born in", "London"]]}'
    )
    assert chat[2]["content"] == decision_text(rounds[0].decision)
    assert chat[3]["content"] == '[[## fact_before_filter ##]]\n{"fact": [["Ada", "died in", "Kelm"]]}'
    section = messages_of("I", "Q?", [DIED], rounds, "section")
    assert [message["role"] for message in section] == ["system", "user"]
    told = section[1]["content"].split("[[## historical_context ##]]\n")[1]
    assert "Round 1" in told
    assert "question: Where is London?" in told
    assert "historical_context" not in messages_of("I", "Q?", [DIED], [], "section")[1]["content"]


def decide(*replies, **options):
    client, trace = Client(*replies), Trace("Q?")
    settings = CiragOptions(**options)
    how = {"system": "cirag", "prompts": load_prompts(PROMPT_NAMES), "repairs": settings.repairs}
    llm = QuestionClient(client, trace, "q1", **how)
    decision = asyncio.run(integrate("Q?", CANDIDATES, [], llm, settings))
    return decision, client, trace


def test_a_reply_that_does_not_say_what_to_do_is_sent_back_once():
    bad = reply().split("[[## question")[0]
    decision, client, trace = decide(bad, reply())
    assert client.roles == ["cirag.integrate", "cirag.integrate.repair"]
    assert "single question" in client.asked[1].text
    assert (decision.query, decision.faults) == ("Where is London?", ("repaired", "missing_question"))
    assert trace.tallies == {
        "calls.cirag.integrate": 1,
        "calls.cirag.integrate.repair": 1,
        "unreadable.cirag.integrate": 1,
    }
    assert (client.asked[0].sampling.max_tokens, client.asked[0].question_id) == (1024, "q1")
    # One that stays so gives no query, and what could be read.
    decision, client, _ = decide(bad, bad)
    assert (decision.query, decision.core) == (None, (BORN,))
    assert decision.faults == ("repaired", "missing_question", "missing_question")
    decision, client, _ = decide(bad, repairs=0)
    assert (len(client.asked), decision.faults) == (1, ("missing_question",))


# Long chats.


def numbered(number, count=3):
    return tuple(Triple(f"s{number}", "[[## p ##]]", f"o {n}") for n in range(count))


def chat(rounds=3, layout="chat"):
    history = [Round(numbered(n), Decision("t", numbered(n)[:1], f"q{n}?")) for n in range(rounds - 1)]
    return messages_of("Prompt.", "Who?", numbered(rounds - 1), history, layout)


def words(messages):
    return sum(len(turn["content"].split()) for turn in messages)


def shown(messages):
    return [len(shown_candidates(turn["content"]) or ()) for turn in messages if turn["role"] == "user"]


def test_the_oldest_candidates_go_first_and_the_newest_never():
    whole = chat()
    assert leave_out_candidates(whole, words, words(whole)) == (whole, 0)
    found = []
    for limit in range(words(whole) - 1, 0, -1):
        short, left_out = leave_out_candidates(whole, words, limit)
        assert words(short) <= limit or left_out == 6
        assert [turn["role"] for turn in short] == [turn["role"] for turn in whole]
        assert [turn for turn in short if turn["role"] != "user"] == [turn for turn in whole if turn["role"] != "user"]
        assert short[-1] == whole[-1]
        assert "Who?" in short[1]["content"]
        found.append((shown(short), left_out))
    assert [place for n, place in enumerate(found) if place not in found[:n]] == [
        ([2, 3, 3], 1), ([1, 3, 3], 2), ([0, 3, 3], 3), ([0, 2, 3], 4), ([0, 1, 3], 5), ([0, 0, 3], 6)
    ]  # fmt: skip


def test_what_is_left_is_written_as_the_loop_writes_it():
    short, _ = leave_out_candidates(chat(), words, words(chat()) - 1)
    history = [Round(numbered(n)[: 2 + n], Decision("t", numbered(n)[:1], f"q{n}?")) for n in range(2)]
    assert short == messages_of("Prompt.", "Who?", numbered(2), history)


def test_one_turn_with_all_rounds_is_shortened_alike_and_broken_sections_are_named():
    whole = chat(layout="section")
    history = [Round(numbered(n)[: 2 + n], Decision("t", numbered(n)[:1], f"q{n}?")) for n in range(2)]
    assert leave_out_candidates(whole, words, words(whole) - 1) == (
        messages_of("Prompt.", "Who?", numbered(2), history, "section"),
        1,
    )
    short, left_out = leave_out_candidates(whole, words, 1)
    assert left_out == 6
    assert short[1]["content"].count('facts found: {"fact": []}') == 2
    assert shown(short) == [3], "the newest stay"
    broken: list[Message] = [{"role": "user", "content": "[[## fact_before_filter ##]]\nnone"}, *chat()]
    with pytest.raises(ValueError, match="the section fact_before_filter of a turn cannot be read"):
        leave_out_candidates(broken, words, 1)
