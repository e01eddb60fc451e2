"""What a build reads: benchmark files, each with its reader and the teacher that labels its questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from data_builders.annotations import Teacher, open_teacher
from data_builders.questions import Dropped, Question
from data_builders.readers import get_reader


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


@dataclass
class OpenSource:
    """A source with its teacher, and what is counted while it is read.

    Attributes:
        source: The file.
        teacher: Who labels its questions.
        issues: Oddities that cost no question.
        labelled: Questions that gave records.
        drops: Questions left out, by reason.
    """

    source: Source
    teacher: Teacher
    issues: Counter[str]
    labelled: int = 0
    drops: Counter[str] = field(default_factory=Counter)

    def questions(self, limit: int | None, issues: Counter[str] | None = None) -> Iterator[Question | Dropped]:
        """Stream the rows of the file, the first `limit` of them; `issues` counts oddities."""
        reader = get_reader(self.source.reader)
        return islice(reader(self.source.location, issues, self.source.name), limit)


def open_sources(sources: list[Source]) -> list[OpenSource]:
    """Open each source's annotations.

    Raises:
        FileNotFoundError: an annotation file is missing.
        ValueError: an unknown reader, annotations of the wrong kind, or two sources of one name.
    """
    opened: list[OpenSource] = []
    for source in sources:
        if any(source.name == other.source.name for other in opened):
            raise ValueError(f"two sources are called {source.name!r}; name one of them: NAME={source.reader}:FILE")
        get_reader(source.reader)
        issues: Counter[str] = Counter()
        opened.append(OpenSource(source, open_teacher(source.reader, source.annotations, issues), issues))
    return opened
