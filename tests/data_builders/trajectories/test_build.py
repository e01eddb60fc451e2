import asyncio
import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import asdict

import pytest

from tests.cli import read_lines, write_lines
from tests.fakes import Backend, Facts, Shelf
from tests.rag.test_systems_world import answer_all
from tests.rag.test_systems_world import build as build_index
from tripletune.core.data.pairs import read_trajectories
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import read_records
from tripletune.core.data.triples import Triple
from tripletune.data_builders.trajectories.build import main
from tripletune.data_builders.trajectories.ledger_chats import RoleCalls
from tripletune.data_builders.world.build import WorldOptions, generate_world, write_world
from tripletune.eval.__main__ import main as evaluate
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, Retry
from tripletune.rag.systems import Tools
from tripletune.rag.systems.cirag import SYSTEM, CiragOptions
from tripletune.rag.systems.cirag.integration import Decision, decision_text

WORLD = WorldOptions(seed=5, train=0, validation=0, test=8, common_knowledge=0)
PAGE = Passage("Ada", "Ada was a writer. She was born in Kelm.")
TRIPLES = (Triple("Ada", "occupation", "writer"), Triple("Ada", "born in", "Kelm"))
QUESTION = "Where was Ada born?"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The oracle's run over a small world."""
    folder = tmp_path_factory.mktemp("world")
    write_world(WORLD, folder)
    arguments = ["--task", "hotpotqa", "--data", f"{folder}/test.jsonl", "--set", "rerank=no", "--output"]
    assert evaluate(["run", "--system", "cirag", "--oracle", f"{folder}/test", *arguments, str(folder / "run")]) == 0
    return folder / "run"


def build(results, output, *more):
    assert main(["--results", str(results), "--output", str(output), *more]) == 0
    return list(read_trajectories(output)), json.loads((output / "statistics.json").read_text())


def test_a_trajectory_is_the_whole_chat_and_learns_the_decisions_alone(run, tmp_path):
    found, statistics = build(run, tmp_path / "out")
    results = {row["id"]: row for row in read_lines(run / "results.jsonl")}
    assert [one.question_id for one in found] == list(results)
    for one in found:
        row = results[one.question_id]
        turns = ["user", "assistant"] * sum(one.learned)
        assert [message["role"] for message in one.messages] == ["system", *turns]
        assert [message["role"] == "assistant" for message in one.messages] == list(one.learned)
        assert learned(one) == [action["reply"] for action in row["trace"]["actions"]]
        assert row["question"] in one.messages[1]["content"]
        assert (one.role, one.model) == ("cirag.integrate", "oracle:world5-test")
    rounds = Counter(str(len(row["trace"]["steps"])) for row in results.values())
    assert statistics["statistics"]["trajectories"]["learned_turns"] == dict(rounds)
    assert statistics["statistics"]["splits"] == {"train": 8}


def test_a_chat_that_two_questions_had_is_learned_once(run, tmp_path):
    triples, statistics = build(run, tmp_path / "triples", "--roles", "cirag.triples")
    passages = {one.messages[1]["content"] for one in triples}
    assert len(passages) == len(triples)
    left_out = statistics["build"]["drops"]["all"]
    assert left_out.get("repeated chat", 0) > 0


