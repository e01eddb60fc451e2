"""The table of a dry run: what is counted, and the range that it may cost."""

import pytest

from tripletune.llm.prices import cost_lines, prices_per_million

STAGES = {"word": [10, 1000, 100], "check": [20, 3000, 40]}


def numbers(lines, name):
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return line.removeprefix(name).split()


@pytest.mark.parametrize(("tries", "name"), [(None, "every reply repaired"), (3.0, "--tries 3, every reply repaired")])
def test_the_range_of_calls_and_dollars(tries, name):
    lines = cost_lines(STAGES, [1000, 10000], "somehow", once="one draft per question", tries=tries)
    times = tries or 1
    assert lines[0].startswith("one draft per question ")
    assert numbers(lines, "all") == ["30", "4,000", "140", "$5.40"]
    read, written = times * (2 * 4000 + 140), times * 2 * 140
    dollars = read / 1000 + written / 100
    assert numbers(lines, name) == [f"{times * 60:.0f}", f"{read:,.0f}", f"{written:,.0f}", f"${dollars:,.2f}"]
    assert any(line.startswith(f"So 30 to {times * 60:.0f} calls, $5.40 to ${dollars:,.2f}: ") for line in lines)


def test_without_price_there_is_no_cost_and_batches_take_half():
    assert "So 30 to 60 calls: from no rejected reply to a repair turn for each." in cost_lines(STAGES, None, "x")
    prices = prices_per_million("1000,10000", batch=True)
    assert prices == [500, 5000]
    assert numbers(cost_lines(STAGES, prices, "x", batch=True), "all")[-1] == "$2.70"
    assert prices_per_million(None) is None
    with pytest.raises(ValueError, match="--price 1: write dollars per million tokens as IN,OUT"):
        prices_per_million("1")
