"""What a HotpotQA-SUBQ build is asked to do: its options, and benchmark files with who labels their questions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from tripletune.data_builders.datasets.writer import FolderOptions, split_name_problems, split_of
from tripletune.data_builders.hotpotqa_subq.annotations import Teacher, open_teacher
from tripletune.data_builders.hotpotqa_subq.labelling import PARTS, FirstSubquery, PartTeacher
from tripletune.data_builders.hotpotqa_subq.questions import Dropped, DropReason, Question
from tripletune.data_builders.hotpotqa_subq.teacher import LLMTeacher, Shown
from tripletune.data_builders.readers import get_reader
from tripletune.models.options import require, setting

_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Source:
    """One benchmark file to build from: `[NAME=]READER:LOCATION[:ANNOTATIONS]`."""

    name: str
    reader: str
    location: str
    annotations: str | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read the command-line form; without `NAME=` the reader's name is the source's.

        Raises:
            ValueError: the text has another form.
        """
        head, _, rest = text.partition(":")
        name, equals, reader = head.partition("=")
        parts = rest.split(":")
        if not rest or len(parts) > 2 or not all(parts) or not name or (equals and not reader):
            raise ValueError(
                f"source {text!r}: write it as READER:FILE[:ANNOTATIONS] or NAME=READER:FILE[:ANNOTATIONS]"
            )
        return cls(name, reader or name, parts[0], parts[1] if len(parts) == 2 else None)

    @property
    def text(self) -> str:
        """The command-line form, with the name."""
        return ":".join(filter(None, (f"{self.name}={self.reader}", self.location, self.annotations)))

    @property
    def needs_teacher(self) -> bool:
        """Whether only a teacher LLM can label it."""
        # 2WikiMultiHopQA brings gold annotations of its own.
        return self.annotations is None and self.reader not in ("two_wiki", *PARTS)

    def questions(self, count: int | None, issues: Counter[str] | None = None) -> Iterator[Question | Dropped]:
        """Stream the rows of the file, the first `count` of them; `issues` counts warnings."""
        return islice(get_reader(self.reader)(self.location, issues, self.name), count)


@dataclass(frozen=True)
class BuildOptions(FolderOptions):
    """Options of a build.

    Raises:
        ValueError: options make no sense; all problems in one message.
    """

    first_subquery: FirstSubquery = setting(
        "main_question", "q_0: the main question (the paper) or the first generated sub-query (the authors' code)"
    )
    distractors: int = setting(
        0, "non-supporting passages of the question whose triples join each step (the paper: none)", at_least=0
    )
    triple_file: str | None = setting(None, "triples of the distractors: JSON lines of title, text, triples")
    triples_from: str = setting(
        "teacher", "where triples of kept documents come from: teacher, or a file like --triple-file"
    )
    show_documents: Shown = setting(
        "supporting", "documents the teacher's filter chooses from: the supporting passages (the paper) or all passages"
    )
    prompts: str | None = setting(
        None, "folder with prompts of your own: subq_filter.md, subq_query.md, subq_triples.md; ours for the others"
    )
    json_schema: bool = setting(
        False, "send a JSON schema with each call, for OpenAI-compatible servers; such calls have other ledger keys"
    )
    on_call_error: Literal["stop", "drop"] = setting(
        "stop", "when a retry cannot fix a call: stop, or drop the question"
    )
    concurrency: int = setting(64, "questions under way at once", at_least=1)
    shard: str | None = setting(
        None, "i/n (i from 0): ask only every n-th question and write no data set; join the "
        "ledgers of all shards with `tripletune ledger import`, then build without --shard",
    )  # fmt: skip
    direct_answer_model: str | None = setting(
        None, "base model of the direct-answer test: hub id, folder or pypi:package; without it and without stored "
        "answers there is no test",
    )  # fmt: skip
    direct_answers: str | None = setting(None, "stored answers of that test: JSON lines of question_id, answer")
    batch_size: int = setting(8, "questions per batch in the direct-answer test", at_least=1)
    max_new_tokens: int = setting(16, "longest answer in the direct-answer test, in tokens", at_least=1)
    limit: int | None = setting(None, "only the first N questions of each source", at_least=1)
    asqa_count: int = setting(PARTS["asqa"], "questions to take from sources of asqa", at_least=1)
    arc_easy_count: int = setting(PARTS["arc_easy"], "questions to take from sources of arc_easy", at_least=1)
    validation_fraction: float = setting(0.05, "share of the questions for validation", at_least=0, below=1)
    split_name: str | None = setting(None, "put everything into one split of this name instead")
    seed: int = setting(0, "seed of split and distractors")

    def __post_init__(self) -> None:
        # The folder is looked at when it is written: a shard and a dry run write none.
        require(self)

    def check(self) -> list[str]:
        """What makes no sense beyond choices and ranges."""
        found = []
        if self.distractors and not self.triple_file:
            found.append(f"distractors: {self.distractors} need the triples of unrelated passages: set --triple-file")
        found += split_name_problems(self.split_name)
        if self.direct_answer_model and self.direct_answers:
            found.append("direct_answer_model and direct_answers: name the model or a file of its answers, not both")
        match = _SHARD.fullmatch(self.shard or "0/1")
        if not match or int(match[1]) >= int(match[2]):
            found.append(f"shard: {self.shard!r} must be i/n with i from 0 to n - 1, for example 0/4")
        return found

    @property
    def ledger(self) -> str:
        """The ledger of a build that names none: beside the output, another one for each shard."""
        shard = f".shard-{self.shard.replace('/', '-of-')}" if self.shard else ""
        return f"{self.output.rstrip('/')}{shard}.ledger.sqlite"

    def split_of(self, question: str) -> str:
        """The split of a question; see `data_builders.datasets.writer.split_of`."""
        return self.split_name or split_of(question, self.seed, self.validation_fraction)

    def is_mine(self, position: int) -> bool:
        """Whether this process makes the calls of the row at this place of its source."""
        number, count = (self.shard or "0/1").split("/")
        return position % int(count) == int(number)

    def most_questions(self, reader: str) -> int | None:
        """Questions to read from a source at most; parts of the mix have a count of their own."""
        counts = {"asqa": self.asqa_count, "arc_easy": self.arc_easy_count}
        wanted = [self.limit, counts.get(reader)]
        return min((number for number in wanted if number is not None), default=None)

    def inputs(self, sources: list[Source]) -> list[str]:
        """All files that a build of these sources reads."""
        named = {place for source in sources for place in (source.location, source.annotations)}
        triples = None if self.triples_from == "teacher" else self.triples_from
        return sorted(filter(None, named | {self.triple_file, self.direct_answers, triples}))


