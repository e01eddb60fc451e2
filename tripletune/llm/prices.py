"""What calls of a language model would cost: the table of a dry run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# The backend whose provider takes half the price.
BATCH = "batch"
_PRICE = re.compile(r"\d+(\.\d+)?,\d+(\.\d+)?")


def _money(dollars: float) -> str:
    """An amount with two decimals, or with two digits if it is below a dollar."""
    if 0 < dollars < 1:
        return f"${dollars:.2g}"
    return f"${dollars:,.2f}"


def cost_lines(
    stages: Mapping[str, Sequence[float]], price: str | None, counted: str, batch: bool = False
) -> list[str]:
    """A table of calls, tokens and cost by stage, for a dry run.

    Args:
        stages: Maximum numbers of calls, input tokens and output tokens by role.
        price: Dollars per million input tokens and per million output tokens, as `IN,OUT`; None leaves the cost out.
        counted: How the tokens are counted, behind "Tokens are counted".
        batch: Whether the calls go through a Batch API, at half the price.
    """
    if price and not _PRICE.fullmatch(price):
        raise ValueError(f"--price {price}: write dollars per million tokens as IN,OUT, for example 0.15,0.6")
    prices = None
    if price:
        prices = [float(dollars) for dollars in price.split(",")]
        if batch:
            prices = [dollars / 2 for dollars in prices]
    lines = [f"{'stage, at most':16}{'calls':>14}{'input tokens':>18}{'output tokens':>18}{'cost':>14}"]
    totals = [sum(column) for column in zip(*stages.values(), strict=True)]
    for role, (calls, read, written) in {**stages, "all": totals}.items():
        cost = "-"
        if prices is not None:
            cost = _money((read * prices[0] + written * prices[1]) / 1e6)
        lines.append(f"{role:16}{calls:>14,.0f}{read:>18,.0f}{written:>18,.0f}{cost:>14}")
    lines += [
        f"Tokens are counted {counted}.",
        "Replies in the ledger cost nothing. Repair turns are not counted.",
    ]
    if batch and prices is not None:
        lines.append("The cost is half of the given price, which is what Batch APIs take.")
    if prices is None:
        lines.append("To see the cost, give the model's price: --price IN,OUT in dollars per million tokens.")
    return lines
