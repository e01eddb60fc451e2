"""The command line of `tripletune build subq`.

Exit codes: 0 done; 1 a call to the teacher failed (run again to continue), or the teacher's replies to more than a
tenth of the questions were unusable; 2 bad input; 3 calls wait for a batch's replies; 4 done, but the teacher could not
label a single question; 130 interrupted.
"""

from __future__ import annotations

import sys

from tripletune.core.program import run_program
from tripletune.data_builders.subq.options import subq_parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; None takes the arguments of the process."""
    parsed = subq_parser().parse_args(arguments)
    kept = "interrupted; replies received so far are in the ledger, run the command again to continue"

    def run() -> None:
        """Import what builds only after the command line was read, which is wrong or `--help` at times."""
        from tripletune.data_builders.subq.command import build_or_estimate

        text = build_or_estimate(parsed)
        if text:
            print(text)

    return run_program(run, stopped=kept)


if __name__ == "__main__":
    sys.exit(main())
