"""`tripletune build` and `tripletune build pairs`."""

import sys

from tripletune.data_builders.text_to_triples.build import main

if __name__ == "__main__":
    sys.exit(main())
