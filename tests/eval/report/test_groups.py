"""Tests of the groups of comparable runs."""

from types import SimpleNamespace

import pandas as pd

from tripletune.eval.report.groups import _share_hops


def test_a_run_without_gold_links_gets_the_hops_that_another_run_knows():
    linked = SimpleNamespace(rows=pd.DataFrame({"id": ["a", "b"], "hops": [2.0, None]}))
    unlinked = SimpleNamespace(rows=pd.DataFrame({"id": ["b", "a", "c"], "hops": [None, None, None]}))
    _share_hops([linked, unlinked])
    assert linked.rows["hops"].fillna(0).tolist() == [2, 0]
    assert unlinked.rows["hops"].fillna(0).tolist() == [0, 2, 0]
