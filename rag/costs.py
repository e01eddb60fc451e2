"""The cost of a question in calls, tokens and money, by the role of the calls.

Costs include the calls that the ledger answered, which were not sent; what they would have cost is also counted apart.
`eval/costs.py` sums the costs of all questions of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tripletune.core.calls import in_role
from tripletune.llm.prices import BATCH
from tripletune.rag import Trace

PRICE_HELP = (
    "dollars per million tokens read and written, for example 0.15,0.6, or ROLE=0.15,0.6; a third number is for "
    "prompts in the provider's cache (default: a tenth of the first number); repeatable"
)
# Price of writing a token into the provider's cache, as a multiple of the price of a token read.
_WRITING = 1.25
# Names of costs in JSON; the prefix "cached_" marks the part that the ledger or another question's equal call answered.
COSTS = ("calls", "prompt_tokens", "completion_tokens")
CACHED = "cached_"
# Tokens read plus four times the tokens written: the cost of a model in the papers' tables.
WEIGHTED = "weighted_tokens"
DOLLARS = "dollars"
_PRICE = re.compile(r"(?:([\w.]+)=)?(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)(?:,(\d+(?:\.\d+)?))?")


class Price(NamedTuple):
    """Dollars per million tokens that are read, written, and read from the provider's cache."""

    read: float
    written: float
    from_cache: float


# By role; "" is for all other roles.
Prices = Mapping[str, Price]


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls of a model and their tokens, as a trace notes them.

    Attributes:
        read: Tokens of the prompts, including `from_cache` and `into_cache`.
        written: Tokens of the replies.
        from_cache: Tokens of prompts that were in the provider's cache.
        into_cache: Tokens of prompts that were written into the provider's cache.
    """

    calls: int = 0
    read: int = 0
    written: int = 0
    from_cache: int = 0
    into_cache: int = 0

    def __add__(self, other: Usage) -> Usage:
        """Both together, for sums over roles and questions."""
        return Usage(
            self.calls + other.calls,
            self.read + other.read,
            self.written + other.written,
            self.from_cache + other.from_cache,
            self.into_cache + other.into_cache,
        )

    def __sub__(self, other: Usage) -> Usage:
        """This without `other`, a part of it: what was sent is all calls without those that the ledger answered."""
        return Usage(
            self.calls - other.calls,
            self.read - other.read,
            self.written - other.written,
            self.from_cache - other.from_cache,
            self.into_cache - other.into_cache,
        )

    def dollars(self, price: Price) -> float:
        """What these calls cost; tokens of prompts have three prices: fresh, from the cache, into the cache."""
        fresh = self.read - self.from_cache - self.into_cache
        like_fresh = fresh + _WRITING * self.into_cache
        return (price.read * like_fresh + price.written * self.written + price.from_cache * self.from_cache) / 1e6


@dataclass(slots=True)
class Cost:
    """What calls cost in all, and the part of it that was not sent (`cached`); no dollars without a price."""

    total: Usage = field(default_factory=Usage)
    cached: Usage = field(default_factory=Usage)
    dollars: float | None = None
    cached_dollars: float | None = None

    @classmethod
    def of(cls, total: Usage, cached: Usage, price: Price | None) -> Cost:
        """The cost of some calls at a price; without a price, dollars are not known, which is not 0."""
        if price is None:
            return cls(total, cached)
        return cls(total, cached, total.dollars(price), cached.dollars(price))

    def __add__(self, other: Cost) -> Cost:
        """Both together; see `_sum_of_known` for costs without a price."""
        dollars = _sum_of_known(self.dollars, other.dollars)
        cached_dollars = _sum_of_known(self.cached_dollars, other.cached_dollars)
        return Cost(self.total + other.total, self.cached + other.cached, dollars, cached_dollars)

    @property
    def weighted_tokens(self) -> int:
        """Tokens read plus four times the tokens written."""
        return self.total.read + 4 * self.total.written

    def to_json(self) -> dict[str, float]:
        """The costs by the names that `metrics.json` and reports have."""
        values: dict[str, float] = {}
        for prefix, usage, dollars in (("", self.total, self.dollars), (CACHED, self.cached, self.cached_dollars)):
            for name, number in zip(COSTS, (usage.calls, usage.read, usage.written), strict=True):
                values[f"{prefix}{name}"] = number
            if dollars is not None:
                values[f"{prefix}{DOLLARS}"] = dollars
        values[WEIGHTED] = self.weighted_tokens
        return values


def _sum_of_known(first: float | None, second: float | None) -> float | None:
    """The sum of two costs in dollars; a cost without a price (None) counts nothing, and two of them have no sum."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def read_prices(texts: Sequence[str]) -> Prices:
    """Read `--price` options: dollars per million tokens by role.

    A text is `ROLE=IN,OUT` or `ROLE=IN,OUT,CACHED`; a text without a role is for all other roles, under "".
    """
    prices = {}
    for text in texts:
        match = _PRICE.fullmatch(text)
        if match is None:
            raise ValueError(
                f"--price {text}: write dollars per million tokens as IN,OUT or ROLE=IN,OUT, for example 0.15,0.6; a "
                "third number is the price of cached prompts, by default a tenth of IN: 0.15,0.6,0.075"
            )
        role, read, written, from_cache = match.groups()
        cached_price = float(read) / 10 if from_cache is None else float(from_cache)
        prices[role or ""] = Price(float(read), float(written), cached_price)
    return prices


def with_batch_prices(prices: Prices, backends: Mapping[str, str]) -> Prices:
    """Prices of a run, half of them for roles whose calls go through a Batch API.

    Args:
        backends: Kinds of backends by role; "" is for all other roles.
    """
    halved: dict[str, Price] = {}
    for role in prices.keys() | backends.keys():
        price = price_of(role, prices)
        if price is None:
            continue
        if in_role(backends, role, backends.get("")) == BATCH:
            price = Price(price.read / 2, price.written / 2, price.from_cache / 2)
        halved[role] = price
    return halved


def price_of(role: str, prices: Prices) -> Price | None:
    """The price of a role's calls; None if it is not known."""
    return in_role(prices, role, prices.get(""))


def cached_usage(trace: Trace, role: str) -> Usage:
    """The calls of a role that were not sent, since the ledger or another question's equal call answered them."""
    return Usage(*trace.cached.get(role, ()))


def costs_by_role(trace: Trace, prices: Prices) -> dict[str, Cost]:
    """By role, the cost of the calls for a question, without the corpus's one graph, which all questions share."""
    costs = {}
    for role, tokens in trace.details.get("tokens", {}).items():
        usage = Usage(trace.tallies.get(f"calls.{role}", 0), *tokens)
        costs[role] = Cost.of(usage, cached_usage(trace, role), price_of(role, prices))
    return costs
