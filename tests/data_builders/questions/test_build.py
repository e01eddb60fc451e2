import asyncio
from collections import Counter

import pytest

from tests.cli import read_lines, run
from tests.data_builders.questions.stub import RuleTeacher
from tests.data_builders.rows import shards
from tests.fakes import Backend
from tripletune.core.data.answers import normalize_answer
from tripletune.data_builders.questions import __main__ as command_line
from tripletune.data_builders.questions.teacher import Rejection
from tripletune.data_builders.readers.qa import read_questions
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient


class Counted(Backend):
    asked, stop_after = 0, None

    async def complete(self, messages, sampling):
        await asyncio.sleep(0)
        if self.asked == self.stop_after:
            raise RuntimeError("killed")
        self.asked += 1
        return await super().complete(messages, sampling)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Builds questions with a teacher of rules; gives teacher, backend and how the program ended."""

    def made(*words, stop_after=None, output="made", **options):
        teacher = RuleTeacher(tmp_path, **{"train": 400, **options})
        backend = Counted("openai:m", teacher.reply)
        backend.stop_after = stop_after
        monkeypatch.setattr(command_line, "open_client", lambda llm: LedgerClient(backend, Ledger(llm.ledger)))
        files = "--corpus", tmp_path / "corpus.jsonl", "--triples", tmp_path / "triples.jsonl"
        ended = run("build questions", *files, "--llm", "openai:m", "--output", tmp_path / output, *words)
        return teacher, backend, ended

    return made


def test_questions_have_the_answers_of_the_facts_and_share_no_document(make, tmp_path):
    teacher, _, ended = make("--count", 150, faults=0.3, stubborn=0.5, known=0.1)
    assert ended.code == 0, ended.err
    titles, kinds = [], Counter()
    for part, wanted in (("train", 120), ("test", 30)):
        questions = list(read_questions(str(tmp_path / "made" / f"{part}.jsonl")))
        assert len(questions) == wanted
        known = [(one.answers[0], teacher.answer(one.question).rstrip(".")) for one in questions]
        assert sum(normalize_answer(answer) == normalize_answer(true) for answer, true in known) >= 0.95 * wanted
        titles.append({passage.title for question in questions for passage in question.passages})
        kinds.update(question.type for question in questions)
        assert {len(question.passages) for question in questions} == {10}
        assert all([hop.passage_index for hop in one.hops] == [*one.supporting] for one in questions)
    assert not titles[0] & titles[1]
    assert set(kinds) == {"1-hop", "2-hop", "3-hop", "4-hop", "comparison"}
    card = (tmp_path / "made" / "README.md").read_text()
    assert "paths whose passages lie in both parts, dropped" in card
    reasons = Counter(row["reason"] for row in read_lines(tmp_path / "made" / "dropped.ndjson"))
    found = {Rejection.UNREADABLE, Rejection.NO_QUESTION, Rejection.START, Rejection.GIVES_AWAY, Rejection.FROM_MEMORY}
    assert found <= set(reasons)
    assert all(f"{n:,}" in card and reason in card for reason, n in reasons.items())
    assert all(f"{n:,} x {reason}" in ended.err for reason, n in reasons.items()), "the log of the last batch"

    source = f"qa:{tmp_path}/made/train.jsonl"
    labelled = run("build subq", "--source", source, "--check-facts", "drop", "--output", tmp_path / "subq")
    assert "120 questions labelled, 0 left out" in labelled.err


def test_missing_questions_are_explained_by_drafts_that_ran_out_or_were_rejected(make, tmp_path):
    ended = make("--count", 1000, "--kinds", "1-hop=1", train=30)[2]
    assert "of the 800 requested questions, after" in ended.err
    assert "its triples give no further draft: add documents" in ended.err
    assert "its triples give no further draft: add documents" in (tmp_path / "made" / "README.md").read_text()
    ended = make("--count", 20, "--tries", 1, output="few", faults=0.3, stubborn=0.5)[2]
    assert "of the 16 requested questions, after 16 drafts: see why drafts were rejected, raise --tries" in ended.err


@pytest.mark.parametrize(
    ("reply", "reason"),
    [("unknown", Rejection.NOT_ANSWERED), ("of the whole world", Rejection.ONE_IS_ENOUGH)],
)
def test_what_the_teacher_reads_again_decides(make, tmp_path, monkeypatch, reply, reason):
    answer = RuleTeacher.answer
    monkeypatch.setattr(
        RuleTeacher, "answer", lambda self, text, shown=None: answer(self, text) if "world" in reply else reply
    )
    _, _, ended = make("--count", 10, "--kinds", "2-hop=1", train=150)
    assert str(reason) in ended.error


def test_a_teacher_that_cannot_write_the_form_ends_with_a_code(make, tmp_path, monkeypatch):
    word = RuleTeacher.word
    monkeypatch.setattr(RuleTeacher, "word", lambda self, text, fault: word(self, text, fault and "not json"))
    _, _, ended = make("--count", 30, faults=0.6, stubborn=1.0)
    assert (ended.code, ended.error.split(", but ")[1][-44:]) == (
        1,
        "for unusable replies: see its dropped.ndjson",
    )
    assert (tmp_path / "made" / "train.jsonl").exists()


def test_a_killed_build_continues_and_pays_no_call_twice(make, tmp_path):
    _, whole, _ = make("--count", 30, faults=0.3, stubborn=0.5, output="whole")
    with pytest.raises(RuntimeError, match="killed"):
        make("--count", 30, faults=0.3, stubborn=0.5, stop_after=40)
    assert not (tmp_path / "made").exists()
    _, rest, _ = make("--count", 30, faults=0.3, stubborn=0.5)
    assert 40 + rest.asked == whole.asked
    assert shards(tmp_path / "made") == shards(tmp_path / "whole")


def test_a_dry_run_counts_the_calls_of_a_build_without_rejections(make, tmp_path):
    _, backend, ended = make("--count", 40, "--dry-run", "--price", "1,2")
    assert (backend.asked, (tmp_path / "made").exists()) == (0, False)
    (total,) = [line.split() for line in ended.out.splitlines() if line.startswith("all ")]
    _, backend, _ = make("--count", 40)
    assert total[1] == f"{backend.asked:,}"
    assert total[-1].startswith("$0.0")
    assert "one draft per question" in ended.out
    assert "at most" not in ended.out
    # Every draft of --tries, and a repair turn for each reply.
    most = 6 * backend.asked
    assert f"So {backend.asked:,} to {most:,} calls, $" in ended.out
    assert "are wanted" not in ended.out
    _, _, ended = make("--count", 9_000, "--dry-run", "--kinds", "2-hop=1")
    assert "9,000 questions are wanted, and the triples give no more drafts" in ended.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--kinds", "5-hop=1"], "kinds: '5-hop=1' is not like 1-hop=25"),
        (["--kinds", "intersection=1"], "no question could be made (the triples give no path of these kinds)"),
        (["--price", "1", "--dry-run"], "--price 1: write dollars"),
    ],
)
def test_bad_input_is_one_line(make, words, error):
    _, _, ended = make("--count", 10, *words, train=150)
    assert error in ended.error
