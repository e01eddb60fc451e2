"""The cost of a `tripletune eval run` in calls, tokens and money, for all calls and for those that were not sent.

Answering is counted per question. Indexing (calls that read passages into triples) is counted once per corpus. Both
include calls that the ledger answered.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from tripletune.core.calls import in_role
from tripletune.eval import Task
from tripletune.eval.metrics._labels import refuses
from tripletune.eval.result_log import ResultLog
from tripletune.eval.results import RunCounts, RunMetrics, mean_recalls, recalls_of
from tripletune.eval.statistics import bootstrap_mean, bootstrap_means
from tripletune.llm.question_client import reads_passages
from tripletune.rag.results import ResultRow, StoredTrace

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
_SECONDS = ("seconds", "structuring_seconds")
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
        return Usage(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, item.name) - getattr(other, item.name) for item in fields(self)))

    def dollars(self, price: Price) -> float:
        """What these calls cost."""
        whole = self.read - self.from_cache - self.into_cache + _WRITING * self.into_cache
        return (price.read * whole + price.written * self.written + price.from_cache * self.from_cache) / 1e6


@dataclass(slots=True)
class Cost:
    """What calls cost in all, and the part of it that was not sent (`cached`); no dollars without a price."""

    total: Usage = field(default_factory=Usage)
    cached: Usage = field(default_factory=Usage)
    dollars: float | None = None
    cached_dollars: float | None = None

    @classmethod
    def of(cls, total: Usage, cached: Usage, price: Price | None) -> Cost:
        """The cost of some calls at a price."""
        if price is None:
            return cls(total, cached)
        return cls(total, cached, total.dollars(price), cached.dollars(price))

    def __add__(self, other: Cost) -> Cost:
        dollars = _added(self.dollars, other.dollars)
        cached_dollars = _added(self.cached_dollars, other.cached_dollars)
        return Cost(self.total + other.total, self.cached + other.cached, dollars, cached_dollars)

    @property
    def weighted_tokens(self) -> int:
        """Tokens read plus four times the tokens written."""
        return self.total.read + 4 * self.total.written

    def to_json(self) -> dict[str, float]:
        """The costs by the names that `metrics.json` and reports have."""
        values: dict[str, float] = {}
        for prefix, usage, dollars in (("", self.total, self.dollars), (CACHED, self.cached, self.cached_dollars)):
            numbers = (usage.calls, usage.read, usage.written)
            values |= {f"{prefix}{name}": number for name, number in zip(COSTS, numbers)}
            if dollars is not None:
                values[f"{prefix}{DOLLARS}"] = dollars
        values[WEIGHTED] = self.weighted_tokens
        return values


def _added(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def read_prices(texts: Sequence[str]) -> Prices:
    """Dollars per million tokens by role.

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


def unused_roles(named: Iterable[str], met: Iterable[str]) -> list[str]:
    """Roles of `--price` or `--llm` that no call has; "cirag" also covers roles such as "cirag.integrate"."""
    unused = []
    for role in named:
        covers_calls = any(in_role({role: True}, called) for called in met)
        if role and not covers_calls:
            unused.append(role)
    return unused


def spent(trace: StoredTrace, prices: Prices) -> dict[str, Cost]:
    """The cost of each role's calls for a question, without the corpus's one graph."""
    costs = {}
    for role, tokens in trace.tokens.items():
        usage = Usage(trace.tallies.get(f"calls.{role}", 0), *tokens)
        costs[role] = Cost.of(usage, _not_sent(trace, role), _price_of(role, prices))
    return costs


def _price_of(role: str, prices: Prices) -> Price | None:
    return in_role(prices, role, prices.get(""))


def _not_sent(trace: StoredTrace, role: str) -> Usage:
    """The calls of a role that the ledger, or another question's equal call, answered."""
    return Usage(*trace.cached.get(role, ()))


class Costs:
    """Sums over the traces of a run.

    Calls of Graph-LLMs have no role, so they have no price and are never cached. Older runs note no tokens per call, so
    their reading of the corpus is counted per question.

    Attributes:
        questions: The cost of answering all questions.
        indexing: The cost of reading the corpus, each passage once.
        roles: `questions` by role; None for roles that only read the corpus.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self.questions = self._nothing()
        self.indexing = self._nothing()
        self.roles: dict[str, Cost | None] = {}
        self._graph_is_counted = False
        # Keys of the calls that have read a passage for an earlier question.
        self._read: set[str] = set()

    def _nothing(self) -> Cost:
        # With prices, the dollars of calls without a price are 0.
        return Cost(dollars=0.0, cached_dollars=0.0) if self._prices else Cost()

    def add(self, trace: StoredTrace) -> Cost:
        """Add a question's trace, and return the cost of the question's own calls."""
        own = self._nothing()
        # This includes calls without a role, whose tokens are in no role's.
        own.total = Usage(trace.calls, trace.prompt_tokens, trace.completion_tokens)
        for role, cost in spent(trace, self._prices).items():
            self.roles.setdefault(role, None)
            if reads_passages(role):
                self.indexing += self._reading(trace, role)
                own.total -= cost.total
            else:
                self.roles[role] = (self.roles[role] or Cost()) + cost
                own += Cost(Usage(), cost.cached, cost.dollars, cost.cached_dollars)
        self.questions += own
        self._add_graph(trace)
        return own

    def _add_graph(self, trace: StoredTrace) -> None:
        """Count the corpus's one graph: every question notes its cost, and the first one which calls were sent."""
        if self._graph_is_counted:
            return
        for role, counts in trace.index.items():
            self._graph_is_counted = True
            self.roles.setdefault(role, None)
            self.indexing += Cost.of(Usage(*counts), _not_sent(trace, role), _price_of(role, self._prices))

    def _reading(self, trace: StoredTrace, role: str) -> Cost:
        """The cost of a question's calls that read passages, without calls that an earlier question noted."""
        noted = Usage(trace.tallies[f"calls.{role}"], *trace.tokens[role])
        calls = trace.reading.get(role)
        if calls is None:
            counted = noted
        else:
            counted = Usage()
            for key, *tokens in calls:
                # Calls without a key are never shared.
                if not key or key not in self._read:
                    self._read.add(key)
                    counted += Usage(1, *tokens)
        # How many calls were sent is known for all together, so those that count and were not sent are the others.
        sent = noted - _not_sent(trace, role)
        return Cost.of(counted, counted - sent, _price_of(role, self._prices))