SYSTEMS = {
    "cirag": ["integrate"], "gear": ["answer", "read", "reason", "rewrite"], "ras": ["answer", "plan"],
    "t2rag": ["answer", "decompose", "resolve"], "thrag": ["answer", "extract", "subtopics", "topics"],
}  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_role_of_a_system_has_trajectories_of_right_answers(system, tmp_path):
    world = generate_world(WorldOptions(**{**asdict(WORLD), "test": 6, "one_hop": 0}), "test")
    tools = build_index(world, tmp_path)
    # A second run in the same ledger, whose calls are not those of the results.
    for rounds in (1, 2):
        small = {"top_k": 1, "length": 1, "width": 1} if system == "gear" else {}
        settings = {"chunks": rounds} if system == "thrag" else {"max_rounds": rounds + 1, **small}
        traces = answer_all(world, system, tools, Ledger(tmp_path / "ledger.sqlite"), **settings)
    right = [trace.answer == question.answer for question, trace in zip(world.questions, traces)]
    assert any(right)
    rows = [
        {"id": f"q{n}", "question": trace.question, "scores": {"exact_match": float(hit)}, "trace": trace.to_json()}
        for n, (trace, hit) in enumerate(zip(traces, right))
    ]
    results = write_lines(tmp_path / "results.jsonl", rows)
    found, _ = build(results, tmp_path / "all", "--system", system, "--min-score", "exact_match=1")
    assert sorted({one.role for one in found}) == [f"{system}.{name}" for name in SYSTEMS[system]]
    ids = [one.question_id for one in found]
    assert {name for name in ids if name[0] == "q"} == {f"q{n}" for n, hit in enumerate(right) if hit}
    assert sum(name.startswith("corpus:") for name in ids) == (len(world.articles) if system == "thrag" else 0)
    name = f"{system}.{SYSTEMS[system][-1]}"
    some, _ = build(results, tmp_path / "runs", "--system", system, "--roles", SYSTEMS[system][0], "--limit", "2")
    assert len({one.question_id for one in some}) == 2
    some, _ = build(results, tmp_path / "one", "--system", system, "--roles", SYSTEMS[system][-1])
    assert {one.role for one in some} == {name}
    made = {call for trace in traces for call in trace.details["calls"][name]}
    assert sum(sum(one.learned) for one in some) == len(made), "calls of the other run are left out"


def test_filters_are_counted_alone_and_in_order(run, tmp_path):
    results = read_lines(run / "results.jsonl")
    names = [row["id"] for row in results]

    def spoil(row):
        name = row["id"]
        row["scores"]["exact_match"] = 0.0 if name in names[:3] else 1.0
        row["answers"] = ["Atlantis"] if name == names[5] else row["answers"]
        row["supporting_recall"] = 0.5 if name in names[2:4] else 1.0
        row["trace"]["stop_reason"] = "repeated_subquery" if name == names[4] else "no_question"
        row["error"] = "RuntimeError: x" if name == names[7] else ""
        return row

    spoiled = write_lines(tmp_path / "results.jsonl", map(spoil, results))
    ledger = ["--ledger", str(run / "ledger.sqlite")]
    filters = ["--min-score", "exact_match=1", "--no-repeated-query", "--min-recall", "1", "--no-repairs"]
    found, statistics = build(spoiled, tmp_path / "out", *ledger, *filters, "--answer-kept")
    assert [one.question_id for one in found] == names[6:7]
    assert statistics["build"]["drops"]["all"] == {
        "the question failed": 1,
        "exact_match below 1": 3,
        "a reply was repaired or recovered from": 0,
        "a query was repeated": 1,
        "no kept fact names a gold answer": 1,
        "less than 1 of the supporting passages retrieved": 1,
    }
    assert len(build(spoiled, tmp_path / "few", *ledger, "--limit", "2")[0]) == 2


def test_another_prompt_replaces_the_teachers(run, tmp_path):
    plain, _ = build(run, tmp_path / "plain")
    short = tmp_path / "cirag_integrate.md"
    short.write_text("Collect facts.\n")
    found, _ = build(run, tmp_path / "short", "--prompt", str(short))
    assert {one.messages[0]["content"] for one in found} == {"Collect facts."}
    assert [(one.id, one.messages[1:], one.learned) for one in found] == [
        (one.id, one.messages[1:], one.learned) for one in plain
    ]


def test_a_question_is_on_one_side_of_the_split(run, tmp_path):
    build(run, tmp_path / "out", "--validation-fraction", "0.5")
    splits = [
        {one.question_id for one in read_trajectories(tmp_path / "out", name)} for name in ("train", "validation")
    ]
    assert all(splits)
    assert sorted([*splits[0], *splits[1]]) == sorted(row["id"] for row in read_lines(run / "results.jsonl"))


class Replies(Backend):
    """A backend that gives its replies in order."""

    def __init__(self, *replies):
        left = list(replies)
        super().__init__("teacher", lambda messages: left.pop(0))


def says(query, *triples):
    return decision_text(Decision("So.", triples, query))


FIRST, LAST = says("Who was Ada?", TRIPLES[1]), says("", TRIPLES[0])
UNREADABLE = FIRST.split("[[## question")[0]


