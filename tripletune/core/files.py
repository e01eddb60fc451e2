"""Read small files, and write results as files and folders.

An output appears complete or not at all. Only one program writes an output at a time. Input files and files of other
programs are never overwritten. Symbolic links are followed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import reprlib
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)
# All prompts, in a folder per kind of caller.
PROMPTS = Path(__file__).parents[1] / "prompts"
LOCK = ".lock"
# Files that an output folder may already hold: logs of launchers and hidden files.
LOGS = ("*.log", "*.out", "*.err", ".*")
# While NAME is written, the new file or folder is `.NAME.tripletune-new`, and the old one is `.NAME.tripletune-old`.
_NEW, _OLD = "tripletune-new", "tripletune-old"
# Size in bytes from which the digest of a file is remembered.
_LARGE = 2**26


def refuse_constant(name: str) -> None:
    """Reject NaN and infinite numbers in JSON."""
    raise ValueError(f"{name} is not a number; write null for a missing value")


JSON = json.JSONDecoder(parse_constant=refuse_constant)


def own_or_packaged(path: str | Path) -> str | Path:
    """A path; one below `recipes/` that the working folder lacks is that of the installed package."""
    packaged = PROMPTS.parent / path
    is_packaged = Path(path).parts[:1] == ("recipes",) and not Path(path).exists() and packaged.exists()
    return packaged if is_packaged else path


def read_text(path: str | Path) -> str:
    """Read a small text file, which must be UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None


