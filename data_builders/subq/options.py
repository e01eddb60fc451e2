"""Options of a HotpotQA-SUBQ build, and its benchmark files with their annotations."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.questions import Dropped, DropReason, Issues, Question, Questions
from tripletune.core.options import rare, require, setting
from tripletune.core.plugins import about_modules
from tripletune.core.program import progress
from tripletune.data_builders.datasets.split import split_name_problems, split_of
from tripletune.data_builders.datasets.writer import FolderOptions
from tripletune.data_builders.readers import get_reader, with_linked_passages
from tripletune.data_builders.subq import FirstSubquery, Shown
from tripletune.llm.backends import LLMOptions, add_llm, backend_names
from tripletune.rag.search.options import RetrieverKind

if TYPE_CHECKING:
    from tripletune.data_builders.datasets.lookup import SeenTable

T = TypeVar("T")

# Parts of the mix by reader, with the paper's number of questions: the first of each part in Self-RAG's training data.
PARTS = {"asqa": 3_897, "arc_easy": 2_147}
# The reader of the questions that RAS's authors labelled.
LABELLED = "ras_labels"
# The teacher without a model: recorded replies and gold annotations.
ANNOTATIONS = "annotations"
_GROUPS = {
    "labels": ("first_subquery", "distractors", "failed_searches", "triple_file", "check_facts"),
    "real searches": ("retriever", "encoder", "top_k"),
    "what the teacher is asked": (
        "corpus", "triples_from", "show_documents", "prompts", "json_schema", "on_call_error", "concurrency"),
    "direct-answer test": ("direct_answer_model", "direct_answers", "filtered_answers", "batch_size", "max_new_tokens"),
    "which questions": ("limit", "asqa_count", "arc_easy_count", "validation_fraction", "split_name", "seed"),
    "files": ("overwrite", "format", "shard_size", "tokenizer"),
}  # fmt: skip
# Options that only a teacher LLM uses, besides `--teacher-...`.
_LLM_ALONE = ("prompts", "show_documents", "triples_from", "json_schema", "on_call_error", "dry_run", "price")
# A colon that belongs neither to a drive letter nor to an address.
_SEPARATOR = re.compile(r":(?!//)(?!(?:(?<=^[A-Za-z]:)|(?<=:[A-Za-z]:))[\\/])")


@dataclass(frozen=True)
class Source:
    """One benchmark file to build from: `[NAME=]READER:LOCATION[:ANNOTATIONS]`."""

    name: str
    reader: str
    location: str
    annotations: str | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read the command-line form; without `NAME=`, the source is named after its reader.

        An empty part is an error, since `hotpotqa::replies.jsonl` would else read a file without a name.
        """
        head, _, files = text.partition(":")
        name, equals, reader = head.partition("=")
        location, annotations = _split_files(files)
        is_named = name and (reader or not equals)
        if not is_named or not location or annotations == "":
            raise ValueError(
                f"source {text!r}: write it as READER:FILE[:ANNOTATIONS] or NAME=READER:FILE[:ANNOTATIONS]"
            )
        return cls(name, reader or name, location, annotations)

    @property
    def text(self) -> str:
        """The command-line form, with the name."""
        return ":".join(filter(None, (f"{self.name}={self.reader}", self.location, self.annotations)))

    @property
    def needs_teacher(self) -> bool:
        """Whether only a teacher LLM can label the source."""
        # The files of 2WikiMultiHopQA contain gold annotations, those of RAS's authors their sub-queries.
        return self.annotations is None and self.reader not in ("two_wiki", LABELLED, *PARTS)

    def rows(self, issues: Issues, count: int | None, corpus: str | None) -> Questions:
        """The first questions of the source, with their passages from a corpus.

        The file is read twice if questions name passages of the corpus (`with_linked_passages`).
        """
        read = get_reader(self.reader)
        # Of two passes, only the second counts issues.
        passes = iter((Counter[str](), issues))
        return with_linked_passages(
            lambda: islice(self.not_empty(read(self.location, next(passes), self.name)), count), corpus
        )

    def not_empty(self, rows: Iterable[T], *left_out: Counter[str]) -> Iterator[T]:
        """Yield the rows; if there is none, the file was cut off or is the wrong one.

        Among several sources that have rows, a line with the count 0 would not be noticed.

        Args:
            left_out: Counters of the rows that were read and are not yielded.

        Raises:
            ValueError: No row was read.
        """
        is_empty = True
        for row in rows:
            is_empty = False
            yield row
        if is_empty and not any(left_out):
            raise ValueError(f"source {self.text}: the file is empty, or has no row for this reader")


