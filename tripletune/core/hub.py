"""Files on the Hugging Face Hub and in its cache, files of data sets, and upload of model and data-set folders.

Tested in `tests/checkpoints/test_push.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tripletune.core.files import read_text
from tripletune.core.options import nearest

if TYPE_CHECKING:
    import argparse

    from datasets import DatasetBuilder
    from huggingface_hub import HfApi, RepoUrl

RepoKind = Literal["model", "dataset"]


def check_not_a_missing_folder(name: str) -> None:
    """Raise `FileNotFoundError` if a name like owner/name is rather the path of a folder or file that is missing.

    Where the Hub is not reached, it would be asked for up to a minute. Runs are written into runs/, and an owner whose
    name is that of a folder here is rarely meant.
    """
    folder, _, last = name.partition("/")
    if folder != "runs" and not Path(folder).is_dir():
        return
    near = nearest(last, [path.name for path in Path(folder).glob("*")], f"{folder}/")
    raise FileNotFoundError(
        f"no such folder or file: {name}{near}. Names below runs/, or below a folder that exists here, are not looked "
        f"for on the Hub: if the Hub has {name}, run the command in another folder"
    )


def hub_file(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a model on the Hub, fetched unless it is in the cache.

    None if the model has no such file, or if Hub and cache do not give it; loading the model reports the reason.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except (OSError, EntryNotFoundError, HFValidationError):
        return None


def cached_commit(name: str, revision: str | None, file: str) -> str | None:
    """The commit at which a branch or tag of a model is in the cache; None if the cache lacks this file of it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:
        return None
    # The cache keeps the files of a commit in snapshots/COMMIT; what is no text means that it lacks the file.
    if not isinstance(path, str):
        return None
    return Path(path).parent.name


def files_of_split(builder: DatasetBuilder, split: str) -> dict[str, Path]:
    """The files of a split of a data set, on this machine, by their names or addresses.

    {} if these files are not JSON, CSV or Parquet, or if the split's name takes only a part of it, such as
    "train[:100]".

    Args:
        builder: What `datasets.load_dataset_builder` returns.
    """
    from datasets import DownloadManager

    data_files = builder.config.data_files or {}
    is_readable = builder.name in ("json", "csv", "parquet")
    if not is_readable or split not in data_files:
        return {}
    # A card may set another separator for its tables.
    if builder.name == "csv" and builder.config.sep not in (",", "\t"):
        return {}
    downloads = DownloadManager(dataset_name=builder.dataset_name)
    files = {}
    for address in map(str, data_files[split]):
        is_local = Path(address).is_file()
        files[address] = Path(address if is_local else downloads.download(address))
    return files


def push_folder(folder: str | Path, repo: str, kind: RepoKind, files: Sequence[str]) -> str:
    """Upload files (names or patterns) of a folder to the Hugging Face Hub in one commit, and return their address.

    Such files of the repository that the folder lacks are deleted, so that no earlier weights or rows stay. See
    `make_repository` for `repo` and `kind`.
    """
    from huggingface_hub import ModelCard

    with _hub_client(repo) as api:
        ModelCard(read_text(Path(folder) / "README.md")).validate(repo_type=kind)
        place = make_repository(repo, kind)
        ours = list(files)
        api.upload_folder(
            repo_id=place.repo_id, folder_path=folder, repo_type=kind, allow_patterns=ours, delete_patterns=ours
        )
    return str(place)


def make_repository(repo: str, kind: RepoKind) -> RepoUrl:
    """Create a repository on the Hub, private, unless it exists.

    Training calls it before its work, so that a missing token or permission is reported at once. Private, because what
    was published cannot be taken back; its owner can open it on the Hub.

    The token comes from `hf auth login` or HF_TOKEN and is not stored.
    """
    with _hub_client(repo) as api:
        return api.create_repo(repo, repo_type=kind, private=True, exist_ok=True)


@contextmanager
def _hub_client(repo: str) -> Iterator[HfApi]:
    """Yield the Hub's client; its errors become one line that says what to do."""
    from huggingface_hub import HfApi, errors

    api = HfApi(library_name="tripletune")
    try:
        yield api
    except errors.OfflineModeIsEnabled:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset HF_HUB_OFFLINE") from None
    except errors.LocalTokenNotFoundError:
        raise ValueError("the Hub needs a token: run hf auth login, or set HF_TOKEN") from None
    except errors.HFValidationError as error:
        raise ValueError(f"repository {repo}: {error}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        reason = " ".join(str(error.server_message or error).split())
        if status in (401, 403):
            reason += "; run hf auth login, or set HF_TOKEN"
        raise OSError(f"{api.endpoint} refused {repo} ({status}): {reason}") from None
    except errors.HTTPError as error:
        raise OSError(f"no connection to {api.endpoint}: {error}") from None


def add_push(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `push` to a parser."""
    parser.add_argument("folder", metavar="DIR", help="folder to upload; files of other programs are left out")
    parser.add_argument("repo", metavar="REPO", help="owner/name on the Hub; created as private if it does not exist")
