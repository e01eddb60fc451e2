"""Settings that compared runs must share, the runs' differences in them, and all other settings, in words.

Scores compare systems only if all else is equal. Three things may differ: settings that a system does not use (a system
without search has no retriever), options that only one system has, and the passages per round that a system's paper
fixes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import chain, combinations
from typing import Any

from tripletune.core.files import few, flatten
from tripletune.core.options import not_one_of
from tripletune.eval.report.runs import Run
from tripletune.rag.chat_generator import READER
from tripletune.rag.systems import find_system, system_names

# Settings that must be equal, by their names in `--across`.
EQUAL = ("data", "limit", "task", "corpus", "retriever", "encoder", "top_k", "triples", "gold", "model", "sampling",
         "reader", "max_answer_tokens")  # fmt: skip
_HOW = {
    "retriever": ("vectors", "language"),
    "encoder": ("encoder_weights", "query_prompt", "text_prompt", "similarity"),
}
_MODELS = ("model", "planner", "teacher")
# Settings that other rows show; `_own_settings` shows the rest.
_KNOWN = {"system", "options", "files", "llm", "teacher_weights", *EQUAL, *_MODELS, *chain(*_HOW.values())}
_OWN = "not as in its paper"
# Settings in which seeds of one system may differ: seeds, and names and weights of the trained model.
_SEEDS = re.compile(r"(.+[._])?(seed|weights)|control_run|prompt_embeds|model|(model|planner|integrator)\.spec")


def shared_settings(run: Run) -> dict[str, Any]:
    """The values of `EQUAL`; None for settings that the system does not use or an older run did not note."""
    settings, systems = run.settings, system_names()
    found = dict.fromkeys(EQUAL)
    found |= {"data": settings.get("data"), "limit": run.about.get("questions", settings.get("limit"))}
    if "system" not in settings:
        return found
    options, task = settings.get("options") or {}, settings["task"]
    if settings.get("retriever"):
        found |= {"corpus": settings.get("corpus") or "contexts of the questions", "top_k": options.get("top_k")}
    for name, more in _HOW.items():
        if settings.get(name):
            found[name] = {one: settings[one] for one in (name, *more) if settings.get(one)}
    models = {role: settings[role] for role in _MODELS if settings.get(role)}
    if weights := settings.get("teacher_weights"):
        models["teacher"] = {"model": settings["teacher"], "weights": weights}
    # Older runs have the reader of their papers, and IRCoT's option `reader` had another meaning.
    reader = {name: one for name in ("reader", "reader_tokens") if isinstance(one := options.get(name), (str, int))}
    reader |= {name: one for name, one in (settings.get("files") or {}).items() if name == READER}
    common = reader.get("reader") == "common"
    for role, one in (settings.get("llm") or {}).items():
        # A system's own role is compared if it answers; the system's name alone stands for all its roles.
        owner, call = [*role.split("."), "answer"][:2]
        answers = owner == settings["system"] and call in ("answer", "act", "follow_up") and not common
        if answers or owner not in systems:
            models[role.removeprefix(f"{owner}.")] = one
    drawn, graph_llm = (settings.get("sampling") or [])[:2], settings.get("model") or settings.get("planner")
    student = [float(settings.get("student_seed") is not None), 1.0] if graph_llm else []
    return found | {
        "task": {name: task.get(name) for name in ("name", "reader", "template")},
        "triples": settings.get("triples"),
        "model": models or None,
        "sampling": drawn + student * (student != drawn) or None,
        "reader": reader if common else "paper",
        "max_answer_tokens": options.get("max_answer_tokens"),
        "gold": run.about.get("gold") or settings.get("gold"),
    }


def apart(one: Run, other: Run, across: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """The settings of `EQUAL`, without `across`, in which two runs differ, with both values."""
    values = shared_settings(one), shared_settings(other)
    pairs = {name: (values[0][name], values[1][name]) for name in EQUAL if name not in across}
    found = {name: pair for name, pair in pairs.items() if None not in pair and _content(pair[0]) != _content(pair[1])}
    if all(k == defaults_of(run).get("top_k") for k, run in zip(found.get("top_k", ()), (one, other))):
        found.pop("top_k", None)
    return found


def check_across(across: str | None) -> list[str]:
    """The names in the text of `--across`, each one of `EQUAL`."""
    names = [name.strip().replace("-", "_") for name in (across or "").split(",") if name.strip()]
    if wrong := [name for name in names if name not in EQUAL]:
        raise ValueError(not_one_of("--across", wrong[0], EQUAL))
    return names


def check_comparable(groups: Sequence[Sequence[Run]], across: Collection[str]) -> None:
    """Raise `ValueError` for runs that differ in settings that must be equal, and for groups that are not seeds."""
    for runs in groups:
        flat = [flatten({**run.settings, "sampling": shared_settings(run)["sampling"]}, ".") for run in runs]
        values = {name: dict.fromkeys(told_of(one.get(name)) for one in flat) for name in dict.fromkeys(chain(*flat))}
        others = [name for name in values if not _SEEDS.fullmatch(name) and f"{name}_weights" not in values]
        if differ := [f"{name} ({' and '.join(values[name])})" for name in others if len(values[name]) > 1]:
            folders = ",".join(run.folder for run in runs)
            raise ValueError(f"{folders}: name seeds of one system, not runs that differ in {few(differ)}")
    for first, second in combinations(groups, 2):
        for one, other in ((one, other) for one in first for other in second):
            if found := apart(one, other, across):
                told = few([f"{name} ({' and '.join(map(told_of, pair))})" for name, pair in found.items()], len(EQUAL))
                raise ValueError(
                    f"{one.folder} and {other.folder} differ in {told}, so their scores do not compare only "
                    f"systems; to compare these settings, pass --across {','.join(found)}"
                )


def told_of(value: Any) -> str:
    """A setting in words."""
    if isinstance(value, Mapping):
        parts = (f"weights {one}" if "weights" in name else told_of(one) for name, one in value.items())
        return ", ".join(dict.fromkeys(parts))
    if isinstance(value, (list, tuple)):
        return ",".join(map(told_of, value))
    text = str(value)
    if text.startswith("oracle:"):
        return f"ORACLE {text.partition(':')[2]}, which knows the facts and is not a language model"
    return re.sub(r"\b(\w{12})\w{52}\b", r"\1", text)  # digests


def setting_rows(runs: Sequence[Run], names: Sequence[str]) -> list[list[str]]:
    """Rows of settings: one value if all runs share it, else each value with the names of its runs."""
    values = [shared_settings(run) for run in runs]
    told = {name: ["" if one[name] is None else told_of(one[name]) for one in values] for name in EQUAL}
    told[_OWN] = [_own_settings(run) for run in runs]
    for name, of in (("code", _code), ("date", lambda session: session["began"][:10])):
        told[name] = [", ".join(dict.fromkeys(map(of, run.sessions))) for run in runs]
    rows = []
    for what, cells in told.items():
        parts = {cell: [name for name, one in zip(names, cells) if one == cell] for cell in cells if cell}
        shared = len(parts) == 1 and (what != _OWN or all(cells))
        every = [cell if shared else f"{cell} ({', '.join(named)})" for cell, named in parts.items()]
        rows.append([what, "; ".join(every) or "-"])
    return rows


def _own_settings(run: Run) -> str:
    """Other settings of a run: options that differ from the system's defaults, and settings that some runs have."""
    defaults = defaults_of(run)
    options = {name: one for name, one in (run.settings.get("options") or {}).items() if defaults.get(name, one) != one}
    others = {name: one for name, one in run.settings.items() if name not in _KNOWN and one is not None}
    others |= {name: one for name, one in (run.settings.get("llm") or {}).items() if name.split(".")[0] == run.system}
    drawn = run.settings.get("sampling") or []
    if len(drawn) > 2 and drawn[2] is not None:
        others["seed"] = drawn[2]
    return ", ".join(f"{name}={told_of(one)}" for name, one in (options | others).items() if name not in EQUAL)


def defaults_of(run: Run) -> dict[str, Any]:
    """The defaults of the options of a run's system, which are those of the system's paper."""
    system = run.settings.get("system")
    options = fields(find_system(system).options) if system in system_names() else ()
    return json.loads(json.dumps({one.name: one.default for one in options}, default=str))


def _content(value: Any) -> Any:
    """A setting with digests of weights instead of model folders, since equal weights are one model."""
    if not isinstance(value, Mapping):
        return value
    weights = value.get("weights") or value.get("model_weights")
    return weights or {name: _content(one) for name, one in value.items()}


def _code(session: Mapping[str, Any]) -> str:
    commit, changed, _ = session.get("commit", "").partition("+")
    return f"{session.get('version', '')} {commit[:12]}{changed and ', changed'}".strip()
