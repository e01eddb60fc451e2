"""What the scripts of this folder share; it stands beside them, since they run in environments without our code."""

import sys
from collections.abc import Callable
from importlib.metadata import version

QUESTION = "Where was the author of Glass Harbour born?"
URL = sys.argv[1]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look up", "parameters": {"type": "object", "properties": {}}},
}
# A chat in which a tool was called before the question.
HISTORY = [
    {"role": "user", "content": "Look it up."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "A novel."},
    {"role": "assistant", "content": "It is a novel."},
]
_failures: list[str] = []


def show(*packages: str) -> None:
    """Print the versions of packages."""
    print("  ".join(f"{package} {version(package)}" for package in packages), flush=True)


def check(what: str, ask: Callable[[], object], expected: object) -> None:
    """Print whether a call gives what is expected."""
    try:
        given = ask()
    except Exception as error:
        given = f"{type(error).__name__}: {error}"
    _report(what, given == expected, given)


def refused(what: str, ask: Callable[[], object], words: str) -> None:
    """Print whether a call raises an error with these words."""
    try:
        given: object = ask()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _report(f"{what}, refused", words in text, text)
    else:
        _report(f"{what}, refused", False, given)


def finish() -> None:
    """End with exit code 1 if something was not as expected."""
    sys.exit(bool(_failures))


def _report(what: str, is_right: bool, given: object) -> None:
    """Print a line, and note a failure for the exit code."""
    print(f"{'ok  ' if is_right else 'FAIL'} {what}: {' '.join(str(given).split())[:300]}", flush=True)
    if not is_right:
        _failures.append(what)
