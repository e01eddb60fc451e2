"""System prompts of loops and builders, read from files that a user's folder may replace.

Each room keeps its own in its folder `prompts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tripletune.models.files import read_text
from tripletune.models.llm import Message

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """System prompts by name, and the file of each; ours are named from the root of the project."""

    texts: Mapping[str, str]
    files: Mapping[str, str]

    def chat(self, name: str, user: str) -> list[Message]:
        """A chat of the prompt `name` and one user turn."""
        return [{"role": "system", "content": self.texts[name]}, {"role": "user", "content": user}]

    def digests(self) -> dict[str, str]:
        """SHA-256 of each prompt by its name."""
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts.items()}


@lru_cache(maxsize=16)
def load_prompts(names: tuple[str, ...], folder: str | Path | None = None, room: str = "rag") -> PromptSet:
    """Read the prompts of these names; those that a user's `folder` does not hold are ours, from the room's."""
    files = {name: f"{room}/prompts/{name}.md" for name in names}
    paths = {name: _ROOT / file for name, file in files.items()}
    if folder is not None:
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"no such folder of prompts: {folder}")
        known = ", ".join(f"{name}.md" for name in names)
        for path in sorted(folder.glob("*.md")):
            if path.stem not in paths:
                raise ValueError(f"{path}: there is no prompt of this name; the prompts are {known}")
            paths[path.stem], files[path.stem] = path, str(path)
        if folder not in [path.parent for path in paths.values()]:
            raise ValueError(f"{folder} holds no prompt; the prompts are {known}")
    texts = {name: read_text(path).strip() for name, path in paths.items()}
    for name, text in texts.items():
        if not text:
            raise ValueError(f"{files[name]}: the prompt is empty")
    return PromptSet(texts, files)
