"""`tripletune build` and `tripletune build world`."""

import sys

from tripletune.data_builders.world.build import main

if __name__ == "__main__":
    sys.exit(main())
