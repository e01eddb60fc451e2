"""A student that integrates in CIRAG instead of the teacher: whether the loop sends it the prompt of its training."""

from __future__ import annotations

from pathlib import Path

from tripletune.llm.question_client import load_prompts
from tripletune.models.run_folders import PROMPT_FILE
from tripletune.models.specs import resolve
from tripletune.rag.systems.cirag import PROMPT_NAMES
from tripletune.rag.systems.cirag.integration import INTEGRATION_PROMPT


def warning_of_other_prompt(student: str, prompts: str | None) -> str | None:
    """The warning that a student was trained with another prompt than the loop sends; None if the prompts are equal.

    Args:
        student: Folder or spec of the model; a folder without a prompt file gets no warning.
        prompts: The loop's option: a folder of custom prompts.
    """
    trained_with = Path(resolve(student)) / PROMPT_FILE
    if not trained_with.is_file():
        return None
    sent = load_prompts(PROMPT_NAMES, prompts).texts[INTEGRATION_PROMPT]
    if sent.strip() == trained_with.read_text(encoding="utf-8").strip():
        return None
    used = f"the prompt of {prompts}" if prompts else "our prompt"
    return (
        f"{student} was trained with the prompt in {trained_with}, but the loop uses {used}: expect worse decisions. "
        f"Copy that prompt into a folder as {INTEGRATION_PROMPT}.md and add --set prompts=FOLDER"
    )
