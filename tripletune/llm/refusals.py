"""Replies that say no: there is no answer, no query is left."""

from __future__ import annotations

import re

_KNOWN = r"(?:information|info|facts?|evidence|triples|context|details?|data)\b"
_REFUSAL = re.compile(
    r"\b(unanswerable|not answerable|not sure|inconclusive|insufficient info\b"
    r"|(can ?not|can't|could not|couldn't) (be )?(determined?|answer(ed)?|infer(red)?|found|find|tell|say|know|conclude"
    r"|confirm(ed)?|verif(y|ied)|establish(ed)?|identif(y|ied)|decided?)"
    r"|(unable|impossible|not possible|not able|no way) to (determine|answer|infer|find|tell|say|know|confirm|verify)"
    rf"|(not|((do|does|is|are)n't))( have| contain| provide)? (enough|sufficient)( \w+)? {_KNOWN}"
    rf"|(insufficient|lacks?( the)?|no (relevant|further|such|sufficient)) {_KNOWN}"
    rf"|{_KNOWN}( \w+)? (is|are) (not (enough|sufficient|available|given)|insufficient|lacking)"
    r"|no information (is )?(about|on|given|provided|available)|no answer (can|could|is|was)|no mention of"
    rf"|(there is|there are|gives?|provides?|contains?|have|has) no (answer|{_KNOWN})|answer is not (in|given|there)"
    r"|(none|nothing|neither|no (passages?|facts?|propositions?|texts?)) ((of|in) .{1,30} )?"
    r"(mention|answer|provide|state|say|specif|contain|give|name|tell|show|help|cover|discuss|describe|indicate|address"
    r"|identif|reveal)"
    r"|(do not|don't) know( |\W*\Z)|not clear( |\W*\Z)|(is|s|remains) (unclear|uncertain|unknown)( |\W*\Z)"
    r"|not (mentioned|specified|stated|provided|given|available)( (in|by) |\W*\Z)"
    r"|(do|does|did)(n't| not) (mention|specify|state|provide|contain|say|give|include))"
    r"|\A\W*(unknown|n/?a|none|no answer|unsure|unclear)\W*\Z",
    re.IGNORECASE,
)
# How a query begins, and texts that say instead that no query is left.
QUERY_START = (
    r"(?:find|search|look|identify|determine|list|retrieve|check|get|ask|name|tell|give|who|whom|whose|what|when|where"
    r"|which|why|how|is|are|was|were|do|does|did|has|have|had|can|could)\b"
)
_ENOUGH = (
    r"(?:(?:sufficient|enough|adequate|answered|answerable)(?=\W*\Z| (?:to|for|now|by|with|and|as)\b)"
    r"|(?:complete|known|found)(?=\W*\Z| now\b))"
)
_NOTHING_LEFT = re.compile(
    r"(?:(?:so|thus|therefore|hence|now|since|because|as|given that|and|i think|there(?:'s| is| are)) )*(?:"
    r"no (?:(?:more|further|additional|other|new|next|follow[- ]?up) )*(?:question|quer|sub-?quer|search|retrieval)\w*"
    r"(?: (?:is|are|needed|required|necessary|left|remain|to )|\Z)|no need (?:for|to)\b|that is all\Z"
    rf"|no (?:more|further|additional|other) {_KNOWN}|nothing(?: (?:more|else|further))?"
    r"(?: (?:is|to|remains)(?: to be)? (?:needed|required|necessary|missing|left|ask|search|find|found)\w*"
    r"| left(?: to \w+)?)?\Z"
    rf"|(?:(?:the|these|those|all|our|my|what|this|that|it|every)\w*\b.{{0,60}}?|{_KNOWN}) (?:is|are|be|been) "
    rf"(?:(?!not|never|hardly)\w+ )?{_ENOUGH}"
    rf"|(?:\w+ ){{0,3}}{_KNOWN}.{{0,20}}? (?:suffice|answers? the (?:\w+ )?(?:question|query))\b"
    rf"|all .{{0,60}}?{_KNOWN} .{{0,30}}?(?:available|there|gathered|collected)\b"
    rf"|(?:(?:we|i|you) (?:now |already )?have |that is )?(?:enough|sufficient) {_KNOWN}"
    r"|(?:we|i|you) (?:now |already )?(?:have|know) (?:everything|all|enough|the answer)\b"
    r"|(?:we|i|you) (?:can (?:now )?answer|(?:do not|don't) need (?:any|to (?:ask|search)|more|further|another))\b"
    r"|(?:it is )?(?:not|no longer) (?:necessary|needed|required)\b|(?-i:[Tt]he (?:final )?answer (?:is|has|can))\b"
    r"|(?:(?:further|more|additional|another) )?(?:question|quer|search|retrieval)\w* (?:is|are) (?:not|un))",
    re.IGNORECASE,
)
_STOPS = re.compile(
    r"(?:query )?(?:none|null|n/?a|no|no more|done|stop|end|finish(?:ed)?|completed?|enough|sufficient)"
    r"(?: needed| required)?",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"([.,;!?\n]+|\b(?:but|though|although|however)\b)", re.IGNORECASE)
_LONGEST_REFUSAL = 40


def is_refusal(answer: str) -> bool:
    """Whether a short answer says that there is no answer: "Unanswerable", "It cannot be determined." """
    is_short = len(answer.split()) <= _LONGEST_REFUSAL
    return is_short and bool(_REFUSAL.search(answer.replace("\u2019", "'")))


def asks_nothing(query: str) -> bool:
    """Whether a text says that no query is left: "There are no more questions.", "Enough facts."

    A text with a question mark, or a clause that begins like a query, is a query.
    """
    if "?" in query:
        return False
    clauses = [_without_outer_marks(clause) for clause in re.split(r"[.,;:!\n]+", query.replace("\u2019", "'"))]
    if any(re.match(QUERY_START, clause, re.IGNORECASE) for clause in clauses):
        return False
    return bool(_STOPS.fullmatch(_without_outer_marks(query))) or any(_NOTHING_LEFT.match(clause) for clause in clauses)


def _without_outer_marks(text: str) -> str:
    """A text without the marks around it."""
    return text.strip("\"'`*<>()[]-.,;:! \n")


def without_refusals(text: str) -> str:
    """Remove the clauses that say that there is no answer; punctuation and words like "but" end a clause."""
    clauses = _CLAUSE.split(text)
    if not any(is_refusal(clause) for clause in clauses):
        return text
    return "".join(" " if is_refusal(clause) else clause for clause in clauses)
