"""Fine-tune and distil the models behind triple-based, iterative RAG.

The sub-packages are the folders at the root of the repository, under one import name: `tripletune.models` is `models/`.
"""

from pathlib import Path

if not Path(__file__).with_name("models").is_dir():
    # A checkout without symbolic links: the folders are found where they lie. Type checkers need the links.
    __path__.append(str(Path(__file__).resolve().parents[1]))
