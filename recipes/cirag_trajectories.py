"""Collect a teacher's CIRAG trajectories from several training sets (CIRAG, sections 3.5, 4.1, 4.3 and B.1).

    # 20 questions of each of three training sets, through a Batch API: writes a request file, ends with exit code 3
    python recipes/cirag_trajectories.py --config recipes/configs/cirag_trajectories_small.yaml

    # the paper's 3,000 trajectories, from a hosted model
    python recipes/cirag_trajectories.py --config recipes/configs/cirag_trajectories_paper.yaml

For each training set it draws questions, makes the corpus of their paragraphs, and lets the teacher run the loop over
them; then the teacher's decisions become a data set. These are the commands `data_builders.corpus`, `eval run` and
`data_builders.trajectories` with one ledger for all, so every part can be looked at by itself (`--dry-run` prints the
runs). Stopped by whatever means, it goes on when the same command is given again; the same options give the same
request files. Exit code 3: calls wait for the replies of a batch.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path

from tripletune.models.options import ConfigError, parse_command_line, to_yaml
from tripletune.train.collect_config import CollectConfig

TRAJECTORIES = "trajectories"


def main(config: CollectConfig, dry_run: bool = False) -> None:
    """Corpora, loops, trajectories."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, force=True)
    for name in ("anthropic", "bm25s", "faiss", "httpcore", "httpx", "openai", "sentence_transformers", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if dry_run:
        print(to_yaml(config))
        for source in config.sources():
            print(shlex.join(config.command(source)))
        return

    from tripletune.data_builders.corpus import ensure_corpus
    from tripletune.data_builders.datasets.writer import FolderOptions
    from tripletune.data_builders.trajectories import build_trajectories
    from tripletune.eval.harness import run_suites
    from tripletune.eval.suites.questions import QuestionSuite
    from tripletune.eval.systems import open_llms

    folder = Path(config.output_dir)
    sources = config.sources()
    for source in sources:
        ensure_corpus(config.corpus(source), source.folder)
    save_config(config, folder)

    # One client for all, so that a model is loaded once and a round's calls are in one request file.
    teacher = config.llm()
    llms = open_llms(teacher)
    suites = [QuestionSuite(config.evaluation(source), teacher, llms) for source in sources]
    for suite, source in zip(suites, sources):
        suite.command = config.command(source)
    run_suites(suites, clients=llms[:1])

    results = [suite.options.output for suite in suites]
    output = FolderOptions(str(folder / TRAJECTORIES), overwrite=True)
    statistics = build_trajectories(results, config.trajectories(), output, [config.ledger])
    logging.info("%s: %s trajectories", output.output, statistics["splits"])


def save_config(config: CollectConfig, folder: Path) -> None:
    """Write the resolved configuration into the run folder, in one step."""
    scratch = folder / "config.yaml.tmp"
    scratch.write_text(to_yaml(config), encoding="utf-8")
    os.replace(scratch, folder / "config.yaml")


def run(argv: list[str] | None = None) -> int:
    """The command line; bad input gives one clear message and exit code 2."""
    from tripletune.eval.harness import QuestionsPending
    from tripletune.models.llm.client import CallError

    try:
        main(*parse_command_line(CollectConfig, __doc__ or "", argv))
    except (ConfigError, OSError, ValueError) as error:
        logging.debug("details", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except QuestionsPending as pending:
        print(pending, file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run())
