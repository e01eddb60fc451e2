"""Questions over a corpus of one's own, and the kinds of multi-hop questions that the fictional world has, too."""

CHAIN_KINDS: tuple[str, ...] = ("1-hop", "2-hop", "3-hop", "4-hop")
COMPARISON = "comparison"
INTERSECTION = "intersection"
