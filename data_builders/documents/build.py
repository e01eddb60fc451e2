"""A folder of passages, made from documents and kept up to date; `cutting.py` cuts them, `blocks.py` reads them.

    tripletune build passages --documents folder --output mine

writes `corpus.jsonl`, `README.md` and `documents.sqlite`. With this store, the same command skips documents whose
digest and options have not changed.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.passages import CORPUS
from tripletune.core.files import LOCK, check_folder, few, file_digest, json_line, lock_folder, new_file, write_text
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import progress, run_program
from tripletune.core.sqlite import Kind, open_database
from tripletune.core.tables import printable
from tripletune.data_builders.documents import Unreadable
from tripletune.data_builders.documents.blocks import ENDINGS, TEXTS, TITLES, read_blocks
from tripletune.data_builders.documents.cutting import passages_of, without_lone_headings

logger = logging.getLogger(__name__)
STORE = "documents.sqlite"
CARD = "README.md"
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
headings), `text`, `document`, `page` (of a PDF), `heading` (below headings), `position` (first and last character in
the document's text, without markup and with white space folded). `tripletune build passages` reads unchanged documents
from `{STORE}`.
"""
# Increase this number when documents are read or cut in another way.
_VERSION = 9
_DEFAULT = "the default"
# The names in `Build.counts` that count passages; all others count documents.
_PASSAGE_COUNTS = ("added", "gone", "all")
# The outcomes of documents that an earlier build has read, too.
_STILL_THERE = ("kept", "changed", "read with other options", "read in another way than before", "no longer read")


@dataclass(frozen=True, slots=True)
class PassageOptions(CheckedOptions):
    """How documents are cut."""

    size: int = setting(1000, "maximum characters of a passage (about 250 tokens)", at_least=50)
    text_column: tuple[str, ...] = setting(
        TEXTS,
        'text columns of JSONL, JSON, CSV, TSV and Parquet; all that you name are read, as "product: TG-40; price: '
        '1200", and of the default names the first found',
    )
    title_column: tuple[str, ...] = setting(TITLES, "title column")


@dataclass
class Build:
    """The result of a build.

    Attributes:
        left_out: Files that gave no passage, each with a general reason, a colon and details.
        odd: Documents that were read, by their oddity.
        counts: Documents by outcome ("kept", "changed", "read with other options", "read in another way than before"
            by an earlier version, "new", "no longer read", "deleted"), and passages: "added", "gone", "all".
        other_options: What an earlier build had for options that are others now, by the option's field.
    """

    left_out: dict[str, str]
    odd: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    other_options: dict[str, object] = field(default_factory=dict)

    def changes(self) -> str:
        """One line on the changes of documents and passages."""
        outcomes = []
        documents = 0
        for outcome, number in self.counts.items():
            if outcome in _PASSAGE_COUNTS or not number:
                continue
            outcomes.append(f"{number:,} {outcome}")
            if outcome != "deleted":
                documents += number
        return (
            f"{documents:,} documents: {', '.join(outcomes)}; {self.counts['added']:,} passages new, "
            f"{self.counts['gone']:,} gone, {self.counts['all']:,} in all"
        )

    def changed_options(self, options: PassageOptions) -> list[str]:
        """A line for each option that was another one in an earlier build, since the folder does not keep options."""
        lines = []
        for name, before in self.other_options.items():
            flag = f"--{name.replace('_', '-')}"
            old, new = _option_text(before), _option_text(getattr(options, name))
            again = f"leave out {flag}" if old == _DEFAULT else f"give {flag} {old} again"
            lines.append(f"{flag} was {old}, now {new}: {again} to have the earlier passages")
        return lines

    def oddities(self, most: int) -> list[str]:
        """Left-out files and warnings, a line per reason, each with the names of at most `most` files.

        A folder may have thousands of files with one fault, so files are grouped by the general reason before the
        colon, and the details stand beside each name. The lists of `odd` stay as they are, since command line and card
        both call this.
        """
        names_of = {reason: list(names) for reason, names in self.odd.items()}
        for name, problem in sorted(self.left_out.items()):
            reason, _, details = problem.partition(": ")
            shown_name = f"{name} ({details})" if details else name
            names_of.setdefault(f"left out, {reason}", []).append(shown_name)
        return [f"{reason} ({len(names):,}): {few(names, most)}" for reason, names in sorted(names_of.items())]


def _option_text(value: object) -> str:
    """The value of an option as the user gives it."""
    if not isinstance(value, (list, tuple)):
        return str(value)
    if tuple(value) in (TEXTS, TITLES):
        return _DEFAULT
    return shlex.quote(",".join(value))


class Documents(NamedTuple):
    """What folders and files hold.

    Attributes:
        paths: The documents, by their path in the common folder.
        left_out: The reason why each other file is left out.
    """

    paths: dict[str, Path]
    left_out: dict[str, str]