class Counting(Replies):
    """A backend on this machine, whose tokens are its words."""

    def count_tokens(self, messages):
        return sum(len(message["content"].split()) for message in messages)


def loop(folder, *replies, kind=Replies, **options):
    """Run SYSTEM with given replies, and write ledger and results as `eval run` does."""
    folder.mkdir(exist_ok=True)

    async def answer():
        shelf, store = Shelf(lambda query: [PAGE]), Facts(lambda passage: TRIPLES)
        backend, ledger = kind(*replies, "Answer: Kelm"), Ledger(folder / "ledger.sqlite")
        async with LedgerClient(backend, ledger, retry=Retry(empty_attempts=1)) as client:
            tools = Tools(retriever=shelf, store=store, llm=client, question_id="q1")
            settings = CiragOptions(extraction="store", rerank=False, **options)
            return await SYSTEM.run(QUESTION, QUESTION, tools, settings)

    trace = asyncio.run(answer())
    row = {"id": "q1", "question": QUESTION, "scores": {"f1": 1.0}, "error": "", "supporting_recall": None}
    write_lines(folder / "results.jsonl", [row | {"trace": trace.to_json()}])
    return trace


def learned(chat):
    return [message["content"] for message, flag in zip(chat.messages, chat.learned) if flag]


def chats(folder):
    with RoleCalls(folder / "ledger.sqlite", "cirag.integrate") as calls:
        return calls.chats("q1")


def test_turns_are_learned_as_the_loop_understood_them(tmp_path):
    invented = '["Ada", "is", "tall"], ["ada", "born in", "kelm"]'
    first = FIRST.replace('["Ada", "born in", "Kelm"]', invented)
    last = LAST.replace('["Ada", "occupation", "writer"]', '["Ada", "occupation", "writer"], ["Ada", "is", "tall"]')
    loop(tmp_path, first, last)
    (chat,) = chats(tmp_path)
    assert learned(chat) == [FIRST, LAST]
    assert chat.faults == ("invented_triple", "respelled_triple", "invented_triple")
    assert main(["--results", str(tmp_path), "--output", str(tmp_path / "out"), "--no-repairs"]) == 2


def test_repaired_turns_are_known_wherever_they_stand(tmp_path):
    for number, replies in enumerate([(UNREADABLE, FIRST, LAST), (FIRST, UNREADABLE, LAST)]):
        folder = tmp_path / str(number)
        trace = loop(folder, *replies)
        assert trace.tallies["integration.repaired"] == 1
        (chat,) = chats(folder)
        assert learned(chat) == [FIRST, LAST]
        assert "repaired" in chat.faults
        assert len(build(folder, folder / "out")[0]) == 1


