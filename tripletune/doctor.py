"""Report what is installed and what works (`tripletune doctor`); its output belongs in bug reports."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import tripletune
from tripletune.core.calls import Message, Sampling
from tripletune.core.command_line import CommandParser
from tripletune.core.program import code_version, run_program, versions
from tripletune.core.tables import printable
from tripletune.llm.backends import LLMOptions, load_backend, open_client, read_spec
from tripletune.models.loading import usual_dtype

# A state, the thing it is about, and what to know or do. Only some users need a MISSING thing; all need a BROKEN one.
Row = tuple[str, str, str]
OK, MISSING, BROKEN = "ok", "missing", "broken"
_LINKS = "run `git config core.symlinks true && git checkout -- tripletune`"


def _code() -> Iterator[Row]:
    about = code_version()
    yield OK, "tripletune", ", ".join([*about.values(), str(Path(tripletune.__file__).parent)])
    yield OK, "python", f"{sys.version.split()[0]}, {sys.platform}"
    package = Path(tripletune.__file__).parent
    links = [path for path in package.iterdir() if path.suffix not in (".py", ".typed") and path.name != "__pycache__"]
    if broken := sorted(path.name for path in links if not path.is_dir()):
        yield MISSING, "links", f"{', '.join(broken)} in {package}: {_LINKS}"


def _packages() -> Iterator[Row]:
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in metadata.requires("tripletune") or ()]
    except metadata.PackageNotFoundError:
        yield MISSING, "packages", "this checkout is not installed, so its requirements are unknown: pip install -e ."
        return
    found = versions(one.name for one in wanted)

    def fits(one: Requirement) -> bool:
        return found[one.name][0].isdigit() and one.specifier.contains(found[one.name], prereleases=True)

    for one in wanted:
        if one.marker is None or one.marker.evaluate():
            about = found[one.name] + ("" if fits(one) else f": pip install '{one}'")
            yield OK if fits(one) else BROKEN, one.name, about
    for extra in sorted({*(metadata.metadata("tripletune").get_all("Provides-Extra") or ())} - {"dev"}):
        parts = [one for one in wanted if one.marker and one.marker.evaluate({"extra": extra})]
        said = ", ".join(f"{one.name} {found[one.name]}" for one in parts)
        whole = all(map(fits, parts))
        yield OK if whole else MISSING, f"[{extra}]", said + ("" if whole else f": pip install 'tripletune[{extra}]'")


def _devices() -> Iterator[Row]:
    try:
        import torch
    except Exception as error:
        yield BROKEN, "torch", f"{error}: install torch again (https://pytorch.org/get-started)"
        return
    yield OK, "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        yield OK, f"gpu {number}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield MISSING, "gpu", f"torch {torch.__version__} finds no GPU, so everything runs on the CPU"
    yield OK, "dtype", f"{usual_dtype()} by default"


def _folders() -> Iterator[Row]:
    from huggingface_hub.constants import HF_HUB_CACHE

    places = {"hub cache": (Path(HF_HUB_CACHE), "HF_HOME"), "temporary": (Path(tempfile.gettempdir()), "TMPDIR")}
    for name, (folder, variable) in places.items():
        there = next(one for one in (folder, *folder.parents) if one.exists())
        writable = os.access(there, os.W_OK)
        yield OK if writable else BROKEN, name, f"{folder}{'' if writable else f': not writable; set {variable}'}"


async def _endpoint(spec: str) -> Row:
    """Check server, key and model name with one short call."""
    role, fields = read_spec(spec)
    options = LLMOptions(**fields, attempts=1, timeout=20.0)  # type: ignore[arg-type]
    if not load_backend(options.backend).sends:
        return OK, "model", f"{spec} writes calls into a file, so no call was sent"
    messages: list[Message] = [{"role": "user", "content": "Reply with the word yes."}]
    try:
        client = open_client(options)
        try:
            reply = await client.chat(messages, role=role or "doctor", sampling=Sampling(max_tokens=16))
        finally:
            await client.close()
    except Exception as error:
        return BROKEN, "model", f"{spec}: {error}"
    return OK, "model", f"{spec} replies {reply.text[:40]!r} in {reply.seconds:.1f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return exit code 1 if something that all users need is broken, else 0."""
    parser = CommandParser(
        prog="tripletune doctor",
        description="Show for each part if it is ok, missing (few users need it) or broken, and what to do.",
        example="tripletune doctor --llm openai:gpt-4o-mini",
    )
    parser.add_argument("--llm", metavar="MODEL", help="chat model to test with one short call: BACKEND:MODEL[@URL]")
    args = parser.parse_args(argv)

    def program() -> int:
        rows = [*_code(), *_packages(), *_devices(), *_folders()]
        rows += [asyncio.run(_endpoint(args.llm))] if args.llm else []
        for state, name, about in rows:
            print(printable(f"{state:8} {name:22} {about}"))
        return int(any(state == BROKEN for state, *_ in rows))

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
