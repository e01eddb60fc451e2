import pytest

from tests.data_builders.hotpotqa_subq.test_build import hotpot_row, write
from tripletune.data_builders.hotpotqa_subq.estimate import SAMPLE, estimate
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source
from tripletune.data_builders.hotpotqa_subq.teacher import FILTER_ROLE, filter_text, load_subq_prompts


def row(number, supporting=("A", "B")):
    return hotpot_row(number) | {"supporting_facts": [[title, 0] for title in supporting]}


def counted(tmp_path, rows, **options):
    source = Source("hotpotqa", "hotpotqa", write(tmp_path / "q.jsonl", rows))
    number, stages = estimate([source], BuildOptions(str(tmp_path / "out"), **options))
    return number, {role: stage[0] for role, stage in stages.items()}, stages


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        # One document needs no sub-query; a question without supporting passages and a repeated id make no call.
        ({}, (3, 4, 5)),
        ({"first_subquery": "generated"}, (3, 5, 5)),
        ({"triples_from": "f"}, (3, 4, 0)),
        ({"shard": "0/2"}, (2, 2, 3)),
        ({"limit": 1}, (1, 2, 2)),
    ],
)
def test_calls_are_counted_by_formula(tmp_path, options, calls):
    rows = [row(0), row(1), row(2, ("A",)), row(0), row(3, ())]
    number, found, _ = counted(tmp_path, rows, **options)
    assert (number, tuple(found.values())) == (calls[0], calls)


def test_tokens_are_those_of_the_sample(tmp_path):
    rows = [row(100 + number) for number in range(SAMPLE + 50)]
    _, _, stages = counted(tmp_path, rows)
    # All rows are of one length, so the sample gives what all of them would.
    question = next(Source("hotpotqa", "hotpotqa", str(tmp_path / "q.jsonl")).questions(1))
    prompt = len(load_subq_prompts().texts["subq_filter"]) + len(filter_text(question, [0, 1]))
    assert stages[FILTER_ROLE] == pytest.approx((SAMPLE + 50, (SAMPLE + 50) * prompt / 4, (SAMPLE + 50) * 10))
    assert counted(tmp_path, rows)[2] == stages