def test_a_last_decision_that_stays_unreadable_is_no_trajectory(tmp_path, capsys):
    loop(tmp_path, FIRST, UNREADABLE, UNREADABLE)
    assert main(["--results", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "nothing is left (the last decision cannot be read or was cut off: 1)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("reason", ["length", "content_filter", "MAX_TOKENS", "incomplete"])
def test_a_reply_that_was_cut_off_is_not_learned(tmp_path, reason):
    for number, cut in enumerate((FIRST, LAST)):
        folder = tmp_path / str(number)
        loop(folder, FIRST, LAST)
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger, ledger:
            ledger.execute("UPDATE calls SET finish_reason = ? WHERE text = ?", (reason, cut))
    (first,), (last,) = chats(tmp_path / "0"), chats(tmp_path / "1")
    assert (learned(first), first.readable) == ([LAST], True)
    assert not last.readable


def test_a_repair_that_was_cut_off_is_not_learned(tmp_path):
    for number, reason in enumerate(("stop", "content_filter")):
        folder = tmp_path / str(number)
        loop(folder, UNREADABLE, LAST)
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger, ledger:
            ledger.execute("UPDATE calls SET finish_reason = ? WHERE text = ?", (reason, LAST))
        (chat,) = chats(folder)
        assert chat.readable == (reason == "stop")


def test_the_card_counts_equal_replies_of_different_seeds(tmp_path):
    loop(tmp_path, FIRST, LAST)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE calls SET sampling = json_set(sampling, '$.temperature', 1.0, '$.seed', 1)")
        columns = "model, messages, text, prompt_tokens, completion_tokens, seconds, retries, finish_reason, status"
        ledger.execute(
            f"INSERT INTO calls (key, sampling, {columns}, detail, time) "
            f"SELECT 'other ' || key, json_set(sampling, '$.seed', 2), {columns}, detail, time FROM calls"
        )
        ledger.execute(
            "INSERT INTO uses (call_id, role, question_id) SELECT others.id, role, question_id FROM uses "
            "JOIN calls ON calls.id = call_id JOIN calls AS others ON others.key = 'other ' || calls.key"
        )
    _, statistics = build(tmp_path, tmp_path / "out")
    assert statistics["build"]["issues"] == {"replies equal to one with another seed (of 4)": 2}


def test_a_shorter_run_has_its_trajectory_beside_a_longer_one(tmp_path):
    short = tmp_path / "short"
    loop(short, FIRST, max_rounds=1)
    (tmp_path / "ledger.sqlite").write_bytes((short / "ledger.sqlite").read_bytes())
    # The first decision stands in the ledger; this run goes on from it.
    loop(tmp_path, LAST)
    ledger = ["--ledger", str(tmp_path / "ledger.sqlite")]
    found, _ = build(short, tmp_path / "one", *ledger)
    assert [[turn["content"] for turn in one.messages[2:]] for one in found] == [[FIRST]]
    found, _ = build(tmp_path, tmp_path / "two", *ledger)
    assert [sum(one.learned) for one in found] == [2]
    both = ["--results", str(tmp_path), *ledger]
    assert len(build(short, tmp_path / "both", *both)[0]) == 2
    found, statistics = build(short, tmp_path / "shortest", *both, "--shortest", "1")
    assert [sum(one.learned) for one in found] == [1]
    assert statistics["build"]["drops"]["all"]["other runs of the question are shorter"] == 1


def test_the_ledger_of_several_systems_lies_in_the_folder_of_their_run(tmp_path):
    folder = tmp_path / "task" / "cirag"
    folder.parent.mkdir()
    loop(folder, FIRST, LAST)
    (folder / "ledger.sqlite").rename(tmp_path / "ledger.sqlite")
    assert len(build(folder, tmp_path / "out")[0]) == 1


def test_a_shortened_prompt_loses_no_earlier_decision(tmp_path):
    second = says("Where is Kelm?", TRIPLES[0])
    whole = tmp_path / "whole"
    loop(whole, FIRST, second, LAST)
    (chat,) = chats(whole)
    longest = Counting().count_tokens(chat.messages[:-1])
    trace = loop(tmp_path, FIRST, second, LAST, kind=Counting, max_prompt_tokens=longest - 1)
    assert trace.tallies["shortened_prompts"] == 1
    found, statistics = build(tmp_path, tmp_path / "out")
    assert [learned(one) for one in found] == [[FIRST, second], [LAST]]
    assert statistics["statistics"]["trajectories"]["learned_turns"] == {"1": 1, "2": 1}
    for number, more in enumerate((["--shortest", "1"], ["--limit", "1"])):
        kept, statistics = build(tmp_path, tmp_path / f"one{number}", *more)
        assert kept == found, "both chats are of one run"
        assert statistics["build"]["drops"]["all"] == {}


def test_a_chat_a_round_gives_a_trajectory_a_round(tmp_path):
    loop(tmp_path, FIRST, LAST, history="section")
    found, statistics = build(tmp_path, tmp_path / "out")
    assert [one.id for one in found] == ["q1:0", "q1:1"]
    assert [one.messages[-1]["content"] for one in found] == [FIRST, LAST]
    assert "[[## historical_context ##]]" in found[1].messages[1]["content"]
    assert statistics["statistics"]["trajectories"]["learned_turns"] == {"1": 2}


def test_runs_of_several_chats_are_ranked_and_counted_as_a_whole(tmp_path):
    second = says("Where is Kelm?", TRIPLES[0])
    for name, replies in (("long", (FIRST, second, LAST)), ("again", (FIRST, second, LAST)), ("short", (FIRST, LAST))):
        loop(tmp_path / name, *replies, history="section")
    more = [word for name in ("again", "short") for word in ("--results", str(tmp_path / name))]

    def last_turns(number, *options):
        found, statistics = build(tmp_path / "long", tmp_path / f"out{number}", *more, *options)
        left_out = statistics["build"]["drops"]["all"]
        return [one.messages[-1]["content"] for one in found], sorted(left_out.items())

    shorter, repeated = "other runs of the question are shorter", "repeated chat"
    whole = ([FIRST, second, LAST, LAST], [(repeated, 4)])
    assert last_turns(0) == whole
    # The first chat is that of the longer run too.
    assert last_turns(1, "--shortest", "1") == ([FIRST, LAST], [(shorter, 1), (repeated, 3)])
    assert last_turns(2, "--shortest", "2") == whole
    assert last_turns(3, "--limit", "1") == ([FIRST, second, LAST], [])
    assert last_turns(4, "--limit", "2") == whole


def test_examples_inside_a_prompt_are_not_learned(tmp_path):
    turns = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "example"},
        {"role": "assistant", "content": "shown"}, {"role": "user", "content": "now you"},
    ]  # fmt: skip

    async def call():
        async with LedgerClient(Replies("mine"), Ledger(tmp_path / "ledger.sqlite")) as client:
            await client.chat(turns, role="other.role", question_id="q1")

    asyncio.run(call())
    with RoleCalls(tmp_path / "ledger.sqlite", "other.role") as calls:
        (chat,) = calls.chats("q1")
        assert calls.chats("q2") == []
    assert chat.learned == (False, False, False, False, True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ledger", "a", "--ledger", "b"], "2 ledgers and 1 results"),
        (["--min-score", "rouge=1"], "the results have no score 'rouge'; they have f1"),
        (["--min-recall", "1"], "run eval with --gold"),
        (["--system", "ras", "--answer-kept"], "answer_kept: ras keeps no facts as CIRAG does"),
        (
            ["--roles", "integrate", "--roles", "answer.triples", "--prompt", __file__],
            "do not share one prompt: name one with",
        ),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(tmp_path, capsys, more, message):
    loop(tmp_path, FIRST, LAST)
    assert main(["--results", str(tmp_path), "--output", str(tmp_path / "out"), *more]) == 2
    assert message in capsys.readouterr().err


def own_run(folder, name, queries, *, plans=None, prediction="Kelm", recall=1.0):
    """The results of a Graph-LLM's loop over one question."""
    steps = [{"query": one, "triples": [["Ada", "saw", one]], "text": "", "passages": []} for one in queries]
    markers = plans or ["[SUBQ]"] * len(queries) + ["[SUFFICIENT]"]
    asked = [*queries, ""]
    actions = [
        {"reply": f"{marker} {query}", "action": marker, "subquery": query, "unexpected": False}
        for marker, query in zip(markers, asked)
    ]
    trace = {"question": f"Q: {QUESTION}", "steps": steps, "actions": actions, "malformed": markers.count(None),
             "unexpected": 0, "stop_reason": "sufficient", "details": {}, "tallies": {}, "seconds": 0.0,
             **dict.fromkeys(("calls", "prompt_tokens", "completion_tokens"), 0)}  # fmt: skip
    scores = {"exact_match": float(prediction == "Kelm")}
    row = {"id": name, "question": QUESTION, "answers": ["Kelm", "Kelm City"], "scores": scores, "trace": trace,
           "supporting_recall": recall if queries else None, "error": ""}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_runs_of_a_graph_llm_become_records(tmp_path):
    own_run(tmp_path / "0", "a", ["Who saw Bo?", "Who is Ada?"])
    own_run(tmp_path / "1", "a", ["Who is Ada?"])
    own_run(tmp_path / "0", "b", ["Who is Bo?"], prediction="Bo")
    own_run(tmp_path / "1", "b", ["Who is Bo?"], plans=["[SUBQ]", None])
    own_run(tmp_path / "1", "c", [], plans=["[NO_RETRIEVAL]"])
    own_run(tmp_path / "1", "d", ["Who is Cy?"], recall=0.5)
    given = ["--system", "ras", "--records", "--min-score", "exact_match=1", "--min-recall", "1", "--shortest", "1"]
    results = ["--results", str(tmp_path / "0"), "--results", str(tmp_path / "1")]
    assert main([*results, *given, "--output", str(tmp_path / "out")]) == 0
    found = list(read_records(tmp_path / "out"))
    assert [(one.id, one.label, len(one.steps)) for one in found] == [
        ("a:1:answer", "Kelm", 1), ("a:1:0", "[SUBQ] Who is Ada?", 0), ("a:1:1", "[SUFFICIENT]", 1),
        ("c:1:answer", "Kelm", 0), ("c:1:0", "[NO_RETRIEVAL]", 0),
    ]  # fmt: skip
    assert (found[0].answers, found[0].question) == (("Kelm", "Kelm City"), f"Q: {QUESTION}")
    assert found[2].steps[0].triples == (Triple("Ada", "saw", "Who is Ada?"),)
    left_out = json.loads((tmp_path / "out" / "statistics.json").read_text())["build"]["drops"]["all"]
    assert sorted(left_out.values()) == [1] * 4, "a wrong answer, an unreadable plan, a longer run, too little found"
    assert main([*results, "--system", "cirag", "--records", "--output", str(tmp_path / "other")]) == 2


def test_where_runs_part_the_better_reply_stands_beside_the_worse(tmp_path, capsys):
    both = ["Who saw Bo?", "Who is Ada?"]
    own_run(tmp_path / "0", "a", both)
    own_run(tmp_path / "1", "a", both[:1], prediction="Bo")
    own_run(tmp_path / "2", "a", ["Who is Cy?"], prediction="Bo")
    own_run(tmp_path / "0", "b", ["Who is Bo?"])
    own_run(tmp_path / "1", "b", ["Who is Bo?"])
    own_run(tmp_path / "2", "c", ["Who is Cy?"], recall=0.5)
    words = [word for number in range(3) for word in ("--results", str(tmp_path / str(number)))]
    words += ["--system", "ras", "--records", "--pairs", "--min-recall", "1"]
    assert main([*words, "--min-score", "exact_match=1", "--output", str(tmp_path / "out")]) == 0
    assert [(one.id, one.label, one.rejected) for one in read_records(tmp_path / "out")] == [
        # Of the runs that begin with the first, one of two went well; of those with the other none.
        ("a:0:0", "[SUBQ] Who saw Bo?", "[SUBQ] Who is Cy?"),
        ("a:0:1", "[SUBQ] Who is Ada?", "[SUFFICIENT]"),
    ]
    assert main([*words, "--output", str(tmp_path / "none")]) == 2
    assert main([*words, "--min-score", "exact_match=0", "--output", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "pairs: set min_score" in error
    assert "or good and bad runs of a question never differ at one prompt" in error


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_chats_part_at_a_decision(tmp_path, form):
    early = says("", TRIPLES[1])
    for number, (replies, score) in enumerate([((FIRST, LAST), 1.0), ((FIRST, early), 0.0), ((early,), 0.0)]):
        loop(tmp_path / str(number), *replies)
        (row,) = read_lines(tmp_path / str(number) / "results.jsonl")
        write_lines(tmp_path / str(number) / "results.jsonl", [row | {"scores": {"f1": score}}])
    more = [word for number in (1, 2) for word in ("--results", str(tmp_path / str(number)))]
    given = ["--pairs", "--min-score", "f1=0.5", "--format", form]
    pairs, _ = build(tmp_path / "0", tmp_path / "out", *more, *given)
    assert [(learned(one), one.rejected, len(one.messages)) for one in pairs] == [
        ([FIRST], early, 3),
        ([LAST], early, 5),
    ]


def test_what_the_ledger_does_not_have_is_said_with_what_it_has(run, tmp_path, capsys):
    for more in (
        ["--system", "ras"],
        ["--roles", "nope"],
        ["--roles", "integrate", "--roles", "nope"],
        ["--model", "no"],
    ):
        assert main(["--results", str(run), "--output", str(tmp_path / "out"), *more]) == 2
        error = capsys.readouterr().err
        assert "no ledger has a call of " in error
        assert "cirag.integrate by " in error