class _Files(NamedTuple):
    """The files of a source: where its questions are, and the annotations, if there are any."""

    location: str
    annotations: str | None


def _split_files(files: str) -> _Files:
    """Split LOCATION[:ANNOTATIONS] at the colon that leaves an existing file as location, or else at the last colon.

    The location of a benchmark on the hub is no file, and a local path may contain a colon.
    """
    location, annotations = files, None
    for separator in _SEPARATOR.finditer(files):
        if Path(location).exists():
            break
        location, annotations = files[: separator.start()], files[separator.end() :]
    return _Files(location, annotations)


def check_names(sources: Sequence[Source]) -> None:
    """Raise `ValueError` when two sources have the same name."""
    names = Counter(source.name for source in sources)
    for source in sources:
        if names[source.name] > 1:
            raise ValueError(f"two sources are called {source.name!r}; name one of them: NAME={source.reader}:FILE")


@dataclass(frozen=True)
class BuildOptions(FolderOptions):
    """Options of a build."""

    first_subquery: FirstSubquery = setting(
        "main_question", "q_0: the main question (the paper) or the first generated sub-query (the authors' code)"
    )
    distractors: int = setting(0, "add triples of N non-supporting passages to each step (paper: none)", at_least=0)
    failed_searches: float = setting(
        0.0, "share of searches that first find only useless facts; the next label asks in other words, so a search "
        "with one wording does not fail (paper: none)", at_least=0, below=1,
    )  # fmt: skip
    check_facts: Literal["drop", "count", "off"] = setting(
        "off", "if facts lack the answer or a name that a sub-query needs: drop the question, count it in the card, or "
        "do not check (paper)",
    )  # fmt: skip
    triple_file: str | None = setting(
        None, "triples of all other passages that steps show: a store, or JSON lines of title, text, triples"
    )
    retriever: RetrieverKind | None = setting(
        None, "each step shows what this search of --corpus finds, as in the loop (default: a supporting passage, as "
        "in the paper)", needs="corpus",
    )  # fmt: skip
    encoder: str | None = setting(None, "sentence encoder of a dense or hybrid --retriever", needs="retriever")
    top_k: int = setting(1, "passages per search of --retriever", at_least=1, needs="retriever")
    corpus: str | None = setting(
        None, "corpus of the supporting passages that qa rows name by id or title, and of --retriever"
    )
    triples_from: str = setting("teacher", "source of kept documents' triples: teacher, or a file like --triple-file")
    show_documents: Shown = rare("supporting", "documents for the teacher's filter: supporting ones (paper) or all")
    prompts: str | None = setting(None, "folder of custom prompts: subq_filter.md, subq_query.md, subq_triples.md")
    json_schema: bool = rare(
        False, "send a JSON schema with each call, for OpenAI-compatible servers; this changes the ledger keys"
    )
    on_call_error: Literal["stop", "drop"] = setting("stop", "if a retry cannot fix a call: stop, or drop the question")
    concurrency: int = setting(64, "questions labelled at once", at_least=1)
    direct_answer_model: str | None = setting(
        None, "base model of the direct-answer test: owner/name[@revision], folder or pypi:package (default: no test)",
    )  # fmt: skip
    direct_answers: str | None = rare(
        None, "file of stored direct answers: rows of question_id, answer, or RAS's subquery_classification.json"
    )
    filtered_answers: bool = rare(
        False,
        "also run the filter on questions that the base model answers; if it keeps no document, write an answering "
        "record without a plan (RAS, section C.4)",
    )
    batch_size: int = rare(8, "questions per batch in the direct-answer test", at_least=1)
    max_new_tokens: int = rare(16, "maximum tokens of an answer in the direct-answer test", at_least=1)
    limit: int | None = setting(None, "read only the first N questions of each source", at_least=1)
    asqa_count: int = rare(PARTS["asqa"], "questions to take from sources of asqa", at_least=1)
    arc_easy_count: int = rare(PARTS["arc_easy"], "questions to take from sources of arc_easy", at_least=1)
    validation_fraction: float = setting(0.05, "share of the questions for validation", at_least=0, below=1)
    split_name: str | None = setting(None, "put all records into one split of this name")
    seed: int = setting(0, "seed of split, distractors and failed searches")

    def __post_init__(self) -> None:
        # The output folder is checked when it is written, since a dry run writes none.
        require(self)

    def check(self) -> list[str]:
        """Problems besides choices and ranges.

        Options without effect are problems, since the card would list them as if they had shaped the data.
        """
        problems = []
        if self.distractors and not self.triple_file:
            problems.append(
                f"distractors: {self.distractors} need the triples of unrelated passages: set --triple-file"
            )
        if self.triple_file and not (self.distractors or self.failed_searches or self.retriever):
            problems.append("triple_file: without effect without --distractors, --failed-searches or --retriever")
        if self.retriever and not self.triple_file:
            problems.append("retriever: needs the triples of the corpus: set --triple-file")
        if self.retriever and self.distractors:
            problems.append("distractors: --retriever brings its own: set --top-k")
        if self.filtered_answers and not (self.direct_answer_model or self.direct_answers):
            problems.append("filtered_answers: without effect, since no question is tested: name --direct-answer-model")
        problems += split_name_problems(self.split_name)
        if self.direct_answer_model and self.direct_answers:
            problems.append("direct_answer_model and direct_answers: name the model or a file of its answers, not both")
        return problems

    @property
    def ledger(self) -> str:
        """The default ledger: beside the output."""
        return f"{self.output.rstrip('/')}.ledger.sqlite"

    def split_of(self, question: str) -> str:
        """The split of a question; see `data_builders.datasets.writer.split_of`."""
        return self.split_name or split_of(question, self.seed, self.validation_fraction)

    def most_questions(self, reader: str) -> int | None:
        """Maximum questions of a source; parts of the mix have their own count."""
        counts = {"asqa": self.asqa_count, "arc_easy": self.arc_easy_count}
        limits = [limit for limit in (self.limit, counts.get(reader)) if limit is not None]
        return min(limits, default=None)

    def inputs(self, sources: list[Source]) -> list[str]:
        """All input files of these sources, for their digests on the card, and so that no output replaces one."""
        paths = {self.triple_file, self.direct_answers, self.corpus}
        for source in sources:
            paths |= {source.location, source.annotations}
        if self.triples_from != "teacher":
            paths.add(self.triples_from)
        return sorted(path for path in paths if path)


