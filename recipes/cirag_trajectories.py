"""Collect a teacher's CIRAG trajectories from several training sets (CIRAG, sections 3.5, 4.1, 4.3 and B.1).

    # 20 questions of each of three training sets, through a Batch API: writes a request file, ends with exit code 3
    python recipes/cirag_trajectories.py --config recipes/configs/cirag_trajectories_small.yaml

    # the paper's 3,000 trajectories, from a hosted model
    python recipes/cirag_trajectories.py --config recipes/configs/cirag_trajectories_paper.yaml

For each training set it draws questions, makes the corpus of their paragraphs, and lets the teacher run the loop over
them; then the teacher's decisions become a data set. These are the commands `build corpus`, `eval run` and
`build trajectories` with one ledger for all, so every part can be looked at by itself (`--dry-run` prints the
runs). Stopped, it continues when the same command is given again; the same options give the same
request files. Exit code 3: calls wait for the replies of a batch.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.data_builders.corpus import CorpusOptions, ensure_corpus
from tripletune.data_builders.datasets.writer import FolderOptions
from tripletune.data_builders.trajectories import TrajectoryOptions, build_trajectories
from tripletune.eval import load_task
from tripletune.eval.suites import run_suites
from tripletune.eval.suites.questions import QuestionOptions, QuestionSuite
from tripletune.models.files import write_text
from tripletune.models.llm.backends import LLMOptions
from tripletune.models.options import parse_command_line, setting, to_arguments, to_yaml
from tripletune.models.program import run_program
from tripletune.rag.search import Opened
from tripletune.rag.systems import LoopFlags, find_system, make_options
from tripletune.rag.text_index import RetrieverKind

TRAJECTORIES = "trajectories"
SYSTEM = "cirag"


def _section(options: type, leave_out: tuple[str, ...] = (), **defaults: Any) -> Any:
    """The options of another program as a section of the configuration."""
    return dataclasses.make_dataclass(
        f"{options.__name__}Section",
        [
            (one.name, one.type, setting(defaults.get(one.name, one.default), one.metadata["help"]))
            for one in dataclasses.fields(options)
            if one.name not in leave_out
        ],
    )


if TYPE_CHECKING:
    TeacherSection = Any
    KeepSection = Any
else:
    TeacherSection = _section(LLMOptions)
    # The paper names no filter.
    KeepSection = _section(TrajectoryOptions, ("system", "records", "roles", "model", "seed"), limit=3000)


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """One training set of a collection.

    Attributes:
        task: How its questions are read and scored, by name.
        file: The benchmark's training file.
        folder: Where its questions, corpus, gold links and results go.
    """

    task: str
    file: str
    folder: Path


@dataclass
class CollectConfig:
    """A whole collection."""

    output_dir: str = setting("runs/cirag_trajectories", "folder of corpora, results, ledger and trajectories")
    files: list[str] = setting([], "training files, each as TASK:FILE")
    questions: int = setting(1000, "questions to draw from each file; 0 takes all", at_least=0)
    seed: int = setting(0, "seed of the draws, and of the split into training and validation")
    retriever: RetrieverKind = setting("dense", "bm25, dense or hybrid")
    encoder: str | None = setting("BAAI/bge-small-en-v1.5", "sentence encoder of dense retrieval and of reranking")
    triples: str | None = setting(None, "triples extracted before, for the loop's option extraction=store")
    options: list[str] = setting([], "options of the loop as NAME=VALUE, such as candidates=50")
    concurrency: int = setting(64, "questions under way at once; with a batch it is always one", at_least=1)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    keep: KeepSection = field(default_factory=KeepSection)

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems = [] if self.files else ["files: name at least one training file, as TASK:FILE"]
        for source in self.sources():
            try:
                load_task(source.task)
            except ValueError as error:
                problems.append(f"files: {error}; write TASK:FILE")
            if not Path(source.file).is_file():
                problems.append(f"files: there is no file {source.file or '(nothing stands after the colon)'}")
        # What the programs behind it would say, told of the names that are used here.
        behind: dict[str, Callable[[], Any]] = {
            "options": self.check_options, "teacher": self.llm, "keep": self.trajectories,
        }  # fmt: skip
        for name, check in behind.items():
            try:
                check()
            except ValueError as error:
                problems.append(f"{name}: {error}")
        return problems

    def sources(self) -> list[QuestionFile]:
        """The training sets, each with a folder of its own."""
        found: list[QuestionFile] = []
        for text in self.files:
            task, _, file = text.partition(":")
            stem = Path(task).stem or "task"
            number = sum(one.folder.name.rpartition("-")[0] == stem or one.folder.name == stem for one in found)
            found.append(QuestionFile(task, file, Path(self.output_dir) / (f"{stem}-{number + 1}" if number else stem)))
        return found

    def check_options(self) -> None:
        """Raise `ValueError` when the loop does not take its options, or an embedder is missing."""
        options = make_options(find_system(SYSTEM), LoopFlags(), self.options)
        if (options.extraction == "store") != bool(self.triples):
            raise ValueError("extraction=store and a file of triples (--triples) go together: name both or none")
        if self.encoder is None and (options.rerank or self.retriever != "bm25"):
            raise ValueError(
                "encoder is not set: dense retrieval and reranking need one (bm25 with rerank=no does not)"
            )

    def llm(self) -> LLMOptions:
        """How the teacher is called; its ledger is that of the collection unless it is named."""
        return LLMOptions(**{**dataclasses.asdict(self.teacher), "ledger": self.ledger})

    @property
    def ledger(self) -> str:
        """The ledger of all calls."""
        return self.teacher.ledger or str(Path(self.output_dir) / "ledger.sqlite")

    def corpus(self, source: QuestionFile) -> CorpusOptions:
        """How a training set's questions are drawn."""
        return CorpusOptions(
            load_task(source.task).reader, train=source.file, train_count=self.questions, seed=self.seed
        )

    def evaluation(self, source: QuestionFile) -> QuestionOptions:
        """How the loop runs over a training set: the options of `tripletune eval run`."""
        folder = source.folder
        return QuestionOptions(
            system=SYSTEM,
            task=source.task,
            data=f"{folder}/train.jsonl",
            output=f"{folder}/run",
            corpus=f"{folder}/train.corpus.jsonl",
            gold=f"{folder}/train.gold.jsonl",
            index=f"{folder}/index",
            retriever=self.retriever,
            encoder=self.encoder,
            triples=self.triples,
            set=list(self.options),
            concurrency=self.concurrency,
        )

    def command(self, source: QuestionFile) -> list[str]:
        """The words of the same run on a command line."""
        words = to_arguments(self.evaluation(source)) + to_arguments(self.llm(), "teacher")
        return ["tripletune", "eval", "run", *words]

    def trajectories(self) -> TrajectoryOptions:
        """What is made of the results."""
        return TrajectoryOptions(**dataclasses.asdict(self.keep), seed=self.seed)


