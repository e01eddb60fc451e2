import asyncio
from pathlib import Path

import pytest

from tests.cli import read_lines, sql, write_lines
from tests.data_builders.rows import build_facts, hotpot_row, shards
from tests.data_builders.subq_replies import WorldTeacher
from tests.fakes import Backend
from tests.llm.provider import answer_batch
from tripletune.core.calls import CallError, SetupError, TransientError
from tripletune.core.data.records import read_records
from tripletune.data_builders.subq import command
from tripletune.data_builders.subq.__main__ import main as run
from tripletune.data_builders.subq.command import estimate
from tripletune.data_builders.subq.options import BuildOptions, Source
from tripletune.llm.backends import open_client
from tripletune.llm.backends.batch import import_replies
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, Retry


@pytest.fixture
def teacher(tmp_path):
    """Questions of two hops and the teacher's replies to them."""
    hops = {name: 0.0 for name in ("one_hop", "three_hop", "four_hop", "comparison", "intersection")}
    return WorldTeacher(tmp_path, train=12, **hops)


@pytest.fixture
def files(teacher, tmp_path):
    return tmp_path


class WorldBackend(Backend):
    """Answers in this process what the mock server answers in its own."""

    def __init__(self, model, reply):
        super().__init__(model, lambda messages: reply({"messages": list(messages)}))
        self.asked, self.answered, self.seconds, self.fail_after = [], 0, 0.0, None

    async def complete(self, messages, sampling):
        self.asked.append([message["content"] for message in messages])
        await asyncio.sleep(0)
        if self.fail_after is not None and len(self.asked) > self.fail_after:
            raise self.error
        self.answered += 1
        await asyncio.sleep(self.seconds)
        return await super().complete(messages, sampling)


@pytest.fixture
def backend(monkeypatch, teacher):
    one = WorldBackend("openai:m", teacher.reply)
    retry = Retry(attempts=2, first_wait=0.0)
    monkeypatch.setattr(command, "open_client", lambda llm: LedgerClient(one, Ledger(llm.ledger), retry=retry))
    return one


def arguments(files, output, *more):
    source = f"hotpotqa:{files / 'questions.jsonl'}"
    teacher = ("--teacher", "openai", "--teacher-model", "m", "--teacher-url", "http://127.0.0.1:9/v1")
    return ["--source", source, "--output", str(output), "--validation-fraction", "0.3", *teacher, *more]


def ends_with(code, capsys, *call):
    assert run(*call) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines(keepends=True)[-1]


def test_a_teacher_labels_a_source_without_annotations(files, backend):
    assert run(arguments(files, files / "out")) == 0
    source = f"hotpotqa:{files / 'questions.jsonl'}:{files / 'teacher.jsonl'}"
    assert run(["--source", source, "--output", str(files / "recorded"), "--validation-fraction", "0.3"]) == 0
    assert shards(files / "out") == shards(files / "recorded")
    build = build_facts(files / "out")
    assert build["teachers"] == {"hotpotqa": "openai:m"}
    assert build["models"] == {"teacher": "openai:m (temperature 0, top_p 1, seed None)"}
    assert {stage: numbers["calls"] for stage, numbers in build["calls"].items()} == {
        "subq.filter": 12,
        "subq.query": 24,
        "subq.triples": 24,
    }
    prompts = [f"tripletune/prompts/data/subq_{name}.md" for name in ("filter", "query", "triples")]
    assert list(build["prompts"]) == [*prompts, "tripletune/prompts/models/repair.md"]
    # All of it again, from the ledger: nothing is sent.
    sent = len(backend.asked)
    assert run(arguments(files, files / "out", "--overwrite")) == 0
    assert len(backend.asked) == sent
    assert shards(files / "out") == shards(files / "recorded")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (TransientError("500"), 1, "error: hotpotqa world"),
        (SetupError("no credit"), 1, "error: hotpotqa world"),
        (KeyboardInterrupt(), 130, "interrupted; replies received so far are in the ledger"),
    ],
)
def test_a_build_that_stops_goes_on_where_it_was(files, backend, capsys, error, code, said):
    backend.fail_after, backend.error, backend.seconds = 20, error, 0.05
    line = ends_with(code, capsys, arguments(files, files / "out"))
    assert line.startswith(said)
    assert line.endswith("command again to continue\n")
    assert not list(files.glob("*out"))
    ((stored,),) = sql(files / "out.ledger.sqlite", "SELECT count(*) FROM calls WHERE status = 'ok'")
    # What was under way when the error came was waited for: it is paid for.
    assert stored == backend.answered > 0 or code == 130
    backend.fail_after = None
    backend.asked.clear()
    assert run(arguments(files, files / "out")) == 0
    assert len(backend.asked) == 36 + len(distinct_documents(files)) - stored


