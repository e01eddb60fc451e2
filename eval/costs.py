"""The cost of a `tripletune eval run` in calls, tokens and money, for all calls and for those that were not sent.

Answering is counted per question. Indexing (calls that read passages into triples) is counted once per corpus. Both
include calls that the ledger answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tripletune.core.calls import in_role
from tripletune.eval import Task
from tripletune.eval.metrics._labels import refuses
from tripletune.eval.result_log import ResultLog
from tripletune.eval.results import RunCounts, RunMetrics, mean_recalls, recalls_of
from tripletune.eval.results.unreadable import UnreadableCounter
from tripletune.eval.statistics import bootstrap_mean, bootstrap_means
from tripletune.llm.question_client import reads_passages
from tripletune.rag.costs import CACHED, DOLLARS, WEIGHTED, Cost, Prices, Usage, cached_usage, costs_by_role, price_of
from tripletune.rag.results import ResultRow, StoredTrace

_SECONDS = ("seconds", "structuring_seconds")


def unused_roles(named: Iterable[str], called: Iterable[str]) -> list[str]:
    """Roles of `--price` or `--llm` that no call has; "cirag" also covers roles such as "cirag.integrate".

    A misspelled role would otherwise change nothing, without a word.
    """
    unused = []
    for role in named:
        covers_calls = any(in_role({role: True}, called_role, default=False) for called_role in called)
        if role and not covers_calls:
            unused.append(role)
    return unused


class Costs:
    """Sums over the traces of a run, to which `add` adds one question after the other.

    Calls of Graph-LLMs have no role, so they have no price and are never cached. Older runs note no tokens per call, so
    their reading of the corpus is counted per question.

    Attributes:
        questions: The cost of answering all questions.
        indexing: The cost of reading the corpus, each passage once.
        roles: `questions` by role; None for roles that only read the corpus.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self.questions = self._no_cost()
        self.indexing = self._no_cost()
        self.roles: dict[str, Cost | None] = {}
        self._graph_is_counted = False
        # Keys of the calls that have read a passage for an earlier question.
        self._read: set[str] = set()

    def _no_cost(self) -> Cost:
        """No calls; with prices the dollars start at 0, since calls without a price (of Graph-LLMs) cost nothing."""
        return Cost(dollars=0.0, cached_dollars=0.0) if self._prices else Cost()

    def add(self, trace: StoredTrace) -> Cost:
        """Add a question's trace, and return the cost of the question's own calls.

        Calls that read passages for triples are indexing: other questions use their triples, too.

        The total starts as that of the trace, as it includes calls without a role (of Graph-LLMs), and what the reading
        roles cost is taken off again. The sums depend on the order of the traces only in which question is the first
        to have read a passage. Guarded by tests/eval/test_costs.py.
        """
        own = self._no_cost()
        own.total = Usage(trace.calls, trace.prompt_tokens, trace.completion_tokens)
        for role, cost in costs_by_role(trace, self._prices).items():
            self.roles.setdefault(role, None)
            if reads_passages(role):
                self.indexing += self._count_reading(trace, role)
                own.total -= cost.total
            else:
                self.roles[role] = (self.roles[role] or Cost()) + cost
                # The tokens are in the total already.
                own += Cost(Usage(), cost.cached, cost.dollars, cost.cached_dollars)
        self.questions += own
        self._count_graph_once(trace)
        return own

    def _count_graph_once(self, trace: StoredTrace) -> None:
        """Add the cost of the corpus's one graph to `indexing`, from the first trace that notes it.

        Every question notes the graph's cost, but only the first one which of its calls were sent.
        """
        if self._graph_is_counted:
            return
        for role, counts in trace.index.items():
            self._graph_is_counted = True
            self.roles.setdefault(role, None)
            self.indexing += Cost.of(Usage(*counts), cached_usage(trace, role), price_of(role, self._prices))

    def _count_reading(self, trace: StoredTrace, role: str) -> Cost:
        """Mark a question's calls that read passages as counted, and return the cost of those that were not yet.

        Questions that find the same passage wait for one call, and each of them notes it in its trace. So the call has
        a key, and counts once.
        """
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
        sent = noted - cached_usage(trace, role)
        return Cost.of(counted, counted - sent, price_of(role, self._prices))


