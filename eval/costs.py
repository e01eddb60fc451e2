"""The cost of a `tripletune eval run` in calls, tokens and money, for all calls and for those that were not sent.

Answering is counted per question. Indexing (calls that read passages into triples) is counted once per corpus. Both
include calls that the ledger answered.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tripletune.core.calls import in_role
from tripletune.eval.metrics._labels import refuses
from tripletune.eval.results import ResultLog, mean_recalls, recalls_of
from tripletune.eval.statistics import bootstrap_mean, bootstrap_means
from tripletune.llm.question_client import reads_passages

Prices = Mapping[str, tuple[float, float, float]]
PRICE_HELP = (
    "dollars per million tokens read and written, for example 0.15,0.6, or ROLE=0.15,0.6; a third number is for "
    "prompts in the provider's cache (default: a tenth of the first number); repeatable"
)
# Price of writing a token into the provider's cache, as a multiple of the price of a token read.
_WRITING = 1.25
# Sums of all calls; the prefix "cached_" marks the part that the ledger or another question's equal call answered.
COSTS = ("calls", "prompt_tokens", "completion_tokens")
# Tokens read plus four times the tokens written: the cost of a model in the papers' tables.
WEIGHTED = "weighted_tokens"
_SECONDS = ("seconds", "structuring_seconds")
_TRUNCATED = ("truncated_triples", "truncated_words")
_PRICE = re.compile(r"(?:([\w.]+)=)?(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)(?:,(\d+(?:\.\d+)?))?")


def read_prices(texts: Sequence[str]) -> Prices:
    """Dollars per million tokens read, written, and read from the provider's cache, by role.

    A text is `ROLE=IN,OUT` or `ROLE=IN,OUT,CACHED`; a text without a role is for all other roles, under "".
    """
    matches = {text: _PRICE.fullmatch(text) for text in texts}
    if wrong := [text for text, match in matches.items() if match is None]:
        raise ValueError(
            f"--price {wrong[0]}: write dollars per million tokens as IN,OUT or ROLE=IN,OUT, for example 0.15,0.6; a "
            "third number is the price of cached prompts, by default a tenth of IN: 0.15,0.6,0.075"
        )
    found = ((match[1] or "", float(match[2]), float(match[3]), match[4]) for match in matches.values() if match)
    return {role: (read, out, read / 10 if cached is None else float(cached)) for role, read, out, cached in found}


def unused_roles(named: Iterable[str], met: Iterable[str]) -> list[str]:
    """Roles of `--price` or `--llm` that no call has; "cirag" also covers roles such as "cirag.integrate"."""
    return [role for role in named if role and not any(in_role({role: True}, one) for one in met)]


def spent(trace: Mapping[str, Any], prices: Prices) -> dict[str, dict[str, Any]]:
    """Calls, tokens and (with a price) dollars of each role, in all and the cached part."""
    tokens = trace["details"].get("tokens", {}).items()
    own = {role: (trace["tallies"].get(f"calls.{role}", 0), *counts) for role, counts in tokens}
    return _priced(own, trace.get("cached", {}), prices)


def _priced(every: Mapping[str, Sequence[int]], cached: Mapping[str, Sequence[int]], prices: Prices) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for role, counts in every.items():
        parts = {"": counts, "cached_": cached.get(role, (0, 0, 0))}
        found[role] = {f"{part}{name}": n for part, counts in parts.items() for name, n in zip(COSTS, counts)}
        if price := in_role(prices, role, prices.get("")):
            for part, (_, *tokens) in parts.items():
                # Some of the tokens were read from the provider's cache, and some were written into it.
                read, written, hits, puts = (*tokens, 0, 0)[:4]
                whole = read - hits - puts + _WRITING * puts
                found[role][f"{part}dollars"] = (price[0] * whole + price[1] * written + price[2] * hits) / 1e6
    return found


class Costs:
    """Sums over the traces of a run: `questions` for answering (also by `roles`), `indexing` for reading the corpus.

    Calls of Graph-LLMs have no role, so they have no price and are never cached. Older runs note no tokens per call, so
    their reading of the corpus is counted per question.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices, self._graph = prices, False
        names = (*COSTS, "dollars") if prices else COSTS
        self.questions = Counter(dict.fromkeys((*names, *(f"cached_{name}" for name in names)), 0))
        self.indexing = self.questions.copy()
        self.roles: dict[str, Counter[str]] = {}
        self._seen: set[str] = set()

    def add(self, trace: Mapping[str, Any]) -> dict[str, Any]:
        """Add a question's trace, in the form of `Trace.to_json`, and return the cost of the question's own calls."""
        own = Counter({**dict.fromkeys(self.questions, 0), **{name: trace[name] for name in COSTS}})
        for role, costs in spent(trace, self._prices).items():
            sums = self.roles.setdefault(role, Counter())
            if reads_passages(role):
                self.indexing.update(self._once(trace, role))
                own.subtract({name: costs[name] for name in COSTS})
            else:
                sums.update(costs)
                own.update({name: value for name, value in costs.items() if name not in COSTS})
        self.questions.update(own)
        if not self._graph:
            # Every question notes the cost of the corpus's one graph; the first notes which of its calls were sent.
            index = _priced(trace["details"].get("index", {}), trace.get("cached", {}), self._prices)
            for role, costs in index.items():
                self._graph = True
                self.roles.setdefault(role, Counter())
                self.indexing.update(costs)
        return own

    def _once(self, trace: Mapping[str, Any], role: str) -> dict[str, Any]:
        """The cost of a question's calls that read passages, without those of earlier questions."""
        details, cached = trace["details"], trace.get("cached", {}).get(role, ())
        every, once = [trace["tallies"][f"calls.{role}"], *details["tokens"][role]], Counter[int]()
        for key, *tokens in details.get("read", {}).get(role) or [["", *every[1:]]]:
            if not key or key not in self._seen:
                self._seen.add(key)
                once.update(dict(enumerate([1, *tokens])))
        if role not in details.get("read", {}):
            once[0] = every[0]
        # The number of sent calls is known for all calls together: the other calls that count were not sent.
        spared = [once[n] - all_ + (cached[n] if n < len(cached) else 0) for n, all_ in enumerate(every)]
        return _priced({role: [once[n] for n in range(len(every))]}, {role: spared}, self._prices)[role]


