"""Labels read out of replies: chat models write "The answer is (B)." where a trained model writes "B"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tripletune.eval.metrics import accuracy

_SAID = r"(?:answer|choice|option|label|statement|claim)(?: is| would be|:)*[\s:*_\"'(]*"
# "A" and "I" are words too: alone an A counts where punctuation, "is" or the end follows.
_LETTER = re.compile(
    rf"\A[\s*_\"'(]*([A-HJ])(?=[).:,*_\"']|\s*\Z)|(?i:{_SAID})([A-HJ])\b"
    r"|\(([A-HJ])\)|\b([B-HJ])\b|\b(A)(?=[).:*]| is\b|\s*\Z)"
)
_TRUTH = re.compile(
    r"(?P<no>(?:\bnot|n't|\bnever)(?: \w+)? true|\b(?:untrue|false|incorrect))\b"
    r"|(?P<yes>(?:\bnot|n't) false|\b(?:true|correct))\b",
    re.IGNORECASE,
)


def label_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """The label that the answer gives, in a sentence or alone, is the gold one.

    A label is true or false, or the letter of a choice. The first that stands in front or is called the answer counts;
    where the reply names several and calls none the answer, it is wrong. Other gold labels are compared as `accuracy`
    does.
    """
    return max(_is(prediction, answer) for answer in answers)


def _is(prediction: str, answer: str) -> float:
    if accuracy(prediction, [answer]):
        return 1.0
    if answer.strip().lower() in ("true", "false"):
        said = ["true" if match["yes"] else "false" for match in _TRUTH.finditer(prediction)]
        leading = _TRUTH.match(prediction.lstrip(" *_\"'(\n"))
        said = said[:1] if leading else said
        return float(set(said) == {answer.strip().lower()})
    if not re.fullmatch("[A-J]", answer.strip()):
        return 0.0
    found = list(_LETTER.finditer(prediction))
    chosen = [match[1] or match[2] for match in found if match[1] or match[2]][:1]
    return float({*(chosen or (match[match.lastindex or 0] for match in found))} == {answer.strip()})
