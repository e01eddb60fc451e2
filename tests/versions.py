"""Print a table of the installed packages whose versions differ from requirements.lock: `python tests/versions.py`.

`make test-newest` and `make test-oldest` run it in their environments before the tests.
"""

import re
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"


def locked_versions(lock: str) -> dict[str, str]:
    """Return the version of each package in the text of a lock file, by the package's canonical name."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)}


def installed_versions() -> dict[str, str]:
    """Return the version of each installed package, without a build's label such as `+cpu`."""
    versions = {}
    for package in metadata.distributions():
        versions[canonicalize_name(package.name)] = package.version.partition("+")[0]
    return versions


def table(locked: dict[str, str], installed: dict[str, str]) -> str:
    """Return the packages of the lock that are installed in another version, as a Markdown table."""
    lines = ["| package | lock | here |", "|---|---|---|"]
    for name in sorted(locked.keys() & installed.keys()):
        if locked[name] != installed[name]:
            lines.append(f"| {name} | {locked[name]} | {installed[name]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(locked_versions(LOCK.read_text(encoding="utf-8")), installed_versions()))