def main(config: CollectConfig, dry_run: bool = False) -> None:
    """Corpora, loops, trajectories."""
    if dry_run:
        lines = [to_yaml(config), *(shlex.join(config.command(source)) for source in config.sources())]
        sys.stdout.write("\n".join(lines) + "\n")
        return

    folder = Path(config.output_dir)
    sources = config.sources()
    for source in sources:
        ensure_corpus(config.corpus(source), source.folder)
    write_text(folder / "config.yaml", to_yaml(config))

    # One client for all, so that a model is loaded once and a round's calls are in one request file.
    teacher = config.llm()
    opened = Opened()
    suites = [QuestionSuite(config.evaluation(source), teacher, opened) for source in sources]
    for suite, source in zip(suites, sources):
        suite.command = config.command(source)
    run_suites(suites)

    results = [suite.options.output for suite in suites]
    output = FolderOptions(str(folder / TRAJECTORIES), overwrite=True)
    statistics = build_trajectories(results, config.trajectories(), output, [config.ledger])
    logging.info("%s: %s trajectories", output.output, statistics["splits"])


def run(argv: list[str] | None = None) -> int:
    """The command line. Returns 0; 1 when a server does not answer, 2 for bad input, 3 when calls wait for a batch."""
    return run_program(
        lambda: main(*parse_command_line(CollectConfig, __doc__ or "", argv)), form="%(asctime)s %(message)s"
    )


if __name__ == "__main__":
    sys.exit(run())
