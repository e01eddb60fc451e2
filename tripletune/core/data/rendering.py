"""Render a structured input as the model's text, and parse a planning reply.

Training and inference both use this module, so their prompts cannot differ. Layout (RAS, section C.3, figures 10-13):

    <instruction>

    [SUBQ] q_0
    Retrieved Graph Information: (S> s| P> p| O> o), ...
    [SUBQ] q_1
    ...
    Question: Q

The figures print the triples as a Python list, in brackets and quotation marks; here they have the form of figure 14.
With `prompt_order: history_first` the instruction stands between history and question. With `interleaved` the question
comes first, then each reply is followed by what was retrieved for it (`render_growing`).

An answering input without steps carries `[NO_RETRIEVAL]` instead of the steps (figure 12).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from tripletune.core.data.records import Action, ModelInput, Task, one_line
from tripletune.core.data.triples import format_triples
from tripletune.core.files import PROMPTS, read_prompt

Evidence = Literal["triples", "text", "graph"]
_ACTION = re.compile(r"\s*\[(SUBQ|SUFFICIENT|NO_RETRIEVAL)\]")


def load_instructions(planning: str | Path | None = None, answering: str | Path | None = None) -> dict[Task, str]:
    """The instructions INST_Plan and INST_Ans by task, from files that a user may replace.

    A model must be run with the instructions that it was trained with; exports hold them.
    """
    files: dict[Task, str | Path] = {
        "planning": planning or PROMPTS / "models" / "ras_plan.md",
        "answering": answering or PROMPTS / "models" / "ras_answer.md",
    }
    return {task: read_prompt(file) for task, file in files.items()}


def render(sample: ModelInput, evidence: str = "triples") -> str:
    """Write history and question as text, without the instruction.

    With evidence "text" (ablation without text-to-triples) a step shows the retrieved text instead of triples. With
    "graph" a step shows neither: only the graph token holds the facts.
    """
    return "\n".join(part for part in render_parts(sample, evidence) if part)


def render_parts(sample: ModelInput, evidence: str = "triples") -> tuple[str, str]:
    """Return the history ("" if it is empty) and the line with the question.

    Apart, because the orders of a prompt put them in different places. White space in texts is folded, so that a line
    break of a passage cannot look like the next part of the prompt.
    """
    lines = []
    for step in sample.steps:
        shown = "" if evidence == "graph" else format_triples(step.triples)
        if evidence == "text":
            shown = " ".join(step.text.split())
        lines += [f"{Action.SUBQ.value} {one_line(step.query)}", f"Retrieved Graph Information: {shown}".rstrip()]
    if not sample.steps and sample.task == "answering":
        lines.append(Action.NO_RETRIEVAL.value)
    return "\n".join(lines), f"Question: {one_line(sample.question)}"


def render_growing(sample: ModelInput, evidence: str = "triples") -> list[str | None]:
    """The text after the question, for prompts that continue the previous prompt and reply of the question.

    Returns:
        Pieces that are tokenised separately; None stands for a step's graph. The planner's real or expected reply is a
        separate piece.
    """
    pieces: list[str | None] = []
    for step in sample.steps:
        history, _ = render_parts(ModelInput(sample.task, sample.question, (step,)), evidence)
        query_line, evidence_line = history.split("\n")
        pieces += [query_line, f"\n{evidence_line}\n", None, "\n"]
    if sample.task == "answering":
        action = Action.SUFFICIENT if sample.steps else Action.NO_RETRIEVAL
        pieces += [action.value, "\nAnswer:\n"]
    return pieces


class Plan(NamedTuple):
    """A parsed planning reply; `action` is None when the reply is malformed."""

    action: Action | None
    subquery: str = ""


def parse_plan(reply: str) -> Plan:
    """Read the action at the very start of a planning reply.

    The sub-query is the text after `[SUBQ]` up to the first line break. A marker later in the reply, or the bare word
    "sufficient" inside a sub-query, is not an action. `[SUBQ]` without a sub-query is malformed.
    """
    match = _ACTION.match(reply)
    if match is None:
        return Plan(None)
    action = Action(f"[{match.group(1)}]")
    if action is not Action.SUBQ:
        return Plan(action)
    subquery = reply[match.end() :].split("\n", 1)[0].strip()
    return Plan(action, subquery) if subquery else Plan(None)
