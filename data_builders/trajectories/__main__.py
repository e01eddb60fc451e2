"""`tripletune build` and `tripletune build trajectories`."""

import sys

from tripletune.data_builders.trajectories.build import main

if __name__ == "__main__":
    sys.exit(main())
