import asyncio

import pytest

from tests.data_builders.hotpotqa_subq.test_hotpotqa_subq import hotpot_row, write
from tripletune.data_builders.hotpotqa_subq.dry_run import Estimate, Speed, Stage, rehearse
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions
from tripletune.data_builders.hotpotqa_subq.prices import Price
from tripletune.data_builders.hotpotqa_subq.questions import Question
from tripletune.data_builders.hotpotqa_subq.sources import Source
from tripletune.data_builders.hotpotqa_subq.teacher import (
    FILTER_ROLE,
    QUERY_ROLE,
    TRIPLES_ROLE,
    LLMTeacher,
    Prompts,
    filter_text,
)
from tripletune.data_builders.readers.hotpotqa import read_questions
from tripletune.models.data.passages import Passage
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient
from tripletune.models.local.generation import Completion


@pytest.fixture
def source(tmp_path):
    rows = [hotpot_row(n) | {"supporting_facts": [["A", 0], ["B", 0]][: 1 + n % 2]} for n in range(10)]
    return Source("hotpotqa", "hotpotqa", write(tmp_path / "q.jsonl", [*rows, hotpot_row(0)]))


def estimate(source, tmp_path, options=None, **more):
    options = options or {}
    return rehearse([source], BuildOptions(str(tmp_path / "out"), **options), Estimate("openai:m", "as said"), **more)


def counts(found):
    return [found.stages[role].calls for role in (FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE)]


def test_calls_follow_from_the_supporting_passages(source, tmp_path):
    found = estimate(source, tmp_path)
    assert found.questions == 10
    # Ten documents A, each of its own text, and one document B that five questions share; a single document needs no
    # sub-query.
    assert counts(found) == [10, 10, 11]
    assert counts(estimate(source, tmp_path, {"first_subquery": "generated"})) == [10, 15, 11]
    assert counts(estimate(source, tmp_path, {"limit": 4})) == [4, 4, 5]
    assert counts(estimate(source, tmp_path, {"shard": "1/2"})) == [5, 10, 6]


def test_triples_from_a_file_are_no_calls(source, tmp_path):
    triples = write(tmp_path / "t.jsonl", [{"title": "B", "text": "Other.", "triples": [["B", "is", "x"]]}])
    assert counts(estimate(source, tmp_path, {"triples_from": triples})) == [10, 10, 0]


def test_direct_answers_need_no_teacher(source, tmp_path):
    answers = [{"question_id": f"id{n}", "answer": f"answer {n}" if n < 3 else "no"} for n in range(10)]
    found = estimate(source, tmp_path, {"direct_answers": write(tmp_path / "a.jsonl", answers)})
    assert (found.direct, found.questions) == (3, 7)


def test_all_passages_make_longer_prompts_and_no_more_calls(source, tmp_path):
    few, many = estimate(source, tmp_path), estimate(source, tmp_path, {"show_documents": "all"})
    assert counts(few) == counts(many)
    assert few.stages[FILTER_ROLE].input_characters < many.stages[FILTER_ROLE].input_characters


def test_characters_are_those_of_the_real_prompts(source, tmp_path):
    found = estimate(source, tmp_path, {"limit": 1})
    question = Question("id0", "Question number 0?", ("x",), (Passage("A", "Text 0."),), (0,), "", "hotpotqa")
    assert found.stages[FILTER_ROLE].input_characters == len(Prompts.load().filter) + len(filter_text(question, [0]))
    assert found.stages[FILTER_ROLE].input_tokens == found.stages[FILTER_ROLE].input_characters / 4


def test_a_tokenizer_is_asked_for_the_tokens_of_a_character(source, tmp_path):
    found = estimate(source, tmp_path, count_tokens=lambda text: len(text) // 2)
    assert found.stages[TRIPLES_ROLE].input_tokens == pytest.approx(
        found.stages[TRIPLES_ROLE].input_characters / 2, rel=0.01
    )


def test_stored_calls_are_not_counted_and_their_replies_are_used(source, tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")

    class Backend:
        model = "openai:m"

        async def complete(self, messages, sampling):
            return Completion('{"documents": [1]}', 100, 7)

        async def close(self):
            pass

    async def fill():
        client = LedgerClient(Backend(), ledger)
        teacher = LLMTeacher(client)
        for question in read_questions(source.location):
            await teacher.helpful_documents(question)

    # The answer stands in no document, so any supporting one will do.
    asyncio.run(fill())
    found = estimate(source, tmp_path, ledger=ledger)
    ledger.close()
    assert found.stages[FILTER_ROLE].stored == 10
    # One document is kept everywhere, so there is nothing to ask for but triples.
    assert counts(found) == [0, 0, 10]


def test_what_came_of_known_questions_scales_the_others(tmp_path):
    # Forty questions with two supporting documents; the teacher kept one of them in each of the first twenty.
    both = [["A", 0], ["B", 0]]
    rows = [hotpot_row(n) | {"supporting_facts": both, "context": [["A", [f"a {n}"]], ["B", [f"b {n}"]]]}
            for n in range(40)]  # fmt: skip
    source = Source("hotpotqa", "hotpotqa", write(tmp_path / "q.jsonl", rows))
    ledger = Ledger(tmp_path / "l.sqlite")

    class Backend:
        model = "openai:m"

        async def complete(self, messages, sampling):
            return Completion('{"documents": [1]}', 100, 7)

        async def close(self):
            pass

    async def fill():
        teacher = LLMTeacher(LedgerClient(Backend(), ledger))
        for question in list(read_questions(source.location))[:20]:
            await teacher.helpful_documents(question)

    before = estimate(source, tmp_path)
    assert (before.calls, before.known) == (40 + 80 + 80, 0)
    asyncio.run(fill())
    found = estimate(source, tmp_path, ledger=ledger)
    ledger.close()
    query, triples = found.stages[QUERY_ROLE], found.stages[TRIPLES_ROLE]
    assert (found.known, query.ratio, triples.ratio) == (20, 0.0, 0.5)
    # Twenty documents of the known questions, and of the forty of the others the half.
    assert (query.calls, query.expected_calls) == (40, 0)
    assert (triples.calls, triples.expected_calls) == (60, 40)
    assert triples.input_tokens == pytest.approx(triples.input_characters / 4 * 40 / 60)
    assert found.calls == 20 + 0 + 40


def test_the_length_of_stored_replies_is_taken_when_there_are_enough():
    few = Stage(calls=10, stored=19, stored_tokens=19 * 50, output_characters=400.0)
    enough = Stage(calls=10, stored=20, stored_tokens=20 * 50, output_characters=400.0)
    assert (few.output_tokens, enough.output_tokens) == (100.0, 500.0)


def test_cost_and_the_limit_that_binds():
    found = Estimate("m", "", Price(2.0, 10.0, "here"))
    found.stages[QUERY_ROLE] = Stage(calls=1000, input_characters=4_000_000, output_characters=400_000.0)
    assert found.tokens == (1_000_000, 100_000)
    assert found.dollars == 3.0
    assert Estimate("m", "").dollars is None
    assert Speed(100, None, 10, 2.0).minutes(1000, 1_100_000) == (10.0, "100 requests a minute")
    assert Speed(None, 10_000, 10, 2.0).minutes(1000, 1_100_000) == (110.0, "10,000 tokens a minute")
    assert Speed(None, None, 10, 6.0).minutes(1000, 1) == (10.0, "10 calls at a time of 6 s each (assumed)")
    assert Speed().minutes(1000, 1) == (0.0, "no limit was given")
