"""Private names of other libraries: each is listed, and an error about a missing one names the library."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import tripletune
from tripletune.core import libraries
from tripletune.core.libraries import LibraryError
from tripletune.core.private_names import USES
from tripletune.core.program import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("benchmarks", "checkpoints", "data_builders", "eval", "models", "rag", "recipes", "serve", "train")
FILES = [*ROOT.glob("tripletune/*.py"), *ROOT.glob("tripletune/core/**/*.py"), *ROOT.glob("tripletune/llm/**/*.py")]
FILES += [path for room in ROOMS for path in sorted(ROOT.glob(f"{room}/**/*.py"))]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
NAMES = [(use, private) for use, listed in USES.items() for private in listed]
# Modules below a library's top one that its documentation tells users to import from.
DOCUMENTED = {
    "accelerate.utils", "datasets", "huggingface_hub.constants", "huggingface_hub.dataclasses",
    "huggingface_hub.errors", "huggingface_hub.repocard_data", "jsonschema.exceptions", "markdown_it.token",
    "matplotlib.axes",
    "matplotlib.backends.backend_agg", "matplotlib.figure", "mcp.server.mcpserver", "mcp.server.mcpserver.exceptions",
    "mcp.types", "nltk.stem.porter",
    "packaging.requirements", "peft.tuners.lora", "peft.tuners.tuners_utils", "py3langid.langid", "pyarrow.compute",
    "pyarrow.parquet", "ray.exceptions", "rich.console", "rich.table", "rich.text", "rouge_score.rouge_scorer",
    "safetensors.torch", "scipy.optimize", "scipy.sparse", "scipy.sparse.csgraph", "scipy.stats",
    "setuptools.command.build_py", "setuptools.errors", "starlette.applications", "starlette.exceptions",
    "starlette.middleware", "starlette.middleware.trustedhost", "starlette.requests", "starlette.responses",
    "starlette.routing", "torch.distributed.tensor", "torch.optim.lr_scheduler", "torch.utils.data",
    "torch_geometric.data", "torch_geometric.llm.models",
    "torch_geometric.nn", "torch_geometric.utils", "tqdm.auto", "transformers.cache_utils",
    "transformers.integrations", "transformers.integrations.sdpa_attention", "transformers.masking_utils",
    "transformers.modeling_outputs", "transformers.pytorch_utils", "transformers.utils", "transformers.utils.logging",
}  # fmt: skip
# Methods of every named tuple.
OF_PYTHON = {"_asdict", "_fields", "_replace"}


def dependencies():
    """All requirements of pyproject.toml besides those of development, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra, listed in project["optional-dependencies"].items():
        if extra != "dev":
            texts += listed
    return {canonicalize_name(found.name): found for found in map(Requirement, texts)}


def locked():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_installs_on_the_first_python_of_its_series():
    """Debian 12 has Python 3.11.2; a package that wants 3.11.5 would end `make setup` there."""
    wanted = {}
    for package in importlib.metadata.distributions():
        if canonicalize_name(package.name) in locked():
            wanted[package.name] = package.metadata["Requires-Python"] or ""
    assert wanted
    assert not {name: text for name, text in wanted.items() if not SpecifierSet(text).contains("3.11.0")}


def test_the_tested_versions_are_those_of_the_lock_and_inside_the_bounds():
    tested, lock = yaml.safe_load(libraries.TESTED.read_text(encoding="utf-8")), locked()
    wanted = dependencies()
    missing = {name: lock[name] for name in wanted if name in lock and lock[name] not in tested.get(name, ())}
    assert not missing, f"add these versions to {libraries.TESTED}"
    assert set(tested) <= {*wanted, "python"}
    outside = {
        name: version
        for name, versions in tested.items()
        for version in versions
        if name in wanted and not wanted[name].specifier.contains(version)
    }
    assert not outside


def test_libraries_with_private_names_have_upper_bounds():
    wanted = dependencies()
    used = {private.library for _, private in NAMES} - {libraries.PYTHON}
    assert used <= set(wanted)
    unbound = [name for name in used if not any(one.operator == "<" for one in wanted[name].specifier)]
    assert not unbound


def without(monkeypatch, name):
    """Make a library look like a future version without a name of `USES`."""
    module, path, arguments, attribute = re.fullmatch(r"([\w.]+):([\w.]+?)(?:\((.+)\)|@(\w+))?", name).groups()
    home = importlib.import_module(module)
    owner, _, member = path.rpartition(".")
    if attribute:
        monkeypatch.setattr(home, path, type(path, (), {}))
    elif arguments and not owner:
        monkeypatch.setattr(home, member, lambda: None)
    elif not owner:
        # A lazy module would find the name again.
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    else:
        first, *others = owner.split(".")
        real = getattr(home, first)
        names = [] if others else [key for key in dir(real) if key not in (member, "__dict__")]
        stub = SimpleNamespace(**{key: getattr(real, key) for key in names})
        if arguments:
            setattr(stub, member, lambda self: None)
        monkeypatch.setattr(home, first, stub)


