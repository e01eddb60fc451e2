"""Questions over a custom corpus, and the kinds of multi-hop questions, also of the fictional world."""

CHAIN_KINDS: tuple[str, ...] = ("1-hop", "2-hop", "3-hop", "4-hop")
COMPARISON = "comparison"
INTERSECTION = "intersection"