def usable_questions(
    source: Source,
    seen: SeenTable,
    drops: Counter[str],
    issues: Issues = None,
    count: int | None = None,
    corpus: str | None = None,
) -> Iterator[Question]:
    """The usable questions of a source, each id once; `drops` counts the others by `DropReason`.

    `seen` has the ids of earlier sources, because records of two sources with one id could not be told apart. For
    `count` and `corpus` see `Source.rows`.
    """
    rows = source.rows(issues, count, corpus)
    for row in progress(rows, source.name):
        if isinstance(row, Dropped):
            drops[row.reason.value] += 1
        elif seen.get_or_add("id", row.id) is not None:
            drops[DropReason.REPEATED_ID.value] += 1
        elif not row.answers:
            drops[DropReason.NO_ANSWER.value] += 1
        else:
            yield row


def subq_parser() -> CommandParser:
    """The command line of `tripletune build subq`, which `tripletune ray subq` also takes."""
    parser = CommandParser(
        prog="tripletune build subq",
        description="Build HotpotQA-SUBQ records from benchmark files and a teacher.",
        example="tripletune build subq --source hotpotqa:hotpot_train_v1.1.json --teacher openai --teacher-model MODEL "
        "--output data/subq",
    )
    parser.explained["readers, for --source:"] = partial(about_modules, "tripletune.data_builders.readers")
    add = parser.add_argument
    add("--source", action="append", required=True, metavar="[NAME=]READER:FILE[:ANNOTATIONS]",
        help="reader (hotpotqa, musique, two_wiki, ...), benchmark file (.json, .jsonl, .parquet, .csv, .tsv, or a "
            "hub id owner/name[@configuration][#split]) and annotations: recorded teacher replies, or a triple file "
            "for musique, two_wiki, ras_labels; the teacher LLM labels the other sources; repeatable")  # fmt: skip
    add_arguments(parser, BuildOptions, only=("output",))
    add("--teacher", choices=(ANNOTATIONS, *backend_names()), default=ANNOTATIONS,
        help="backend of the LLM that labels the sources without annotations; annotations: recorded replies and gold "
            "annotations alone, without an LLM (default: annotations)")  # fmt: skip
    add_arguments(parser, LLMOptions, "teacher", only=("model",))
    add_llm(parser)
    add("--dry-run", action="store_true", help="send nothing; show the maximum calls and tokens")
    add("--price", metavar="IN,OUT", help="dollars per million tokens read and written, for --dry-run")
    for title, names in _GROUPS.items():
        add_arguments(parser.add_argument_group(title), BuildOptions, only=names)
    calling = [option.name for option in fields(LLMOptions) if option.name not in ("backend", "model")]
    add_arguments(parser.add_argument_group("how the teacher is called"), LLMOptions, "teacher", only=calling)
    return parser


