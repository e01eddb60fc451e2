"""Passages of documents: cut between sentences, under their headings, with citation data.

    tripletune build passages --documents folder --output mine

writes `corpus.jsonl`, `README.md` and `documents.sqlite`. With this store, the same command skips documents whose
digest and options have not changed.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.passages import CORPUS, passage_id
from tripletune.core.data.pieces import Span, joined, pack, sentences
from tripletune.core.data.records import one_line
from tripletune.core.data.words import detect
from tripletune.core.files import LOCK, check_folder, few, file_digest, json_line, lock_folder, new_file, write_text
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import progress, run_program
from tripletune.core.sqlite import Kind, open_database
from tripletune.core.tables import printable
from tripletune.data_builders.documents.blocks import ENDINGS, TEXTS, TITLES, Block, Unreadable, read_blocks

logger = logging.getLogger(__name__)
STORE, CARD = "documents.sqlite", "README.md"
# "TDOC" in ASCII.
_STORE = Kind("store of documents", 0x54444F43, 1, """
CREATE TABLE documents (name TEXT PRIMARY KEY, digest TEXT NOT NULL, notes TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE passages (
    document TEXT NOT NULL, number INTEGER NOT NULL, id TEXT NOT NULL, row TEXT NOT NULL,
    PRIMARY KEY (document, number), UNIQUE (document, id)
) WITHOUT ROWID;
""")  # fmt: skip
_CARD = f"""# Passages of documents

`{CORPUS}`, a `--corpus`, holds passages of at most {{size:,}} characters, one per line: `id`, `title` (document ›
headings), `text`, `document`, `page` (of a PDF), `heading`, `position` (first and last character in the document's
text, without markup and with white space folded). `tripletune build passages` reads unchanged documents from `{STORE}`.
"""
# Increase this number when documents are read or cut in another way.
_VERSION = 2
# Paragraphs that decide the language of a document, and characters of each.
_PARAGRAPHS, _READ = 20, 300


@dataclass(frozen=True, slots=True)
class PassageOptions(CheckedOptions):
    """How documents are cut."""

    size: int = setting(1000, "maximum characters of a passage (about 250 tokens)", at_least=50)
    text_column: tuple[str, ...] = setting(TEXTS, "text column of JSONL, CSV and Parquet; the first found is read")
    title_column: tuple[str, ...] = setting(TITLES, "title column")


@dataclass
class Build:
    """The result of a build.

    Attributes:
        left_out: Files that gave no passage, each with a general reason, a colon and details.
        odd: Documents that were read, by their oddity.
        counts: Documents by outcome, and passages: added, gone, all.
    """

    left_out: dict[str, str]
    odd: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)

    def changes(self) -> str:
        """One line on the changes of documents and passages."""
        states = {name: n for name, n in self.counts.items() if n and name not in ("added", "gone", "all")}
        there = sum(states.values()) - self.counts["deleted"]
        documents = f"{there:,} documents: {', '.join(f'{n:,} {name}' for name, n in states.items())}"
        added, gone, passages = (self.counts[name] for name in ("added", "gone", "all"))
        return f"{documents}; {added:,} passages new, {gone:,} gone, {passages:,} in all"

    def oddities(self, most: int) -> list[str]:
        """Left-out files and warnings, each with the names of a few files."""
        found = dict(self.odd)
        for name, problem in sorted(self.left_out.items()):
            reason, _, more = problem.partition(": ")
            found.setdefault(f"left out, {reason}", []).append(f"{name} ({more})" if more else name)
        return [f"{reason} ({len(names):,}): {few(names, most)}" for reason, names in sorted(found.items())]


def find_documents(paths: Sequence[str | Path]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the documents by their path in the common folder, and the reason why each other file is left out."""
    if missing := [str(path) for path in paths if not Path(path).exists()]:
        raise FileNotFoundError(f"no such file or folder: {', '.join(missing)}")
    places = [Path(os.path.abspath(path)) for path in paths]
    top = os.path.commonpath([place if place.is_dir() else place.parent for place in places])
    found, left_out = dict[str, Path](), dict[str, str]()

    def add(path: Path, problem: str = "") -> None:
        name = os.fsencode(os.path.relpath(path, top)).decode("utf-8", "replace").replace(os.sep, "/")
        if not problem and path.suffix.lower() not in ENDINGS:
            problem = f"of a kind that is not read: {path.suffix or 'no ending'}"
        if problem or not path.is_file():
            left_out[name] = problem or "not a regular file"
        else:
            found[name] = path

    for place in places:
        if not place.is_dir():
            add(place)
            continue
        for root, folders, files in os.walk(place, onerror=lambda error: add(Path(error.filename), "can't be opened")):
            for name in [*folders, *files]:
                path = Path(root, name)
                problem = "hidden" if name[0] == "." else "links, which are not followed" if path.is_symlink() else ""
                if problem or name in files:
                    add(path, problem)
                if problem and name in folders:
                    folders.remove(name)
    return dict(sorted(found.items())), left_out


def passages_of(document: str, blocks: Iterable[Block], size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a corpus; positions count the characters of all blocks, joined by line breaks."""
    blocks = iter(blocks)
    head = list(islice(blocks, _PARAGRAPHS))
    language = detect("\n".join(block.text[:_READ] for block in head))
    end = -1

    def spans(group: Iterable[Block]) -> Iterator[Span]:
        nonlocal end
        for block in group:
            for span in sentences(block.text, size, language, end + 1):
                yield span
            end = span.end

    for (heading, page, _), group in groupby(chain(head, blocks), key=lambda block: block[1:]):
        title = one_line(" › ".join([document, *heading]))
        about = {"document": document} | ({"page": page} if page else {})
        about |= {"heading": " › ".join(heading)} if heading else {}
        for piece in pack(spans(group), size, by_content=True):
            text, position = joined(piece), [piece[0].start, piece[-1].end]
            yield {"id": passage_id(title, text), "title": title, "text": text, **about, "position": position}


def build_passages(options: PassageOptions, documents: Sequence[str | Path], output: str | Path) -> Build:
    """Make or update a folder of passages; a stopped build resumes."""
    folder = Path(output)
    check_folder(folder, (STORE, f"{STORE}-*", LOCK), True, documents, continues=STORE)
    found, left_out = find_documents(documents)
    build = Build(left_out)
    if not found:
        raise ValueError("; ".join([f"{few(list(map(str, documents)), 3)}: no document was found", *build.oddities(3)]))
    lock = lock_folder(folder, f"output folder {folder}: another program is writing it")
    with lock, closing(open_database(folder / STORE, _STORE)) as database:
        known = [name for (name,) in database.execute("SELECT name FROM documents")]
        if known and not found.keys() & known:
            for name in (one for one in found if f"/{one}".endswith(f"/{known[0]}") or known[0].endswith(f"/{one}")):
                raise ValueError(
                    f"{known[0]} in {output} would become {name}, and all passages would be new, since documents are "
                    "named from the folder that holds all of --documents: give the same folder, with new documents in "
                    "it, or another --output"
                )
        for name, path in progress(found.items(), "reading", "document"):
            _read(database, name, path, options, build)
        for name in (one for one in known if one not in found):
            build.counts["gone"] += len(_forget(database, name))
            build.counts["deleted"] += 1
        stay = sum(build.counts[one] for one in ("kept", "changed", "no longer read"))
        if (gone := build.counts["deleted"]) and not stay:
            said = "%s has none of the %d documents from which %s was made; if this is a mistake, give the right folder"
            logger.warning(said, few(list(map(str, documents))), gone, output)
        for name, notes in database.execute("SELECT name, notes FROM documents ORDER BY name"):
            for note, times in json.loads(notes).items():
                build.odd[note].append(f"{name} ({times})" if times > 1 else name)
        ((build.counts["all"],),) = database.execute("SELECT COUNT(*) FROM passages")
        if not build.counts["all"]:
            raise ValueError("; ".join(["no document could be read", *build.oddities(3)]))
        with new_file(folder / CORPUS) as scratch, scratch.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(row for (row,) in database.execute("SELECT row FROM passages ORDER BY document, number"))
        odd = "".join(f"- {line}\n" for line in build.oddities(20))
        write_text(folder / CARD, f"{_CARD.format(size=options.size)}\n{odd}")
        (folder / LOCK).unlink(missing_ok=True)
    return build


def _read(database: sqlite3.Connection, name: str, path: Path, options: PassageOptions, build: Build) -> None:
    """Update the passages of a document."""
    known = database.execute("SELECT digest FROM documents WHERE name = ?", (name,)).fetchone()
    notes, new, digest = Counter[str](), set[str](), ""
    try:
        digest = f"{file_digest(path)} {_VERSION} {json.dumps(asdict(options))}"
        if known == (digest,):
            build.counts["kept"] += 1
            return
        with database:
            database.execute("BEGIN IMMEDIATE")
            old, number = _forget(database, name), 0
            blocks = read_blocks(path, options.text_column, options.title_column, notes)
            for number, row in enumerate(passages_of(name, blocks, options.size), 1):
                new.add(row["id"])
                values = name, number, row["id"], json_line(row)
                database.execute("INSERT OR IGNORE INTO passages VALUES (?, ?, ?, ?)", values)
            notes["passages that repeat another passage of the document"] = number - len(new)
            database.execute("INSERT INTO documents VALUES (?, ?, ?)", (name, digest, json.dumps(+notes)))
    except (OSError, Unreadable) as problem:
        old, new = _forget(database, name), set()
        opened = isinstance(problem, Unreadable)
        build.left_out[name] = str(problem) if opened else f"can't be opened: {getattr(problem, 'strerror', '')}"
    state = "changed" if known and new else "no longer read" if known else "new"
    build.counts.update({state: int(bool(known or new)), "added": len(new - old), "gone": len(old - new)})


def _forget(database: sqlite3.Connection, document: str) -> set[str]:
    """Remove a document and return the ids of its passages."""
    old = {name for (name,) in database.execute("SELECT id FROM passages WHERE document = ?", (document,))}
    database.execute("DELETE FROM passages WHERE document = ?", (document,))
    database.execute("DELETE FROM documents WHERE name = ?", (document,))
    return old


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input, or no readable document, prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build passages",
        description="Cut documents (text, Markdown, HTML, PDF, DOCX, JSONL, CSV, Parquet) into passages for "
        "retrieval; a second run reads only the changed documents.",
        example="tripletune build passages --documents folder --output mine",
    )
    about = "folders and files; hidden files and links in folders are left out"
    parser.add_argument("--documents", required=True, nargs="+", action="extend", metavar="PATH", help=about)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the passages, created or updated")
    add_arguments(parser, PassageOptions)
    given = parser.parse_args(arguments)

    def program() -> None:
        build = build_passages(from_arguments(PassageOptions, given), given.documents, given.output)
        lines = [f"{given.output}: {build.changes()}", *build.oddities(3)]
        print(printable("\n  ".join(lines)))  # noqa: T201

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