def distinct_documents(files):
    rows = read_lines(files / "teacher.jsonl")
    return {title for row in rows for title in row["helpful"]}


def test_a_refused_call_stops_or_drops_the_question(files, backend, capsys):
    backend.fail_after, backend.error = 0, CallError("the prompt is too long")
    error = ends_with(1, capsys, arguments(files, files / "out"))
    assert (
        "too long. To leave such questions out, add --on-call-error drop. What was answered is in the ledger" in error
    )
    # What would meet every question drops none.
    backend.error = SetupError("the key is refused")
    error = ends_with(1, capsys, arguments(files, files / "out", "--on-call-error", "drop"))
    assert "the key is refused. What was answered is in the ledger: run the same command again to continue" in error
    original = backend.complete

    async def refuse_one(messages, sampling):
        if len(backend.asked) == 3:
            backend.asked.append([])
            raise CallError("the prompt is too long")
        return await original(messages, sampling)

    backend.fail_after, backend.complete = None, refuse_one
    backend.asked.clear()
    assert run(arguments(files, files / "out", "--on-call-error", "drop", "--concurrency", "1")) == 0
    assert build_facts(files / "out")["drops"] == {"hotpotqa": {"a call to the teacher can't be answered": 1}}


def test_triples_can_come_from_a_file_whose_malformed_ones_are_counted(files, backend):
    lines = [
        {"title": title, "text": " ".join(sentences), "triples": [[title, "is", "here"], [title, "is"]]}
        for row in read_lines(files / "questions.jsonl")
        for title, sentences in row["context"]
    ]
    assert run(arguments(files, files / "out", "--triples-from", write_lines(files / "triples.jsonl", lines))) == 0
    found = build_facts(files / "out")
    assert found["issues"] == {"hotpotqa: malformed triples in the triple file": len(lines)}
    assert found["teachers"] == {"hotpotqa": "openai:m, triples of triples.jsonl"}
    assert list(found["calls"]) == ["subq.filter", "subq.query"]
    assert {t.predicate for r in read_records(files / "out") for step in r.steps for t in step.triples} == {"is"}


def test_the_card_does_not_claim_a_temperature_that_was_not_sent(files, backend):
    backend.send_temperature = False
    assert run(arguments(files, files / "out", "--limit", "1")) == 0
    assert build_facts(files / "out")["models"] == {
        "teacher": "openai:m (the provider's default temperature and top_p: neither was sent)"
    }


def test_a_batch_build_stops_three_times(files, teacher, backend, capsys, monkeypatch):
    assert run(arguments(files, files / "calm")) == 0
    call = ["--source", f"hotpotqa:{files / 'questions.jsonl'}", "--output", str(files / "out")]
    call += ["--validation-fraction", "0.3", "--teacher", "batch", "--teacher-model", "m", "--overwrite"]
    ledger, sizes = files / "out.ledger.sqlite", []
    monkeypatch.setattr(command, "open_client", open_client)
    for round_ in range(3):
        message = ends_with(3, capsys, call)
        assert not (files / "out").exists()
        (requests,) = sorted(Path(f"{ledger}.batch").glob("*.jsonl"))[round_:]
        assert str(requests) in message
        sizes.append(answer_batch(requests, files / f"replies{round_}.jsonl", teacher.reply))
        assert f"0 questions are done, 12 wait. Calls that wait for replies: {sizes[-1]:,}." in message
        with Ledger(ledger) as opened:
            import_replies(opened, files / f"replies{round_}.jsonl")
    assert run(call) == 0
    # The filter; the first sub-query and all triples; the second sub-query.
    assert sizes == [12, 12 + len(distinct_documents(files)), 12]
    assert shards(files / "out") == shards(files / "calm")


