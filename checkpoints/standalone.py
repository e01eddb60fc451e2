"""Write the modelling file of an exported Graph-LLM, which needs only torch, transformers, PEFT and PyG.

An export assembles the file from the project's sources: the definitions in `modeling_graph_llm.py` and every definition
that they use, each after the definitions that it needs.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tripletune.core.files import read_json, read_text, write_json, write_text
from tripletune.models.run_folders import CONFIG

MODELING = "modeling_graph_llm.py"
_CLASSES = {
    "AutoConfig": "GraphLLMConfig",
    "AutoModel": "AutoGraphLLM",
    "AutoModelForCausalLM": "AutoGraphLLM",
    "AutoProcessor": "AutoGraphLLMProcessor",
}
_PROJECT = "tripletune."
_ROOT = f"{_PROJECT}checkpoints.modeling_graph_llm"
# Methods that need labels, or files that an export lacks.
_LEFT_OUT = ("to_json", "from_json", "encode_label", "save_pretrained", "from_pretrained", "create")
_HEAD = '''"""A Graph-LLM of RAS in one file, written by `tripletune checkpoints export` (TripleTune, Apache-2.0).

    from transformers import AutoModel, AutoProcessor

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(FOLDER, trust_remote_code=True)
    facts = [("The Glass Harbour", "written by", "Ida Morn"), ("Ida Morn", "born in", "Velsund")]
    inputs = processor("Where was its author born?", [("Who wrote The Glass Harbour?", facts)])
    print(processor.decode(model.generate(**inputs, max_new_tokens=64), inputs))

It needs torch, transformers, peft and torch-geometric. Give the model `base_model=FOLDER` to load the base model from
another place, and the processor `encoder=FOLDER` for the text encoder.
"""

from __future__ import annotations

'''


def write_modeling(folder: Path, tokenizer: Any) -> None:
    """Make a Graph-LLM folder loadable by transformers' Auto classes, with greedy decoding."""
    write_text(folder / MODELING, modeling_source())
    auto_map = {name: f"{Path(MODELING).stem}.{kind}" for name, kind in _CLASSES.items()}
    write_json(folder / CONFIG, read_json(folder / CONFIG) | {"auto_map": auto_map})
    ends = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {**ends, "do_sample": False})


def modeling_source() -> str:
    """Return the text of the modelling file."""
    parts: dict[int, str] = {}
    imports: dict[str, set[str]] = {}
    own = _module(_ROOT)

    def add(module: _Module, name: str) -> None:
        module = own if name in own.definitions else module
        if (node := module.definitions.get(name)) is None:
            origin, inner = module.imports.get(name, ("", ""))
            if origin.startswith(_PROJECT):
                add(_module(origin), inner)
            elif origin:
                imports.setdefault(origin, set()).add(inner)
        elif id(node) not in parts:
            # If two functions call each other, the first one found is written first.
            parts[id(node)] = ""
            for used in (one.id for one in ast.walk(node) if isinstance(one, ast.Name)):
                add(module, used)
            del parts[id(node)]
            parts[id(node)] = module.source(node)

    for kind in dict.fromkeys(_CLASSES.values()):
        add(own, kind)
    lines = [
        f"from {origin} import {name}" if name else f"import {origin}"
        for origin, names in sorted(imports.items())
        for name in sorted(names)
    ]
    return _HEAD + "\n".join(lines) + "\n\n\n" + "\n\n\n".join(parts.values()) + "\n"


class _Module:
    """Top-level definitions of a module by name, and the sources of its imports."""

    def __init__(self, name: str) -> None:
        spec = find_spec(name)
        source = read_text(Path(str(spec and spec.origin)))
        self.lines = source.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                names = (one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
                self.definitions |= {one.id: node for one in names}
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {one.name: (str(node.module), one.name) for one in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {one.name.partition(".")[0]: (one.name, "") for one in node.names}
            if isinstance(node, ast.ClassDef) and name != _ROOT:
                self._leave_out(node)

    def _leave_out(self, kind: ast.ClassDef) -> None:
        for method in [one for one in kind.body if getattr(one, "name", "") in _LEFT_OUT]:
            kind.body.remove(method)
            for line in range(_start(method), method.end_lineno or 0):
                self.lines[line] = _GONE

    def source(self, node: ast.stmt) -> str:
        """Return the text of a definition with its decorators and the comment above it."""
        start = _start(node)
        while start and self.lines[start - 1].startswith("#"):
            start -= 1
        kept = [line for line in self.lines[start : node.end_lineno] if line is not _GONE]
        return "\n".join(kept).replace("\n\n\n", "\n\n").rstrip()


_module = cache(_Module)
_GONE = "# left out"


def _start(node: Any) -> int:
    """Return the index of a definition's first line, decorators included."""
    return int(min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))) - 1
