"""One question of a made-up world with every step of its loop, in seconds and without a model: `demo --quick`.

A perfect teacher, which knows the facts of the world, stands in for the models. So a user sees what a loop of searches
does before anything is downloaded or trained.

Tested in `tests/recipes/test_quick.py`.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient
from tripletune.rag.answering import OpenSystem, open_tools
from tripletune.rag.ask import answer_of, end_lines, event_lines
from tripletune.rag.system_options import SystemOptions
from tripletune.rag.systems import find_system, make_options

_WORLD = WorldOptions(seed=7, train=0, validation=0, test=20, common_knowledge=0.0)
_SPLIT = "test"
# A question of this world that needs two searches: the film's director, then the director's birth.
QUESTION = "What is the birth year of the director of the film The Orchard of Tiruva?"
_ABOUT = """\
A made-up world of 121 short articles, so that no model can know the answers. The question needs two articles:
one names the director, the other says when the director was born. A perfect teacher plans and answers here;
training puts a small model of your own in its place.
"""
_NEXT = """
What comes next:
  tripletune build passages --documents FOLDER --output runs/mine   read your documents (Markdown, PDF, HTML, …)
  tripletune demo                                                   train and test a small model, 6 to 30 minutes
  tripletune doctor                                                 what this machine can run; --help lists programs"""


def show_quick_demo() -> None:
    """Make the world in a temporary folder, and print a question with its searches, facts and answer.

    It needs no model, no network and no file, so it shows within seconds what the loop does; the oracle is no model.
    """
    # What an index says of itself helps nobody who sees the first question.
    logging.getLogger("tripletune").setLevel(logging.ERROR)
    print(_ABOUT)
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder) / "world"
        write_world(_WORLD, world)
        system = _open_ras(world)
        with system:
            print(f"Question: {QUESTION}")
            trace = system.answer(QUESTION, watch=lambda event: print("\n".join(event_lines(event)), flush=True))
    lines = list(end_lines(trace, answer_of(trace, QUESTION, {})))
    # The cost of a perfect teacher says nothing.
    print("\n".join(line for line in lines if not line.startswith("  cost")))
    print(_NEXT)


def _open_ras(world: Path) -> OpenSystem:
    """The loop of RAS over the world's passages and triples, with its perfect teacher."""
    options = SystemOptions(
        system="ras",
        corpus=str(world / f"{_SPLIT}.corpus.jsonl"),
        triples=str(world / f"{_SPLIT}.triples.jsonl"),
    )
    teacher = LedgerClient(WorldOracle.open(world, _SPLIT), Ledger(world / "ledger.sqlite"))
    ras = find_system("ras")
    # Two passages a search, so that the steps fit on a screen.
    loop = make_options(ras, ["top_k=2", "first_query=generated"])
    tools = open_tools(options, ras, loop, options.corpus, world / "index", llm=teacher)
    return OpenSystem(ras, loop, tools)