def find_documents(places: Sequence[str | Path]) -> Documents:
    """Find the documents in files and folders; hidden files and links in folders are left out.

    A link may lead out of the folder, or back to a folder above it. Files that are named themselves are read also if
    they are hidden or links, since the user asked for them.
    """
    missing = [str(place) for place in places if not Path(place).exists()]
    if missing:
        raise FileNotFoundError(f"no such file or folder: {', '.join(missing)}")
    absolute = [Path(os.path.abspath(place)) for place in places]
    common_folder = os.path.commonpath([place if place.is_dir() else place.parent for place in absolute])
    documents = Documents({}, {})

    def add(path: Path, problem: str = "") -> None:
        """Take a file in, or note why it is left out: nothing is left out without a word."""
        relative = os.path.relpath(path, common_folder)
        # The name of a file may be no valid text.
        name = os.fsencode(relative).decode("utf-8", "replace").replace(os.sep, "/")
        if not problem and path.suffix.lower() not in ENDINGS:
            problem = f"of a kind that is not read: {path.suffix or 'no ending'}"
        if not problem and not path.is_file():
            problem = "not a regular file"
        if problem:
            documents.left_out[name] = problem
        else:
            documents.paths[name] = path

    for place in absolute:
        if not place.is_dir():
            add(place)
            continue
        for root, folders, files in os.walk(place, onerror=lambda error: add(Path(error.filename), "can't be opened")):
            for name in files:
                add(Path(root, name), _hidden_or_link(root, name))
            for name in list(folders):
                problem = _hidden_or_link(root, name)
                if problem:
                    add(Path(root, name), problem)
                    # `os.walk` does not enter a folder that is removed from its list.
                    folders.remove(name)
    return Documents(dict(sorted(documents.paths.items())), documents.left_out)


def _hidden_or_link(folder: str, name: str) -> str:
    """Why a file or folder inside a folder is not read; "" if it is."""
    if name.startswith("."):
        return "hidden"
    if Path(folder, name).is_symlink():
        return "links, which are not followed"
    return ""


def build_passages(options: PassageOptions, documents: Sequence[str | Path], output: str | Path) -> Build:
    """Make or update a folder of passages; a stopped build resumes.

    Args:
        documents: Files and folders.
        output: The folder. Documents in its store that are not among `documents` are removed.

    Raises:
        ValueError: No document was found or could be read, or the stored ones have other names now.
    """
    folder = Path(output)
    check_folder(folder, (STORE, f"{STORE}-*", LOCK), True, documents, continues=STORE)
    paths, left_out = find_documents(documents)
    build = Build(left_out)
    given = few(list(map(str, documents)), 3)
    if not paths:
        raise ValueError("; ".join([f"{given}: no document was found", *build.oddities(3)]))
    lock = lock_folder(folder, f"output folder {folder}: another program is writing it")
    with lock, closing(open_database(folder / STORE, _STORE)) as database:
        stored = [name for (name,) in database.execute("SELECT name FROM documents")]
        _refuse_renamed(paths, stored, output)
        for name, path in progress(paths.items(), "reading", "document"):
            _update_document(database, name, path, options, build)
        _delete_missing(database, [name for name in stored if name not in paths], build)
        _warn_if_all_gone(build, given, output)
        _write_corpus(database, folder, options, build)
    return build


def _delete_missing(database: sqlite3.Connection, missing: Iterable[str], build: Build) -> None:
    """Delete the documents that were not found again, and count them in `build`.

    Their passages must not be retrieved any more.
    """
    for name in missing:
        build.counts["gone"] += len(_delete_document(database, name))
        build.counts["deleted"] += 1


def _warn_if_all_gone(build: Build, given: str, output: str | Path) -> None:
    """Warn that no stored document was found again: perhaps the folder is a wrong one.

    This is no error, since a user may replace all documents, and the corpus can be built again from the old folder.
    """
    deleted = build.counts["deleted"]
    if deleted and not any(build.counts[outcome] for outcome in _STILL_THERE):
        warning = "%s has none of the %d documents from which %s was made; if this is a mistake, give the right folder"
        logger.warning(warning, given, deleted, output)


def _refuse_renamed(paths: Mapping[str, Path], stored: Sequence[str], output: str | Path) -> None:
    """Raise `ValueError` if the same documents have other names now, because --documents names another folder.

    Only a change of all names is looked at: with one name in common, the folder is taken to be the same. One stored
    name is enough to find out, since another folder lengthens or shortens all names alike.
    """
    if not stored or not paths.keys().isdisjoint(stored):
        return
    old = stored[0]
    for new in paths:
        if f"/{new}".endswith(f"/{old}") or old.endswith(f"/{new}"):
            raise ValueError(
                f"{old} in {output} would become {new}, and all passages would be new, since documents are "
                "named from the folder that holds all of --documents: give the same folder, with new documents in "
                "it, or another --output"
            )