class SubqCommand(NamedTuple):
    """What a command line of `subq_parser` asks for; `llm` is None without a teacher LLM."""

    sources: list[Source]
    options: BuildOptions
    llm: LLMOptions | None


def read_command(parsed: argparse.Namespace) -> SubqCommand:
    """Sources and options of a command line of `subq_parser`.

    A teacher LLM that has nothing to label is an error, as are its options without it: either would be a mistake that
    a user notices only in the finished data.
    """
    sources = [Source.parse(text) for text in parsed.source]
    options = from_arguments(BuildOptions, parsed)
    if parsed.teacher == ANNOTATIONS:
        _refuse_options_without_teacher(parsed)
        return SubqCommand(sources, options, None)
    if not any(source.needs_teacher for source in sources):
        raise ValueError(
            "a teacher LLM is given, but every source has annotations: leave out the annotations that the teacher "
            "should make"
        )
    ledger = parsed.teacher_ledger or options.ledger
    return SubqCommand(sources, options, from_arguments(LLMOptions, parsed, "teacher", ledger=ledger))


def _refuse_options_without_teacher(parsed: argparse.Namespace) -> None:
    """Refuse options of a teacher LLM if there is none: usually `--teacher` was forgotten."""
    default = subq_parser().get_default
    names = [name for name in vars(parsed) if name in _LLM_ALONE or name.startswith("teacher_")]
    if parsed.direct_answer_model:
        names.remove("teacher_ledger")
    # Some options have no flag of their own.
    by_set = {dest: f"--set {name}" for name, (dest, _) in parsed.settable.items()}
    idle = []
    for name in names:
        if getattr(parsed, name) != default(name):
            flag = f"--{name.replace('_', '-')}"
            idle.append(by_set.get(name, flag))
    if idle:
        raise ValueError(
            f"{', '.join(idle)}: without effect, since --teacher {parsed.teacher} uses no model; name a backend, for "
            "example --teacher openai, or leave these options out"
        )
