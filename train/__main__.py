"""Train a task of `train/tasks/`: `tripletune train TASK`, `accelerate launch -m tripletune.train TASK`."""

import sys

from tripletune.core.plugins import about_modules
from tripletune.train import TASKS, main

_USAGE = """usage: tripletune train TASK [--config FILE] [--SECTION.FIELD VALUE ...] [--dry-run]

tasks:
{tasks}
`tripletune train TASK --help` shows its settings, `--dry-run` what it would do.
"""

if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        listed = ""
        for name, about in about_modules(TASKS).items():
            listed += f"  {name.replace('_', '-'):18} {about}\n"
        print(_USAGE.format(tasks=listed))
        sys.exit(0 if words else 2)
    sys.argv = [f"tripletune train {words[0]}", *words[1:]]
    sys.exit(main(words[0]))