def summarise_questions(log: ResultLog, system: str, task: Task, prices: Prices) -> RunMetrics:
    """Metrics of all rows of `tripletune eval run`, read one by one.

    Args:
        log: The rows of the finished run.
        system: The system's name.
        task: The task, whose metrics each row was scored by.
        prices: Dollars per million tokens by role; empty: no dollars.
    """
    summary = _RunSums(task.metrics, prices)
    for row in log.rows():
        summary.add(ResultRow.from_json(row))
    return summary.metrics(system, task.name)


class _RunSums:
    """Sums over the rows of a run, added one by one, since their traces may not fit into memory.

    A failed question counts with score 0 in every mean. A question without gold answers has no scores and
    counts in none of these means. `metrics` is called once, after the last row.

    Args:
        names: The scores, the headline first.
    """

    def __init__(self, names: Sequence[str], prices: Prices) -> None:
        self._names = names
        self._scores: dict[str, list[float]] = {name: [] for name in names}
        # Of the questions whose answer was given.
        self._answered: dict[str, list[float]] = {name: [] for name in names}
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
        self._unreadable = UnreadableCounter()

    def add(self, row: ResultRow) -> None:
        """Add a question; its type gets the headline score only.

        A question without a gold answer is asked but not scored, and counted as such.
        """
        self._questions += 1
        if row.scores:
            for name in self._names:
                self._scores[name].append(row.scores[name])
                if not row.trace.withheld:
                    self._answered[name].append(row.scores[name])
            self._by_type.setdefault(row.type or "all", []).append(row.scores[self._names[0]])
        elif not row.answers:
            self._counts.without_gold += 1
        self._counts.errors += bool(row.error)
        withheld = bool(row.trace.withheld)
        self._counts.abstentions += withheld
        self._counts.refusals += refuses(row.prediction) and not withheld
        recalls = recalls_of(row)
        self._recalls.append(recalls)
        self._counts.without_search += bool(recalls) and not row.error and not row.trace.steps
        self._add_trace(row.trace)

    def _add_trace(self, trace: StoredTrace) -> None:
        """Add what the system did for a question to all sums, also for a failed one, because its calls were paid."""
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
        self._unreadable.add(trace)
        self._unknown |= trace.unknown

    def metrics(self, system: str, task: str) -> RunMetrics:
        """The metrics of all questions.

        A cost that some answer does not say is left out, also the costs that are computed from it (weighted tokens,
        dollars): a sum without it would be too small.
        """
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
            answered=bootstrap_means(self._answered) if counts.abstentions else {},
            counts=counts,
            cost=cost,
            cost_per_question=self._per_question(cost, unknown),
            indexing={} if DOLLARS in unknown else self._costs.indexing.to_json(),
            roles=list(self._costs.roles),
            unreadable=self._unreadable.roles_to_report(),
        )

    def _per_question(self, cost: Mapping[str, float], unknown: set[str]) -> dict[str, float]:
        """Means of costs and seconds over the questions; dollars get more digits, as a call costs a fraction of a cent.

        Args:
            cost: Sums by name, without the unknown ones.
            unknown: Names that some answer does not say, of which "seconds" concerns the seconds here.
        """
        means = {}
        for name, value in cost.items():
            digits = 6 if name.endswith(DOLLARS) else 3
            means[name] = round(value / self._questions, digits)
        # Unknown seconds make their part unknown, too.
        if "seconds" not in unknown:
            means |= {name: round(value / self._questions, 4) for name, value in self._seconds.items()}
        return means