def summarise_questions(log: ResultLog, system: str, task: Task, prices: Prices) -> RunMetrics:
    """Metrics of all rows of `tripletune eval run`."""
    summary = _Summary(task.metrics, prices)
    for row in log.rows():
        summary.add(ResultRow.from_json(row))
    return summary.metrics(system, task.name)


class _Summary:
    """Sums over the rows of a run; `names` are the scores, the headline first."""

    def __init__(self, names: Sequence[str], prices: Prices) -> None:
        self._names = names
        self._scores: dict[str, list[float]] = {name: [] for name in names}
        self._by_type: dict[str, list[float]] = {}
        self._recalls: list[dict[str, float]] = []
        self._questions = 0
        self._counts = RunCounts()
        self._stops: Counter[str] = Counter()
        self._actions: Counter[str] = Counter()
        self._tallies: Counter[str] = Counter()
        self._truncated = {"truncated_triples": 0, "truncated_words": 0}
        self._seconds = dict.fromkeys(_SECONDS, 0.0)
        self._costs = Costs(prices)
        # What answers of another program do not say.
        self._unknown: set[str] = set()

    def add(self, row: ResultRow) -> None:
        """Add a question."""
        self._questions += 1
        if row.scores:
            for name in self._names:
                self._scores[name].append(row.scores[name])
            self._by_type.setdefault(row.type or "all", []).append(row.scores[self._names[0]])
        else:
            self._counts.without_gold += 1
        self._counts.errors += bool(row.error)
        self._counts.refusals += refuses(row.prediction)
        self._recalls.append(recalls_of(row))
        self._add_trace(row.trace)

    def _add_trace(self, trace: StoredTrace) -> None:
        self._stops[trace.stop_reason or "error"] += 1
        self._actions.update(action.action or "malformed" for action in trace.actions)
        self._tallies.update(trace.tallies)
        self._counts.malformed_plans += trace.malformed
        self._counts.unexpected_plans += trace.unexpected
        self._counts.rounds += len(trace.steps)
        for step in trace.steps:
            self._counts.passages += len(step.passages)
            self._counts.passages_without_triples += step.passages_without_triples
            self._counts.triples += len(step.triples)
        self._truncated["truncated_triples"] += trace.truncated_triples
        self._truncated["truncated_words"] += trace.truncated_words
        self._seconds["seconds"] += trace.seconds
        self._seconds["structuring_seconds"] += trace.structuring_seconds
        self._costs.add(trace)
        self._unknown |= trace.unknown

    def metrics(self, system: str, task: str) -> RunMetrics:
        """The metrics of all questions."""
        unknown = set(self._unknown)
        if unknown & {"prompt_tokens", "completion_tokens"}:
            unknown |= {WEIGHTED, DOLLARS}
        counts = self._counts
        counts.stop_reasons = dict(sorted(self._stops.items()))
        counts.actions = dict(sorted(self._actions.items()))
        counts.tallies = dict(sorted(self._tallies.items()))
        cost = self._costs.questions.to_json() | self._truncated
        for name in list(cost):
            # The same holds for the part that was not sent, whose name has a prefix.
            if name.removeprefix(CACHED) in unknown:
                del cost[name]
        return RunMetrics(
            system=system,
            task=task,
            primary=self._names[0],
            questions=self._questions,
            metrics=bootstrap_means(self._scores),
            by_type={kind: bootstrap_mean(scores) for kind, scores in sorted(self._by_type.items())},
            recall=mean_recalls(self._recalls) if counts.rounds else {},
            counts=counts,
            cost=cost,
            cost_per_question=self._per_question(cost, unknown),
            indexing={} if DOLLARS in unknown else self._costs.indexing.to_json(),
            roles=list(self._costs.roles),
        )

    def _per_question(self, cost: Mapping[str, float], unknown: set[str]) -> dict[str, float]:
        means = {}
        for name, value in cost.items():
            digits = 6 if name.endswith(DOLLARS) else 3
            means[name] = round(value / self._questions, digits)
        # Unknown seconds make their part unknown, too.
        if "seconds" not in unknown:
            means |= {name: round(value / self._questions, 4) for name, value in self._seconds.items()}
        return means
