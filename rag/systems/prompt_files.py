"""Prompt files of the loops: ours in `rag/prompts`, and a folder of one's own whose files take their places."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tripletune.models.llm.client import Message

PROMPT_FOLDER = Path(__file__).parents[1] / "prompts"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """System prompts by name, and where each comes from.

    Attributes:
        texts: The prompts.
        files: Their files; ours are named from the root of the project.
    """

    texts: Mapping[str, str]
    files: Mapping[str, str]

    def chat(self, name: str, user: str) -> list[Message]:
        """A chat of the prompt `name` and one user turn."""
        return [{"role": "system", "content": self.texts[name]}, {"role": "user", "content": user}]

    def digests(self) -> dict[str, str]:
        """SHA-256 of each prompt by its name."""
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts.items()}


def load_prompts(names: Sequence[str], folder: str | Path | None = None, ours: Path = PROMPT_FOLDER) -> PromptSet:
    """Read prompt files; those that `folder` does not hold are ours.

    Args:
        names: Names of the prompts, which are the files' names without `.md`.
        folder: A folder with prompts of one's own.
        ours: The folder `prompts` of the package that asks.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a file in it is none of the prompts, or is empty.
    """
    paths = {name: ours / f"{name}.md" for name in names}
    files = {name: f"{ours.parent.name}/prompts/{name}.md" for name in names}
    if folder is not None:
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"no such folder of prompts: {folder}")
        for path in sorted(folder.glob("*.md")):
            if path.stem not in paths:
                known = ", ".join(f"{name}.md" for name in names)
                raise ValueError(f"{path}: there is no prompt of this name; the prompts are {known}")
            paths[path.stem], files[path.stem] = path, str(path)
    texts = {name: path.read_text(encoding="utf-8").strip() for name, path in paths.items()}
    for name, text in texts.items():
        if not text:
            raise ValueError(f"{files[name]}: the prompt is empty")
    return PromptSet(texts, files)
