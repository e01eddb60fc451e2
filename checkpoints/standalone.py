"""Write the modelling file of an exported Graph-LLM, which needs only torch, transformers, PEFT and PyG.

An export assembles the file from the project's sources: the definitions in `modeling_graph_llm.py` and every definition
that they use, each after the definitions that it needs.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tripletune.core.files import read_json, read_text, write_json, write_text
from tripletune.models.run_folders import CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
_METHODS_LEFT_OUT = ("to_json", "from_json", "encode_label", "save_pretrained", "from_pretrained", "create")
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


def write_modeling(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a Graph-LLM folder loadable by transformers' Auto classes, with greedy decoding.

    The base model's own generation settings often sample, while the project's programs decode greedily by default.
    """
    write_text(folder / MODELING, modeling_source())
    stem = Path(MODELING).stem
    auto_map = {auto_class: f"{stem}.{own_class}" for auto_class, own_class in _CLASSES.items()}
    write_json(folder / CONFIG, read_json(folder / CONFIG) | {"auto_map": auto_map})
    generation = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "do_sample": False,
    }
    write_json(folder / "generation_config.json", generation)


def modeling_source() -> str:
    """Return the text of the modelling file.

    It holds every definition that the classes need, so that an export loads without this package.
    `tests/checkpoints/test_standalone.py` loads one in a process without it.
    """
    file = _ModelingFile()
    for name in _CLASSES.values():
        file.add(_module_of(_ROOT), name)
    return file.text()


class _ModelingFile:
    """Definitions in the order in which a file needs them, and its imports from other libraries."""

    def __init__(self) -> None:
        # The source of each definition, by the identity of its node; "" while the definitions that it uses are added.
        self._sources: dict[int, str] = {}
        # Imported names by module; "" for the module itself.
        self._imports: dict[str, set[str]] = {}

    def add(self, module: _Module, name: str) -> None:
        """Add the definition of a name that a module uses, after the definitions that it uses itself.

        `_sources` is in the order of the file. Any name in a definition may be a local one, for which there is no
        definition and no import, so nothing is added.
        """
        root = _module_of(_ROOT)
        if name in root.definitions:
            # The file's own definition replaces one of the project that needs more.
            module = root
        node = module.definitions.get(name)
        if node is None:
            self._add_import(module, name)
        elif id(node) not in self._sources:
            # If two functions call each other, the first one found is written first.
            self._sources[id(node)] = ""
            for used in ast.walk(node):
                if isinstance(used, ast.Name):
                    self.add(module, used.id)
            # Again, at the end.
            del self._sources[id(node)]
            self._sources[id(node)] = module.source(node)

    def _add_import(self, module: _Module, name: str) -> None:
        """Add what a module imports under a name; names that it does not import are Python's own.

        A name of the project becomes a definition of the file, since a user of the export does not have the project.
        """
        if name not in module.imports:
            return
        origin = module.imports[name]
        if origin.module.startswith(_PROJECT):
            self.add(_module_of(origin.module), origin.name)
        else:
            self._imports.setdefault(origin.module, set()).add(origin.name)

    def text(self) -> str:
        """The file: its head, the imports sorted by name, and the definitions in the order of `add`."""
        lines = []
        for origin, names in sorted(self._imports.items()):
            for name in sorted(names):
                if name:
                    lines.append(f"from {origin} import {name}")
                else:
                    lines.append(f"import {origin}")
        return _HEAD + "\n".join(lines) + "\n\n\n" + "\n\n\n".join(self._sources.values()) + "\n"


class _Import(NamedTuple):
    """The source of an imported name: `from module import name`, or `import module` if the name is ""."""

    module: str
    name: str


class _Module:
    """Top-level definitions of a module by name, and the sources of its imports."""

    def __init__(self, name: str) -> None:
        """Read the module's source without importing it; methods that an export cannot use are left out of it."""
        spec = find_spec(name)
        source = read_text(Path(str(spec and spec.origin)))
        self.lines = source.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, _Import] = {}
        for node in ast.parse(source).body:
            self._enter_statement(node)
            # An export of the root's own classes keeps all methods.
            if isinstance(node, ast.ClassDef) and name != _ROOT:
                self._leave_methods_out(node)

    def _enter_statement(self, node: ast.stmt) -> None:
        """Enter a statement of the module: a definition, an assignment or an import.

        An assignment may define several names, also inside of a tuple, and each of them may be what a definition needs.
        """
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    self.definitions[target.id] = node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.imports[alias.name] = _Import(str(node.module), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.imports[alias.name.partition(".")[0]] = _Import(alias.name, "")

    def _leave_methods_out(self, kind: ast.ClassDef) -> None:
        """Remove methods from a class, so that what they use is not added, and mark their lines.

        The lines are marked and not deleted, because the nodes of the file know their places by line numbers.
        """
        methods = [member for member in kind.body if getattr(member, "name", "") in _METHODS_LEFT_OUT]
        for method in methods:
            kind.body.remove(method)
            for line in range(_first_line(method), method.end_lineno or 0):
                self.lines[line] = _LEFT_OUT_LINE

    def source(self, node: ast.stmt) -> str:
        """Return the text of a definition with its decorators and the comment above it."""
        start = _first_line(node)
        while start and self.lines[start - 1].startswith("#"):
            start -= 1
        kept = [line for line in self.lines[start : node.end_lineno] if line is not _LEFT_OUT_LINE]
        return "\n".join(kept).replace("\n\n\n", "\n\n").rstrip()


_module_of = cache(_Module)
# Marks a line that is not written.
_LEFT_OUT_LINE = "# left out"


def _first_line(node: ast.stmt) -> int:
    """Return the index of a definition's first line, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min(part.lineno for part in (node, *decorators)) - 1