@pytest.mark.parametrize(("use", "private"), NAMES, ids=[f"{use}: {private.name}" for use, private in NAMES])
def test_the_error_about_a_missing_name_names_library_and_versions(use, private, monkeypatch):
    pytest.importorskip(private.name.partition(":")[0].partition(".")[0])
    monkeypatch.setitem(USES, use, [private])
    libraries.check_use(use)
    without(monkeypatch, private.name)
    monkeypatch.setattr(libraries, "installed", lambda library: "99.0")
    with pytest.raises(LibraryError) as error:
        libraries.check_use(use)
    shown = str(error.value)
    assert shown.startswith(
        f"{private.library} 99.0 has no {private.name.partition(':')[2]}, which is needed for {use}"
    )
    assert f"Tested were {', '.join(libraries.tested(private.library))}: " in shown


@pytest.mark.parametrize(
    ("use", "module"),
    [
        ("decoding", "models.local.continuous_batch"),
        ("the Graph-LLM", "models.graph_llm"),
        ("training", "train.engine"),
        ("trackers", "train.tracking"),
        ("trainers of TRL", "train.trl_trainers"),
        ("serve", "serve.app"),
        ("command lines", "core.parser"),
    ],
)
def test_a_module_asks_before_it_uses_the_names(use, module, monkeypatch):
    # What it imports must not see the stub, which later tests would find in it.
    importlib.import_module(f"tripletune.{module}")
    without(monkeypatch, USES[use][-1].name)
    spec = importlib.util.find_spec(f"tripletune.{module}")
    # A second copy, whose import ends at the error.
    copy = importlib.util.spec_from_file_location("copy_of_the_module", spec.origin)
    with pytest.raises(LibraryError, match="Tested were"):
        copy.loader.exec_module(importlib.util.module_from_spec(copy))


def test_every_name_is_asked_for():
    asked = {"libraries.check_use": set(), "libraries.take": set()}
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in asked:
            asked[ast.unparse(node.func)].add(ast.literal_eval(node.args[0]))
    checked, taken = asked.values()
    assert not [private.name for use, private in NAMES if use not in checked and private.name not in taken]
    assert checked <= set(USES)
    assert taken <= {private.name for _, private in NAMES}


def own_names():
    """Names of our functions, classes, fields and attributes of `self`."""
    found = set(OF_PYTHON)
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(ast.unparse(node).removeprefix("self."))
    return found


def private_uses(tree, known):
    """Yield line and text of each private name and undocumented module in a file, besides the known names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and node.attr not in known:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.keyword) and re.match("_[a-z]", node.arg or ""):
            yield node.value.lineno, f"{node.arg}="
        elif isinstance(node, ast.ImportFrom) and "." in (node.module or ""):
            free = (*sys.stdlib_module_names, "tripletune", "benchmarks")
            if node.module.partition(".")[0] not in free and node.module not in DOCUMENTED:
                yield node.lineno, f"from {node.module}"


def test_no_other_module_uses_private_names():
    listed = {word for _, private in NAMES for word in re.findall(r"\w+", private.name)}
    known = own_names() | listed
    found = [f"{path}:{line}: {text}" for path, tree in TREES.items() for line, text in private_uses(tree, known)]
    assert not found, "use what the library documents, or list the name in core/private_names.py"
    source = "from trl.trainer.utils import pad\ntrainer._metrics\ntrainer._secret\nrun(_now=1)"
    assert [text for _, text in private_uses(ast.parse(source), known)] == [
        "from trl.trainer.utils", "trainer._secret", "_now=",
    ]  # fmt: skip


def own_classes():
    """Our classes that extend a class of another library."""
    for info in pkgutil.walk_packages(tripletune.__path__, "tripletune."):
        if info.name.endswith("__main__") or ".recipes." in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            # Of an extra that is not installed.
            if error.name not in EXTRAS:
                raise
            continue
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == info.name:
                yield kind


@pytest.mark.slow
def test_private_methods_that_we_override_are_listed():
    listed = {word for _, private in NAMES for word in re.findall(r"\w+", private.name)} | {"_abc_impl"}
    unlisted = set()
    for kind in own_classes():
        own = [base for base in kind.__mro__ if base.__module__.startswith("tripletune.")]
        others = [base for base in kind.__mro__ if "." in base.__module__ and base not in own]
        members = {name for base in own for name in vars(base) if re.match("_[a-z]", name)}
        inherited = {name for base in others for name in vars(base)}
        unlisted |= {f"{kind.__name__}.{name}" for name in members & inherited - listed}
    assert not unlisted


def test_an_error_that_a_new_version_could_cause_says_so(monkeypatch):
    monkeypatch.setattr(libraries, "installed", lambda library: libraries.tested(library)[-1] + "+cpu")
    assert libraries.untested("torch") == ""
    monkeypatch.setattr(libraries, "installed", lambda library: "99.0")
    assert libraries.untested("transformers").startswith(" (or transformers 99.0 is the reason, which was not tested")
