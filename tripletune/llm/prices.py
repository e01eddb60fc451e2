"""What calls of a language model would cost: the table of a dry run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The backend whose provider takes half the price.
BATCH = "batch"
_PRICE = re.compile(r"\d+(\.\d+)?,\d+(\.\d+)?")


def _dollars_as_text(dollars: float) -> str:
    """An amount with two decimals, or with two digits if it is below a dollar."""
    if 0 < dollars < 1:
        return f"${dollars:.2g}"
    return f"${dollars:,.2f}"


class _CallTotals(NamedTuple):
    """Calls, tokens read and tokens written."""

    calls: float
    read: float
    written: float

    def cells(self, prices: Sequence[float] | None) -> str:
        """The cells of a row, with the cost if the prices of tokens are known."""
        return f"{self.calls:>14,.0f}{self.read:>18,.0f}{self.written:>18,.0f}{self.cost_text(prices):>14}"

    def cost_text(self, prices: Sequence[float] | None) -> str:
        """The cost as text; "-" without prices, which are dollars per million tokens read and written."""
        if prices is None:
            return "-"
        return _dollars_as_text((self.read * prices[0] + self.written * prices[1]) / 1e6)


def prices_per_million(price: str | None, batch: bool = False) -> list[float] | None:
    """Dollars per million input tokens and per million output tokens, from `--price IN,OUT`; None without it.

    Programs call it before they count tokens, which may take minutes.

    Args:
        price: The two numbers as text.
        batch: Whether the calls go through a Batch API, at half the price.
    """
    if not price:
        return None
    if not _PRICE.fullmatch(price):
        raise ValueError(f"--price {price}: write dollars per million tokens as IN,OUT, for example 0.15,0.6")
    prices = [float(dollars) for dollars in price.split(",")]
    return [dollars / 2 for dollars in prices] if batch else prices


def cost_lines(
    stages: Mapping[str, Sequence[float]],
    prices: Sequence[float] | None,
    counted: str,
    batch: bool = False,
    once: str = "one call each",
    tries: float | None = None,
) -> list[str]:
    """A table of calls, tokens and cost by stage, for a dry run, and the range between the best and the worst case.

    Args:
        stages: Numbers of calls, input tokens and output tokens by role, if no reply is rejected.
        prices: Dollars per million input and output tokens (`prices_per_million`); None leaves the cost out.
        counted: How the tokens are counted, behind "Tokens are counted".
        batch: Whether the calls go through a Batch API, for which `prices` are half of the given ones.
        once: What `stages` count, for the head of the table.
        tries: How often all stages of an item may be repeated (`--tries`); None if they are not.
    """
    least = _CallTotals(*(sum(column) for column in zip(*stages.values(), strict=True)))
    times = tries or 1.0
    # A repair turn reads the first call's prompt and reply again.
    most = _CallTotals(2 * times * least.calls, times * (2 * least.read + least.written), 2 * times * least.written)
    worst = "every reply repaired"
    if tries is not None:
        worst = f"--tries {tries:g}, {worst}"
    width = max(26, len(worst) + 1)
    lines = [f"{once:{width}}{'calls':>14}{'input tokens':>18}{'output tokens':>18}{'cost':>14}"]
    for role, numbers in stages.items():
        lines.append(f"{role:{width}}{_CallTotals(*numbers).cells(prices)}")
    lines += [f"{'all':{width}}{least.cells(prices)}", f"{worst:{width}}{most.cells(prices)}"]
    span = f"{least.calls:,.0f} to {most.calls:,.0f} calls"
    if prices is not None:
        span += f", {least.cost_text(prices)} to {most.cost_text(prices)}"
    lines += [
        f"So {span}: from no rejected reply to a repair turn for each.",
        f"Tokens are counted {counted}. Replies in the ledger cost nothing.",
    ]
    if batch and prices is not None:
        lines.append("The cost is half of the given price, which is what Batch APIs take.")
    if prices is None:
        lines.append("To see the cost, give the model's price: --price IN,OUT in dollars per million tokens.")
    return lines
