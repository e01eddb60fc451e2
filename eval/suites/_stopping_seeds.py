"""Benches of `eval stopping` with models of other training seeds, for means over the seeds.

Tested in tests/eval/suites/test_stopping.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tripletune.core.files import few, flatten, read_json
from tripletune.eval.results import SETTINGS, read_results
from tripletune.eval.suites._stopping_rules import Ladder
from tripletune.rag.results import RESULTS

# Settings that another training seed changes: the trained models, and what they were trained with.
_OF_MODELS = re.compile(r"run/(model|planner|answerer|integrator|overrides)(/|$)")


def check_other_seeds(folders: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Refuse folders that are no bench of the same settings with another model: their mean would be of nothing.

    Args:
        folders: Output folders of `eval stopping`.
        settings: Those of this bench.
    """
    own = _settings_but_models(settings)
    seen = {_models_in(settings): "this run"}
    for folder in folders:
        path = Path(folder) / SETTINGS
        if not path.is_file():
            raise FileNotFoundError(f"--other-seeds {folder}: no {SETTINGS}: name output folders of eval stopping")
        others = _settings_but_models(read_json(path))
        differing = [name for name in {**own, **others} if own.get(name) != others.get(name)]
        if differing:
            raise ValueError(
                f"--other-seeds {folder}: it was run with other settings ({few(differing)}), so it is no other seed"
            )
        models = _models_in(read_json(path))
        if models in seen:
            raise ValueError(f"--other-seeds {folder}: it has the model of {seen[models]}, and a seed counts once")
        seen[models] = folder


def ladders_of_seed(folder: str, own: Sequence[Ladder]) -> list[Ladder]:
    """The answers of another seed's bench, in the order of ours; it has to have answered the same questions."""
    by_id = {row["id"]: Ladder.from_json(row) for row in read_results(Path(folder) / RESULTS)}
    if by_id.keys() != {ladder.id for ladder in own}:
        raise ValueError(
            f"--other-seeds {folder}: it has answers to {len(by_id):,} questions and this run to {len(own):,}, but the "
            "same are needed: run its command again until it ends"
        )
    return [by_id[ladder.id] for ladder in own]


def _settings_but_models(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a bench by their paths, without trained models and what follows from them."""
    return {name: value for name, value in _by_path(settings).items() if not _OF_MODELS.match(name)}


def _models_in(settings: Mapping[str, Any]) -> str:
    """The trained models of a bench, as one text: their weights where these are known, else their names."""
    models = {name: value for name, value in _by_path(settings).items() if _OF_MODELS.match(name)}
    weights = {name: value for name, value in models.items() if name.endswith("/weights")}
    return json.dumps(weights or models, sort_keys=True)


def _by_path(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their paths, with the types that a file of them has."""
    return flatten(json.loads(json.dumps(settings)), "/")
