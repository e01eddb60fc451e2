from __future__ import annotations

import pytest

from tripletune.rag.systems.cirag.loop import CIRAG
from tripletune.rag.systems.cirag.options import CiragOptions
from tripletune.rag.systems.options import make_options
from tripletune.rag.systems.ras import RAS
from tripletune.rag.systems.registry import LoopOptions


def test_what_is_not_given_keeps_the_papers_default():
    assert make_options(CIRAG, {"max_rounds": None, "top_k": None}) == CiragOptions()
    assert make_options(RAS, {"max_rounds": 3, "top_k": None}) == LoopOptions(max_rounds=3)


def test_settings_are_read_by_the_type_of_their_field():
    options = make_options(
        CIRAG,
        {"top_k": 5},
        ["candidates=50", "rerank=no", "granularities=triples, passages", "extraction=joint", "max-rounds=2"],
    )
    assert options == CiragOptions(
        top_k=5, candidates=50, rerank=False, granularities=("triples", "passages"), extraction="joint", max_rounds=2
    )
    assert make_options(RAS, {}, ["triples_per_step=7", "planning=off"]) == LoopOptions(
        triples_per_step=7, planning=False
    )
    assert make_options(RAS, {}, ["triples_per_step=none"]).triples_per_step is None
    assert make_options(CIRAG, {}, ["prompts=my/folder"]).prompts == "my/folder"


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        ({"evidence": "text"}, [], "--evidence: system 'cirag' has no option 'evidence'; its options are max_rounds"),
        ({}, ["candidate=3"], "did you mean 'candidates'"),
        ({}, ["candidates"], "write it as NAME=VALUE"),
        ({}, ["candidates=many"], "it must be a whole number"),
        ({}, ["rerank=perhaps"], "write yes or no"),
        ({}, ["history=book"], "choose among chat, section"),
        ({}, ["candidates=0"], "candidates is 0"),
        ({"planning": False}, ["rerank=7"], "no option 'planning'.*write yes or no"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, settings, message):
    with pytest.raises(ValueError, match=message):
        make_options(CIRAG, flags, settings)
