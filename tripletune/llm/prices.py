"""What calls of a language model would cost: the table of a dry run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PRICE = re.compile(r"\d+(\.\d+)?,\d+(\.\d+)?")


def _money(dollars: float) -> str:
    return f"${dollars:,.2f}" if dollars >= 1 or not dollars else f"${dollars:.2g}"


def cost_lines(stages: Mapping[str, Sequence[float]], price: str | None, counted: str) -> list[str]:
    """A table of calls, tokens and cost by stage, for a dry run; `counted` says how tokens are counted.

    `stages` maps each role to its maximum numbers of calls, input tokens and output tokens.
    """
    if price and not _PRICE.fullmatch(price):
        raise ValueError(f"--price {price}: write dollars per million tokens as IN,OUT, for example 0.15,0.6")
    dollars = [float(part) for part in price.split(",")] if price else None
    lines = [f"{'stage, at most':16}{'calls':>14}{'input tokens':>18}{'output tokens':>18}{'cost':>14}"]
    for role, (calls, read, written) in {**stages, "all": [sum(one) for one in zip(*stages.values())]}.items():
        cost = "-" if dollars is None else _money((read * dollars[0] + written * dollars[1]) / 1e6)
        lines.append(f"{role:16}{calls:>14,.0f}{read:>18,.0f}{written:>18,.0f}{cost:>14}")
    lines += [
        f"Tokens are counted {counted}.",
        "Replies in the ledger cost nothing. Repair turns are not counted.",
    ]
    if dollars is None:
        lines.append("To see the cost, give the model's price: --price IN,OUT in dollars per million tokens.")
    return lines
