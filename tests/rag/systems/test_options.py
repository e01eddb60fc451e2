from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import pytest

from tripletune.core.command_line import CommandParser, add_short_flags
from tripletune.core.options import rare, setting
from tripletune.rag.systems import LoopOptions, make_options
from tripletune.rag.systems.cirag import SYSTEM, CiragOptions
from tripletune.rag.systems.ras import SYSTEM as RAS


def test_what_is_not_given_keeps_the_papers_default():
    options = make_options(SYSTEM)
    assert (options.max_rounds, options.top_k, options.candidates, options.rerank) == (4, 10, 30, True)
    assert (options.granularities, options.extraction) == (("triples", "sentences", "passages"), "two_step")
    assert make_options(RAS, max_rounds=3) == LoopOptions(max_rounds=3)


def test_settings_are_read_by_the_type_of_their_field():
    settings = ["candidates=50", "rerank=no", "granularities=triples, passages", "extraction=joint", "max-rounds=2"]
    assert make_options(SYSTEM, settings, top_k=5) == CiragOptions(
        top_k=5, candidates=50, rerank=False, granularities=("triples", "passages"), extraction="joint", max_rounds=2
    )
    off = LoopOptions(triples_per_step=7, planning=False)
    assert make_options(RAS, ["triples_per_step=7", "planning=off"]) == off


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        ({"planning": False}, [], "system 'cirag' has no option 'planning'; its options are reader"),
        ({"planning": False}, ["candidate=7"], "did you mean candidates.*no option 'planning'"),
        ({"max_rounds": 0}, ["granularities=passages,triples"], "max_rounds: 0 .*granularities is 'passages,triples'"),
    ],
)
def test_what_makes_no_sense_is_refused(values, settings, message):
    with pytest.raises(ValueError, match=message):
        make_options(SYSTEM, settings, **values)


def test_a_new_option_of_a_loop_is_declared_in_one_place():
    @dataclass(frozen=True, slots=True)
    class More(LoopOptions):
        depth: int = setting(1, "levels of a tree", at_least=1)
        greedy: bool = setting(True, "take the nearest")
        width: int = rare(2, "beams")

    system, parser = replace(RAS, options=More), CommandParser(others="options of the system")
    add_short_flags(parser.add_argument_group("the loop"), More)
    words = ["--top-k", "9", "--depth", "3", "--set", "width=4", "--no-greedy", "--top-k", "2", "--evidence", "text"]
    made = make_options(system, parser.parse_args(words).set)
    assert made == More(top_k=2, depth=3, width=4, greedy=False, evidence="text")
    assert {"depth": 3, "greedy": False}.items() <= asdict(made).items(), "what settings.json holds"
    assert "--width" not in parser.format_help()
