"""Verdicts of a judge: how its replies are read, and what share of a win two verdicts give."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from tripletune.core.calls import UnusableReply
from tripletune.llm.reply_json import find_json

CRITERIA = ("comprehensiveness", "diversity", "empowerment", "overall")
# For each criterion 1 if the answer of `--data` is better, -1 if the other answer is better, else 0.
Verdict = dict[str, int]
# How a judge names the winner: any 1 or 2 that is no part of a longer number; "Answer 2, since …", unless it goes on
# with "1 and 2"; a word for a tie.
_NUMBER = re.compile(r"(?<!\d)[12](?!\d)")
_LEAD = re.compile(r"\W*(?:answer\W*)?([12])\b(?!\W*(?:and|or|&|/))", re.IGNORECASE)
_TIE = re.compile(r"\b(0|tie|draw|equal|both|neither|same)\b", re.IGNORECASE)


def shares_of_wins(verdicts: Sequence[Verdict | None]) -> dict[str, float]:
    """For each criterion the mean of both verdicts: a win is 1, a tie 0.5; nothing if a verdict is missing.

    Judges favour a position, so one verdict alone would favour the run whose answer it saw there.
    """
    read = [verdict for verdict in verdicts if verdict is not None]
    if len(read) < 2:
        return {}
    shares: dict[str, float] = defaultdict(float)
    for verdict in read:
        for criterion, winner in verdict.items():
            shares[criterion] += (0.5 + winner / 2) / len(read)
    return dict(shares)


def read_winners(text: str, criteria: Sequence[str] = CRITERIA) -> Verdict:
    """Read a judge's JSON; for each criterion return 1 for the first answer, -1 for the second, 0 for a tie.

    The answers are those of the request, in the order in which the judge saw them: the caller turns the signs of a
    swapped pair. A value of the JSON is a number, "Answer 2", a word for a tie, or an object with a "winner"
    (LightRAG's prompt). All criteria are needed.

    Raises:
        UnusableReply: A criterion has no winner; the judge is asked again with the missing criteria.
    """
    advice = f"write one JSON object with the keys {', '.join(criteria)}, each 1, 2 or 0"
    reply = find_json(text, dict, advice=advice)
    winners: Verdict = {}
    # The shortest key first, so that "overall" comes before "overall_explanation".
    for key in sorted(reply, key=lambda key: len(str(key))):
        criterion = _criterion_of(str(key), criteria)
        winner = _winner_in(reply[key])
        if criterion is not None and criterion not in winners and winner is not None:
            winners[criterion] = winner
    missing = [criterion for criterion in criteria if criterion not in winners]
    if missing:
        raise UnusableReply("no_verdict", f"The reply names no winner for {', '.join(missing)}; {advice}.")
    return {criterion: winners[criterion] for criterion in criteria}


def _criterion_of(key: str, criteria: Sequence[str]) -> str | None:
    """The criterion that a key of a judge's JSON names, such as "Overall Winner"."""
    for criterion in criteria:
        if key.lower().startswith(criterion.lower()):
            return criterion
    return None


def _winner_in(value: object) -> int | None:
    """The winner in a value of a judge's JSON: 1, -1 for the second answer, 0 for a tie; None if that is unclear.

    What a value starts with counts, since an explanation behind it may name both answers. Else a single number counts.
    """
    if isinstance(value, dict):
        value = {str(key).lower(): inner for key, inner in value.items()}.get("winner")
    text = str(value)
    lead = _LEAD.match(text)
    numbers = {lead[1]} if lead else set(_NUMBER.findall(text))
    if numbers == {"1"}:
        return 1
    if numbers == {"2"}:
        return -1
    return 0 if _TIE.search(text) else None
