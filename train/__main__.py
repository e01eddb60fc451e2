"""Train a task of `train/tasks/`: `tripletune train TASK`, `accelerate launch -m tripletune.train TASK`."""

import sys

from tripletune.core.plugins import names_in
from tripletune.train import TASKS, main

if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        listed = "".join(f"  {name.replace('_', '-')}\n" for name in names_in(TASKS))
        print(
            f"usage: tripletune train TASK [--config FILE] [--SECTION.FIELD VALUE ...] [--dry-run]\n\ntasks:\n{listed}"
        )
        sys.exit(0 if words else 2)
    sys.argv = [f"tripletune train {words[0]}", *words[1:]]
    sys.exit(main(words[0]))
