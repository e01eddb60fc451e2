"""`tripletune build` and `tripletune build subq`."""

from tripletune.data_builders.hotpotqa_subq.build import main

if __name__ == "__main__":
    main()