def test_a_direct_answer_spares_the_question_its_calls(files, backend, monkeypatch):
    first = read_lines(files / "questions.jsonl")[0]
    base = WorldBackend("hf:base plain", lambda body: f" {first['answer']}\nQuestion: more")
    monkeypatch.setattr(command, "open_base_model", lambda options, ledger: LedgerClient(base, Ledger(ledger)))
    for _ in range(2):
        assert run(arguments(files, files / "out", "--direct-answer-model", "base", "--overwrite")) == 0
    assert len(base.asked) == 12
    direct = {r.question_id for r in read_records(files / "out") if r.action.value == "[NO_RETRIEVAL]"}
    assert first["_id"] in direct
    assert build_facts(files / "out")["models"]["direct answers"] == "base"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--triples-from", "gone.jsonl"], "no such file of triples: gone.jsonl"),
        (["--dry-run", "--price", "1"], "--price 1: write dollars per million tokens as IN,OUT"),
        (["--direct-answer-model", "m", "--set", "direct_answers=f"], "name the model or a file of its answers"),
        (["--source", "hotpotqa:gone.jsonl:gone.teacher.jsonl", "--source", "a=hotpotqa:q"], "two sources are called"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(files, backend, capsys, more, message):
    assert message in ends_with(2, capsys, arguments(files, files / "out", *more))
    # Not even an empty ledger.
    assert sorted(path.name for path in files.iterdir()) == ["questions.jsonl", "teacher.jsonl"]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_among_several_is_named(files, capsys, text):
    (files / "cut.jsonl").write_text(text)
    good = f"hotpotqa:{files}/questions.jsonl:{files}/teacher.jsonl"
    for sources in ((f"two_wiki:{files}/cut.jsonl",), (good, f"two_wiki:{files}/cut.jsonl")):
        words = []
        for source in sources:
            words += ["--source", source]
        error = ends_with(2, capsys, [*words, "--output", str(files / "out")])
        assert f"source two_wiki=two_wiki:{files}/cut.jsonl: the file is empty, or has no row for this reader" in error
        assert not (files / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["hotpotqa:q.jsonl"],
            "has no annotations; add a file of recorded teacher replies (hotpotqa:FILE:ANNOTATIONS)",
        ),
        (["hotpotqa:q:t", "--set", "show_documents=all", "--dry-run"], "--dry-run, --set show_documents: without eff"),
        (["hotpotqa:q", "--teacher", "openai", "--teacher-model", "m"], "OPENAI_API_KEY"),
    ],
)
def test_teachers_that_cannot_be(tmp_path, capsys, monkeypatch, given, message):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert message in ends_with(2, capsys, ["--source", *given, "--output", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


def test_dry_run_sends_nothing(files, backend, capsys):
    call = arguments(files, files / "out", "--dry-run")
    assert run([*call, "--price", "1000,0"]) == 0
    shown = capsys.readouterr().out
    assert not backend.asked
    assert sorted(path.name for path in files.iterdir()) == ["questions.jsonl", "teacher.jsonl"]
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    assert [rows[f"subq.{stage}"][0] for stage in ("filter", "query", "triples")] == ["12", "24", "24"]
    assert rows["all"][0] == "60"
    assert rows["all"][-1] == f"${float(rows['all'][1].replace(',', '')) / 1000:,.2f}"
    assert run([*call, "--direct-answer-model", "base"]) == 0
    shown = capsys.readouterr().out
    assert "--price IN,OUT" in shown
    assert "answers directly" in shown


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        # One document needs no sub-query; a question without supporting passages and a repeated id make no call.
        ({}, (3, 4, 5)),
        ({"first_subquery": "generated"}, (3, 5, 5)),
        ({"triples_from": "f"}, (3, 4, 0)),
        ({"limit": 1}, (1, 2, 2)),
    ],
)
def test_calls_are_counted_by_formula(tmp_path, options, calls):
    facts = {0: "AB", 1: "AB", 2: "A", 3: ""}
    rows = [hotpot_row(number, supporting_facts=[[title, 0] for title in facts[number]]) for number in (0, 1, 2, 0, 3)]
    source = Source("hotpotqa", "hotpotqa", write_lines(tmp_path / "q.jsonl", rows))
    number, stages = estimate([source], BuildOptions(str(tmp_path / "out"), **options))
    assert (number, tuple(stage[0] for stage in stages.values())) == (calls[0], calls)