def weighted(costs: Mapping[str, Any]) -> dict[str, Any]:
    """Add the papers' weighted sum of tokens to costs."""
    return {**costs, WEIGHTED: costs["prompt_tokens"] + 4 * costs["completion_tokens"]}


def summarise_questions(log: ResultLog, names: tuple[str, ...], prices: Prices) -> dict[str, Any]:
    """Metrics of all rows of `tripletune eval run`; `names` are the scores, the headline first."""
    scores: dict[str, list[float]] = {name: [] for name in names}
    by_type: dict[str, list[float]] = {}
    stops, actions, tallies, sums = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    recalls: list[dict[str, float]] = []
    seconds, costs, unknown = Counter[str](), Costs(prices), set[str]()
    for row in log.rows():
        trace, steps = row["trace"], row["trace"]["steps"]
        for name in names if row["scores"] else ():
            scores[name].append(row["scores"][name])
            if name == names[0]:
                by_type.setdefault(row["type"] or "all", []).append(row["scores"][name])
        recalls.append(recalls_of(row))
        sums.update([] if row["scores"] else ["without_gold"])
        stops[trace["stop_reason"] or "error"] += 1
        actions.update(action["action"] or "malformed" for action in trace["actions"])
        tallies.update(trace["tallies"])
        sums.update({
            "errors": int(bool(row["error"])),
            "refusals": int(refuses(row["prediction"])),
            "malformed_plans": trace["malformed"],
            "unexpected_plans": trace["unexpected"],
            "rounds": len(steps),
            "passages": sum(len(step["passages"]) for step in steps),
            "passages_without_triples": sum(step["passages_without_triples"] for step in steps),
            "triples": sum(len(step["triples"]) for step in steps),
            **{name: trace[name] for name in _TRUNCATED},
        })  # fmt: skip
        seconds.update({name: trace.get(name, 0.0) for name in _SECONDS})
        costs.add(trace)
        unknown.update(trace["details"].get("unknown", ()))  # in answers of another program
    total = stops.total()
    unknown |= {WEIGHTED, "dollars"} if unknown & {*COSTS[1:]} else set()
    every = weighted(costs.questions) | {name: sums[name] for name in _TRUNCATED}
    cost = {name: value for name, value in every.items() if not name.endswith((*unknown,))}
    listed = {"stop_reasons": stops, "actions": actions, "tallies": tallies}
    return {
        "primary": names[0],
        "questions": total,
        "metrics": bootstrap_means(scores),
        "by_type": {kind: bootstrap_mean(values) for kind, values in sorted(by_type.items())},
        "recall": mean_recalls(recalls) if sums["rounds"] else {},
        "counts": {name: count for name, count in sums.items() if name not in _TRUNCATED}
        | {name: dict(sorted(counter.items())) for name, counter in listed.items()},
        "cost": cost,
        "cost_per_question": {name: round(value / total, 6 if "dollars" in name else 3) for name, value in cost.items()}
        | {name: round(seconds[name] / total, 4) for name in _SECONDS if not name.endswith((*unknown,))},
        "indexing": {} if "dollars" in unknown else weighted(costs.indexing),
        "roles": list(costs.roles),
    }
