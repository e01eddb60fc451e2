"""What a build reads: benchmark files, each with its reader and the teacher that labels its questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from tripletune.data_builders.hotpotqa_subq.annotations import Teacher, open_teacher
from tripletune.data_builders.hotpotqa_subq.questions import Dropped, DropReason, Question
from tripletune.data_builders.readers import get_reader
from tripletune.data_builders.text_to_triples.mixing import PARTS, open_part

# Readers whose benchmark brings gold annotations: they need neither a file nor a teacher.
ANNOTATED = ("two_wiki",)


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
        return self.annotations is None and self.reader not in (*ANNOTATED, *PARTS)


@dataclass
class OpenSource:
    """A source with its teacher, and what is counted while it is read.

    Attributes:
        source: The file.
        teacher: Who labels its questions.
        issues: Oddities that cost no question.
        count: Questions to read from it at most.
        labelled: Questions that gave records.
        drops: Questions left out, by reason.
    """

    source: Source
    teacher: Teacher
    issues: Counter[str]
    count: int | None = None
    labelled: int = 0
    drops: Counter[str] = field(default_factory=Counter)

    @property
    def is_part(self) -> bool:
        """Whether it gives answering records alone; see `data_builders.mixing`."""
        return self.source.reader in PARTS

    def questions(self, issues: Counter[str] | None = None) -> Iterator[Question | Dropped]:
        """Stream the rows of the file, the first `count` of them; `issues` counts oddities."""
        reader = get_reader(self.source.reader)
        return islice(reader(self.source.location, issues, self.source.name), self.count)

    def ordered_drops(self) -> dict[str, int]:
        """The drops in the order of `DropReason`, so that they read the same in every build."""
        return {reason.value: self.drops[reason.value] for reason in DropReason if self.drops[reason.value]}


def open_sources(
    sources: list[Source],
    limit: int | None = None,
    counts: dict[str, int] | None = None,
    make_teacher: Callable[[Source], Teacher] | None = None,
) -> list[OpenSource]:
    """Open each source's annotations.

    Args:
        sources: The sources.
        limit: Questions to read from each at most.
        counts: Limits of the parts of the mix, by reader; the paper's where there is none.
        make_teacher: Gives the teacher of a source without annotations.

    Raises:
        FileNotFoundError: an annotation file is missing.
        ValueError: an unknown reader, annotations of the wrong kind, none where they are needed, or two sources of
            one name.
    """
    counts = counts or {}
    opened: list[OpenSource] = []
    for source in sources:
        if any(source.name == other.source.name for other in opened):
            raise ValueError(f"two sources are called {source.name!r}; name one of them: NAME={source.reader}:FILE")
        get_reader(source.reader)
        issues: Counter[str] = Counter()
        part = PARTS.get(source.reader)
        wanted = [limit, counts.get(source.reader, part.count) if part else None]
        count = min((number for number in wanted if number is not None), default=None)
        opened.append(OpenSource(source, _teacher(source, issues, make_teacher), issues, count))
    return opened


def _teacher(source: Source, issues: Counter[str], make_teacher: Callable[[Source], Teacher] | None) -> Teacher:
    if source.reader in PARTS:
        return open_part(source.reader, source.annotations, issues)
    if source.needs_teacher and make_teacher is not None:
        return make_teacher(source)
    if source.needs_teacher and source.reader != "musique":
        raise ValueError(
            f"source {source.name!r} has no annotations; add a file of recorded teacher replies, "
            f"{source.reader}:FILE:ANNOTATIONS, or a teacher LLM, for example --teacher openai --teacher-model MODEL"
        )
    return open_teacher(source.reader, source.annotations, issues)