@dataclass
class OpenSource:
    """A source with its teacher, and what is counted while it is read.

    Attributes:
        source: The file.
        teacher: Who labels its questions.
        issues: Warnings that cost no question.
        count: Questions to read from it at most.
        labelled: Questions that gave records.
        drops: Questions left out, by reason.
    """

    source: Source
    teacher: Teacher | PartTeacher
    issues: Counter[str]
    count: int | None = None
    labelled: int = 0
    drops: Counter[str] = field(default_factory=Counter)

    def ordered_drops(self) -> dict[str, int]:
        """The drops in the order of `DropReason`, so that they read the same in every build."""
        return {reason.value: self.drops[reason.value] for reason in DropReason if self.drops[reason.value]}

    def shortage(self) -> str | None:
        """A sentence for the card on a part of the mix that holds fewer questions than were asked for."""
        if self.source.reader not in PARTS or self.count is None or self.labelled >= self.count:
            return None
        reasons = [f"{self.drops.total():,} were left out"] if self.drops else []
        reasons += ["its file has no more"] if self.labelled + self.drops.total() < self.count else []
        gave = f"gave {self.labelled:,} of the {self.count:,} questions asked for; {' and '.join(reasons)}"
        return f"Source {self.source.name} ({self.source.reader}) {gave}."


def open_sources(
    sources: list[Source], options: BuildOptions, make_teacher: Callable[[Counter[str]], LLMTeacher] | None = None
) -> list[OpenSource]:
    """Open each source's annotations; the teacher LLM is asked for last, when all else is in order.

    `make_teacher` gives the teacher of a source without annotations; it gets the counter of the source's issues.

    Raises:
        FileNotFoundError: an annotation file is missing.
        ValueError: an unknown reader, annotations of the wrong kind, none where they are needed, or two sources of
            one name.
    """
    names = Counter(source.name for source in sources)
    for source in sources:
        if names[source.name] > 1:
            raise ValueError(f"two sources are called {source.name!r}; name one of them: NAME={source.reader}:FILE")
        get_reader(source.reader)
    opened: dict[str, OpenSource] = {}
    for source in sorted(sources, key=lambda source: source.needs_teacher):
        issues: Counter[str] = Counter()
        teacher = _teacher(source, issues, make_teacher)
        opened[source.name] = OpenSource(source, teacher, issues, options.most_questions(source.reader))
    return [opened[source.name] for source in sources]


def _teacher(
    source: Source, issues: Counter[str], make_teacher: Callable[[Counter[str]], LLMTeacher] | None
) -> Teacher | PartTeacher:
    if source.reader in PARTS:
        return PartTeacher(source.reader, source.annotations, issues)
    if source.needs_teacher and make_teacher is not None:
        return make_teacher(issues)
    return open_teacher(source.reader, source.annotations, issues)