def _write_corpus(database: sqlite3.Connection, folder: Path, options: PassageOptions, build: Build) -> None:
    """Write corpus and card from the store, and add oddities and the number of all passages to `build`.

    Oddities are read from the store, so that they also tell of documents that this build did not read again.
    """
    for name, notes in database.execute("SELECT name, notes FROM documents ORDER BY name"):
        for note, times in json.loads(notes).items():
            build.odd[note].append(f"{name} ({times})" if times > 1 else name)
    (build.counts["all"],) = database.execute("SELECT COUNT(*) FROM passages").fetchone()
    if not build.counts["all"]:
        raise ValueError("; ".join(["no document could be read", *build.oddities(3)]))
    with new_file(folder / CORPUS) as scratch, scratch.open("w", encoding="utf-8", newline="\n") as file:
        for (row,) in database.execute("SELECT row FROM passages ORDER BY document, number"):
            file.write(row)
    oddities = "".join(f"- {line}\n" for line in build.oddities(20))
    write_text(folder / CARD, f"{_CARD.format(size=options.size)}\n{oddities}")
    (folder / LOCK).unlink(missing_ok=True)


def _update_document(
    database: sqlite3.Connection, name: str, path: Path, options: PassageOptions, build: Build
) -> None:
    """Bring the stored passages of a document up to date, and add the outcome to `build`.

    A document whose digest and options are those of the store is not read. Each document is one transaction, so a
    stopped build keeps the documents that it has finished, and none is half written. A document that can't be read
    loses its old passages, since they are not in the file any more.
    """
    stored = database.execute("SELECT digest FROM documents WHERE name = ?", (name,)).fetchone()
    notes: Counter[str] = Counter()
    new_ids: set[str] = set()
    outcome = "changed" if stored else "new"
    try:
        content = file_digest(path)
        digest = f"{content} {_VERSION} {json.dumps(asdict(options))}"
        other_options = _other_options(stored[0], options) if stored else {}
        build.other_options |= other_options
        if stored and stored[0].startswith(f"{content} "):
            outcome = "read with other options" if other_options else "read in another way than before"
        if stored == (digest,):
            build.counts["kept"] += 1
            return
        with database:
            database.execute("BEGIN IMMEDIATE")
            old_ids = _delete_document(database, name)
            number = 0
            blocks = read_blocks(path, options.text_column, options.title_column, notes)
            blocks = without_lone_headings(blocks, notes)
            for number, row in enumerate(passages_of(name, blocks, options.size), 1):
                new_ids.add(row["id"])
                values = (name, number, row["id"], json_line(row))
                database.execute("INSERT OR IGNORE INTO passages VALUES (?, ?, ?, ?)", values)
            if not number:
                raise Unreadable("without text: only a heading")
            notes["passages that repeat another passage of the document"] = number - len(new_ids)
            database.execute("INSERT INTO documents VALUES (?, ?, ?)", (name, digest, json.dumps(+notes)))
    except (OSError, Unreadable) as problem:
        # The transaction above was rolled back, so the old passages are removed here.
        old_ids = _delete_document(database, name)
        new_ids = set()
        if isinstance(problem, Unreadable):
            build.left_out[name] = str(problem)
        else:
            build.left_out[name] = f"can't be opened: {problem.strerror}"
    if new_ids:
        build.counts[outcome] += 1
    elif stored:
        build.counts["no longer read"] += 1
    build.counts["added"] += len(new_ids - old_ids)
    build.counts["gone"] += len(old_ids - new_ids)


def _other_options(digest: str, options: PassageOptions) -> dict[str, object]:
    """The options with which a stored document was read, where they are others now; the stored digest has them all."""
    _content, _version, stored = digest.split(" ", 2)
    now = asdict(options)
    others = {}
    for name, before in json.loads(stored).items():
        if name in now and json.dumps(now[name]) != json.dumps(before):
            others[name] = before
    return others


def _delete_document(database: sqlite3.Connection, document: str) -> set[str]:
    """Delete a document from the store; return the ids of its passages, to count those that its new version lacks.

    Without a transaction around it, each statement is committed at once (`open_database`).
    """
    ids = {identity for (identity,) in database.execute("SELECT id FROM passages WHERE document = ?", (document,))}
    database.execute("DELETE FROM passages WHERE document = ?", (document,))
    database.execute("DELETE FROM documents WHERE name = ?", (document,))
    return ids


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
    parsed = parser.parse_args(arguments)

    def program() -> None:
        """Build the passages of the command line, and print what changed and what is odd."""
        options = from_arguments(PassageOptions, parsed)
        build = build_passages(options, parsed.documents, parsed.output)
        lines = [f"{parsed.output}: {build.changes()}", *build.changed_options(options), *build.oddities(3)]
        print(printable("\n  ".join(lines)))  # noqa: T201

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
