from __future__ import annotations

import pytest

from tripletune.rag.systems import LoopOptions, make_options
from tripletune.rag.systems.cirag import SYSTEM
from tripletune.rag.systems.cirag.options import CiragOptions
from tripletune.rag.systems.ras import SYSTEM as RAS


def test_what_is_not_given_keeps_the_papers_default():
    assert make_options(SYSTEM, {"max_rounds": None, "top_k": None}) == CiragOptions()
    assert make_options(RAS, {"max_rounds": 3, "top_k": None}) == LoopOptions(max_rounds=3)


def test_settings_are_read_by_the_type_of_their_field():
    options = make_options(
        SYSTEM,
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
    assert make_options(SYSTEM, {}, ["prompts=my/folder"]).prompts == "my/folder"


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        ({"evidence": "text"}, [], "--evidence: system 'cirag' has no option 'evidence'; its options are max_rounds"),
        ({}, ["candidate=3"], "did you mean candidates"),
        ({}, ["candidates"], "write it as NAME=VALUE"),
        ({}, ["candidates=many"], "is not a whole number"),
        ({}, ["rerank=perhaps"], "is not true or false"),
        ({}, ["history=book"], "is not one of chat, section"),
        ({}, ["candidates=0"], "candidates: 0 must"),
        ({"planning": False}, ["rerank=7"], "not true or false.*no option 'planning'"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, settings, message):
    with pytest.raises(ValueError, match=message):
        make_options(SYSTEM, flags, settings)
