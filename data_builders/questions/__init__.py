"""Build questions over a custom corpus; these kinds of questions are also those of the fictional world."""

CHAIN_KINDS: tuple[str, ...] = ("1-hop", "2-hop", "3-hop", "4-hop")
COMPARISON = "comparison"
INTERSECTION = "intersection"
# In the order of the card's table.
QUESTION_KINDS = (*CHAIN_KINDS, COMPARISON, INTERSECTION)