def read_prompt(path: str | Path) -> str:
    """Read a prompt from a file, of the user or of this package; an empty one would send calls without instruction."""
    text = read_text(own_or_packaged(path)).strip()
    if not text:
        raise ValueError(f"{path}: the prompt is empty")
    return text


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a small file; Infinity is allowed, as some model configurations hold it."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def json_line(row: object, indent: int | None = None) -> str:
    """Return a value as JSON with a line break; NaN and infinite numbers raise a `ValueError`."""
    try:
        return json.dumps(row, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        raise ValueError(f"JSON can't hold NaN or infinite numbers, found {row!r:.200}") from None


def finite(value: Any) -> Any:
    """Replace NaN and infinite numbers, as in losses of a run that diverged, by None: JSON has no such numbers."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def flatten(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Flatten nested values, joining their names; an interval (with a "mean") stays one value.

    Trackers, settings of runs and tables of scores need one level, but an interval means something only as a whole.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and "mean" not in value:
            for inner_name, inner in flatten(value, separator).items():
                flat[f"{name}{separator}{inner_name}"] = inner
        else:
            flat[name] = value
    return flat


def few(sentences: Sequence[str], most: int = 3) -> str:
    """Join the first `most` sentences, and say how many more there are, so that an error fits a screen."""
    shown = list(sentences[:most])
    if len(sentences) > most:
        shown.append(f"and {len(sentences) - most} more")
    return "; ".join(shown)


def short_value(value: object) -> str:
    """A value as Python writes it, for an error; a long text is cut in the middle and stays quoted."""
    writer = reprlib.Repr()
    writer.maxstring = writer.maxother = 60
    return writer.repr(value)


def write_text(path: str | Path, text: str) -> None:
    """Write a small file in one step."""
    with new_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: object) -> None:
    """Write a JSON file in one step."""
    write_text(path, json_line(value, 2))


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal digits.

    Raises:
        FileNotFoundError: The path is missing or a folder; Python's own error would not say what to give.
    """
    if Path(path).is_dir():
        raise FileNotFoundError(f"{path} is a folder; give a file")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_fingerprint(folder: str | Path, endings: Sequence[str] = ("safetensors", "bin")) -> str:
    """A digest of the files in a folder with these endings, which copies share; "" if there are none."""
    files: list[Path] = []
    for ending in endings:
        files += [file for file in Path(folder).rglob(f"*.{ending}") if file.is_file()]
    if not files:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        if size > _LARGE:
            digest.update(_remembered_digest(file).encode())
        else:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _remembered_digest(file: Path) -> str:
    """`file_digest` of a large file, which is read again only after it has changed.

    Gigabytes would take minutes at every start. A part of them would not do: training of a few tokens changes only
    their rows. The time of the last change of the inode can't be set back, as that of the content can.
    """
    about = file.stat()
    state = (str(file.resolve()), about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    memory = cache_dir() / "digests" / hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()
    if memory.is_file():
        return read_text(memory)
    digest = file_digest(file)
    # The digest is right also where nothing can be kept.
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_text(memory, digest)
    return digest


def cache_dir() -> Path:
    """The folder for converted models, and for what is known of large files."""
    return Path(os.environ.get("TRIPLETUNE_CACHE") or Path.home() / ".cache" / "tripletune")


def check_new(output: str | Path, sources: Sequence[str | Path] = ()) -> Path:
    """Resolve the output path; raise an error if it is, holds or lies in one of the `sources`.

    Replacing such an output would delete what is still being read.
    """
    if not str(output):
        raise ValueError("output: the path is empty; give a folder or file")
    place = Path(output).resolve()
    for source in map(Path, sources):
        read = source.resolve()
        holds_it = place in read.parents
        lies_in_it = read.is_dir() and read in place.parents
        if place == read or holds_it or lies_in_it:
            raise ValueError(f"output {output} is, holds or lies in the input {source}: give another path")
    return place


def private(path: str, flags: int) -> int:
    """An `opener` for `open` that makes new files readable only by their owner."""
    return os.open(path, flags, 0o600)


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield a scratch file, which replaces `path` when the block succeeds, and is removed when it fails."""
    place = Path(path).resolve()
    if place.is_dir():
        raise IsADirectoryError(f"output {path} is a folder; give a file")
    place.parent.mkdir(parents=True, exist_ok=True)
    # The name holds the process id, so that two programs that write the same file do not mix their output.
    scratch = place.with_name(f".{place.name}.{os.getpid()}.{_NEW}")
    try:
        yield scratch
        os.replace(scratch, place)
    finally:
        scratch.unlink(missing_ok=True)


def check_folder(
    output: str | Path, made: Sequence[str], overwrite: bool, sources: Sequence[str | Path] = (), continues: str = ""
) -> None:
    """Raise an error before any work is done if an output folder cannot be written; see `new_folder`.

    A folder with the file `continues` is continued; any other folder may hold only names that match `made`. So a
    mistyped output path never costs files of the user or of another program, not even with `overwrite`.
    """
    place = check_new(output, sources)
    if place.exists() and not place.is_dir():
        raise FileExistsError(f"output {output} is a file; give a folder")
    names: list[str] = []
    if place.is_dir():
        names = sorted(path.name for path in place.iterdir())
    if continues in names:
        return
    foreign = [name for name in names if not _matches_any(name, made)]
    # Another program's folder may also hold a README.md; only the first name shows that the folder is ours.
    if not continues and not fnmatch.filter(names, made[0]):
        foreign = names
    if foreign:
        raise FileExistsError(
            f"output folder {output} holds files that this program did not make ({', '.join(foreign[:3])}); "
            "give another folder"
        )
    if names and not overwrite and not continues:
        raise FileExistsError(f"output folder {output} is not empty; give another folder, or --overwrite to replace it")


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file name has one of the patterns; in the same way on all systems, unlike `fnmatch.fnmatch`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def new_folder(
    output: str | Path,
    made: Sequence[str],
    overwrite: bool = False,
    sources: Sequence[str | Path] = (),
    resume: bool = False,
) -> Iterator[Path]:
    """Yield a scratch folder beside `output`, which replaces `output` when the block succeeds.

    `os.replace` cannot replace a folder that holds files, so the old one is renamed first, and comes back if the
    program is killed in between. The scratch folder is locked, and its lock file is removed only in its new place.

    Args:
        made: Patterns (`fnmatch`) of the names that the program writes; the first name is always written. A folder with
            other names is never replaced.
        sources: Input files and folders, which must not be replaced.
        resume: Keep the scratch folder when the block fails, so that the next call continues with its files.
    """
    place = Path(output).resolve()
    old = place.with_name(f".{place.name}.{_OLD}")
    scratch = place.with_name(f".{place.name}.{_NEW}")
    lock = lock_folder(scratch, f"output folder {output}: another program is writing it")
    try:
        if old.exists() and not place.exists():
            os.replace(old, place)  # the program was killed between the two renames below
        check_folder(output, made, overwrite, sources)
        shutil.rmtree(old, ignore_errors=True)
        if not resume:
            _empty_folder(scratch)
        yield scratch
        _share_weights(scratch)
        if place.exists():
            os.replace(place, old)
        os.replace(scratch, place)
        (place / LOCK).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if not resume:
            shutil.rmtree(scratch, ignore_errors=True)
        lock.close()


def _share_weights(folder: Path) -> None:
    """Give weights the permissions of other new files: safetensors 0.8 writes files that only their owner may read.

    A server under another user, or a colleague on the same machine, could not load them. The lock file of the folder
    has the permissions that the user's settings (umask) give to a new file.
    """
    lock = folder / LOCK
    if lock.is_file():
        permissions = stat.S_IMODE(lock.stat().st_mode)
        for weights in folder.rglob("*.safetensors"):
            weights.chmod(permissions)


def _empty_folder(folder: Path) -> None:
    """Remove what a killed program left in a locked folder, except the lock; links are removed, not followed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def lock_folder(folder: str | Path, refusal: str, wait: bool = False) -> IO[str]:
    """Lock a folder, and create it if it is missing; the system releases the lock when the process ends in any way.

    If another process holds the lock, `refusal` is raised, or with `wait` logged. Closing the returned file releases
    the lock. On systems without file locks (Windows), nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        return open(os.devnull)
    folder = Path(folder)
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / LOCK).open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    file.close()
                    raise ValueError(refusal) from None
                logger.warning("%s; waiting for it", refusal)
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                # Some network file systems have no locks.
                logger.warning("%s can't be locked (%s): make sure that no other process writes into it", folder, error)
            is_still_there = os.fstat(file.fileno()).st_ino == (folder / LOCK).stat().st_ino
            if is_still_there:
                return file
            file.close()
        except FileNotFoundError:
            pass
        # Another process has renamed the folder meanwhile, so the lock is on the wrong folder.
