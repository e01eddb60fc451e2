"""All settings of a group of runs as rows of a table: what the runs share, and how each departs from its paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tripletune.eval.report.runs import Run
from tripletune.eval.report.setting import EQUAL, defaults_of, setting_in_words, shared_in_words, shared_settings
from tripletune.eval.results import Session
from tripletune.rag.results import present_values

_OWN = "not as in its paper"


def setting_rows(runs: Sequence[Run], names: Sequence[str]) -> list[list[str]]:
    """Rows of settings: one value if all runs share it, else each value with the names of its runs.

    The rows are those of `EQUAL`, then how each run departs from its system's paper, its code and its days: all that a
    reader needs to run it again.

    Args:
        runs: The runs of one group.
        names: Their names in the report, in the same order.

    Returns:
        Rows of two cells, the setting and its value in words.
    """
    rows = []
    for setting in EQUAL:
        # Equal files may have several names: the first one names them all.
        files: dict[str, str] = {}
        cells = []
        for run in runs:
            value = getattr(shared_settings(run), setting)
            words = "" if value is None else setting_in_words(value)
            cells.append(files.setdefault(words, shared_in_words(run, setting)))
        rows.append([setting, _by_value(cells, names)])
    own_settings = list(map(_own_settings, runs))
    rows.append([_OWN, _by_value(own_settings, names, all_need_it=True)])
    rows.append(["code", _by_value(list(map(_code_versions, runs)), names)])
    rows.append(["date", _by_value(list(map(_days_of_sessions, runs)), names)])
    return rows


def _by_value(cells: Sequence[str], names: Sequence[str], all_need_it: bool = False) -> str:
    """Each distinct text with the names of its runs, or a single text alone; empty texts are left out.

    With `all_need_it`, a single text is only alone if all runs have it: an empty text then also says something.
    """
    runs_by_value: dict[str, list[str]] = {}
    for cell, name in zip(cells, names, strict=True):
        if cell:
            runs_by_value.setdefault(cell, []).append(name)
    if len(runs_by_value) == 1 and (not all_need_it or all(cells)):
        return next(iter(runs_by_value))
    return "; ".join(f"{value} ({', '.join(named)})" for value, named in runs_by_value.items()) or "-"


def _own_settings(run: Run) -> str:
    """Other settings of a run: options that differ from the system's defaults, and settings that some runs have.

    The defaults are those of the system's paper, so this is how a run departs from the paper. Settings of `EQUAL` have
    rows of their own in the table.
    """
    settings = run.settings
    shown: dict[str, Any] = {}
    defaults = defaults_of(run)
    for name, value in settings.options.items():
        if name in defaults and value != defaults[name]:
            shown[name] = value
    # An option that differs from training is named even if it is the paper's default.
    shown |= settings.overrides
    others = {
        "dtype": settings.dtype,
        "student_seed": settings.student_seed,
        "prompt_embeds": settings.prompt_embeds,
        "integrator": None if settings.integrator is None else settings.integrator.to_json(),
        "control": settings.control,
        "control_run": settings.control_run,
        **settings.others,
    }
    shown |= present_values(others)
    for role, model in settings.llm.items():
        if role.split(".")[0] == run.system:
            shown[role] = model.to_json()
    if settings.sampling and settings.sampling.seed is not None:
        shown["seed"] = settings.sampling.seed
    return ", ".join(f"{name}={setting_in_words(value)}" for name, value in shown.items() if name not in EQUAL)


def _days_of_sessions(run: Run) -> str:
    """The days of a run's sessions, each once, as a served model may have changed between them."""
    return ", ".join(dict.fromkeys(session.began[:10] for session in run.sessions))


def _code_versions(run: Run) -> str:
    """The versions of the code of a run's sessions, each once: a run may be continued with newer code."""
    return ", ".join(dict.fromkeys(map(_code_version, run.sessions)))


def _code_version(session: Session) -> str:
    """The version and commit of a session; "changed" warns that the commit alone does not reproduce it."""
    commit, _, changes = (session.commit or "").partition("+")
    words = f"{session.version or ''} {commit[:12]}"
    if changes:
        words += ", changed"
    return words.strip()
