"""Train what a file in `train/tasks/` says: `tripletune train TASK`, `accelerate launch -m tripletune.train TASK`."""

import sys

from tripletune.train import main, usage

if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        sys.exit(0 if words else 2)
    sys.argv = [f"tripletune train {words[0]}", *words[1:]]
    sys.exit(main(words[0]))
