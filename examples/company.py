"""The documents of a fictional company, written from a table (`company.yaml`), and the facts that they state."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from tripletune.core.data.answers import normalize_answer as key

HOME = Path(__file__).parent
DOCUMENTS = HOME / "documents"
TABLE: dict[str, Any] = yaml.safe_load((HOME / "company.yaml").read_text(encoding="utf-8"))
# Predicates of lists of somebody's things, such as "designed", with the predicates of the things, such as "designer".
INVERSE: dict[str, str] = TABLE["lists"]
# Subject, predicate and object. In the facts that a question is answered from, the subject is a `key`.
Fact: TypeAlias = tuple[str, str, str]


class Page(NamedTuple):
    """A kind of document: its heading and introduction, and the kinds of things in it."""

    heading: str
    introduction: str
    kinds: list[str]


PAGES = {
    "people": Page(
        "Who is who in the {d} division", "Whom to ask about what, and a few words on each of us.", ["person"]
    ),
    "places": Page("Where the {d} division works", "Notes for new colleagues and for visitors.", ["town", "site"]),
    "products": Page("Instruments of the {d} division", "What we build, and who is behind it.", ["product"]),
    "projects": Page("Projects of the {d} division", "Our projects, as reported to the board.", ["project"]),
    "partners": Page(
        "Partners of the {d} division", "Firms, clients and schools that we work with.", ["firm", "university"]
    ),
}
# File endings of single documents; places are HTML, and all others Markdown.
ENDINGS = {("River", "projects"): "txt", ("Snow", "partners"): "txt", ("Coast", "partners"): "html"}
LIST_HEADINGS = {"people": "Who has designed and leads what", "partners": "What they do for us"}
LISTS = {"people": ("designed", "leads"), "partners": ("supplies sensors for", "pays for")}
PHRASES = {
    "designed": "{0} designed the {1} and the {2}.",
    "leads": "{0} leads the projects {1} and {2}.",
    "supplies sensors for": "{0} supplies the sensors of the {1} and the {2}.",
    "pays for": "{0} pays for the projects {1} and {2}.",
}


class Thing(NamedTuple):
    """A row of the table: a person, town, product and so on, with its values in the order of the table's columns."""

    division: str
    kind: str
    name: str
    values: list[str]


class Sentence(NamedTuple):
    """A sentence of a document, and the facts that it states."""

    text: str
    facts: list[Fact]


class Section(NamedTuple):
    """A section of a document."""

    name: str
    sentences: list[Sentence]


class Document(NamedTuple):
    """A document before it is written as Markdown, text or HTML."""

    file: str
    heading: str
    introduction: str
    sections: list[Section]


def things() -> Iterator[Thing]:
    """Yield every thing in the table, in its order."""
    for division, kinds in TABLE["divisions"].items():
        for kind, rows in kinds.items():
            for name, values in rows.items():
                yield Thing(division, kind, name, [str(value) for value in values])


KINDS: dict[str, str] = {}
NAMES: dict[str, str] = {}
for thing in things():
    KINDS[key(thing.name)] = thing.kind
    # The first of two things with the same key counts.
    NAMES.setdefault(key(thing.name), thing.name)


def draw_number(text: str, count: int) -> int:
    """A number below `count`, drawn by a hash of the text: the documents are the same on every machine."""
    return hashlib.sha256(text.encode()).digest()[0] % count


def section_of(thing: Thing) -> Section:
    """The section about a thing, in one of the table's ways, drawn by its name, with the facts that it states.

    A sentence of the table has `{0}` for the name and `{1}`, `{2}` for the values, by the numbers of their columns from
    1, and behind the text the numbers of the columns that it states.
    """
    words = {"he": "he", "his": "his", "He": "He", "His": "His"}
    if thing.values[0] == "she":
        words = {"he": "she", "his": "her", "He": "She", "His": "Her"}
    article = "an" if thing.values[0][0] in "aeiou" else "a"
    words["a1"] = f"{article} {thing.values[0]}"
    columns = TABLE["columns"][thing.kind]
    ways = TABLE["sentences"][thing.kind]
    sentences = []
    for text, *stated in ways[draw_number(thing.name, len(ways))]:
        facts = [(thing.name, columns[n - 1], thing.values[n - 1].removeprefix("its ")) for n in stated]
        sentences.append(Sentence(text.format(thing.name, *thing.values, **words), facts))
    return Section(thing.name, sentences)


def list_sentences(division: str, page: str) -> list[Sentence]:
    """The sentences of a page about who in a division designed, leads, supplies or pays for two things.

    They state facts of the table the other way round (`INVERSE`), so that questions can be asked from both ends. Only
    lists of two are written, as `PHRASES` has places for two names.
    """
    sentences = []
    for predicate in LISTS.get(page, ()):
        owned_by: dict[str, list[str]] = {}
        for thing in things():
            columns = TABLE["columns"][thing.kind]
            if thing.division == division and INVERSE[predicate] in columns:
                owner = thing.values[columns.index(INVERSE[predicate])]
                owned_by.setdefault(owner, []).append(thing.name)
        for owner, names in owned_by.items():
            if len(names) == 2:
                facts = [(owner, predicate, name) for name in names]
                sentences.append(Sentence(PHRASES[predicate].format(owner, *names), facts))
    return sentences


def documents() -> Iterator[Document]:
    """Yield every document of the company."""
    for division in TABLE["divisions"]:
        for name, page in PAGES.items():
            sections = []
            for thing in things():
                if thing.division == division and thing.kind in page.kinds:
                    sections.append(section_of(thing))
            sentences = list_sentences(division, name)
            if sentences:
                sections.append(Section(LIST_HEADINGS[name], sentences))
            file = f"{division.lower()}-{name}.{ending_of(division, name)}"
            yield Document(file, page.heading.format(d=division), page.introduction, sections)


def ending_of(division: str, page: str) -> str:
    """The file ending of a document, which is its format; the formats differ so that all readers are used."""
    if page == "places":
        return "html"
    return ENDINGS.get((division, page), "md")


def write_documents(folder: Path = DOCUMENTS) -> None:
    """Write all documents into a folder, which is made if it is missing; files of the same names are replaced."""
    folder.mkdir(exist_ok=True)
    for document in documents():
        if document.file.endswith("md"):
            text = as_markdown(document)
        elif document.file.endswith("txt"):
            text = as_text(document)
        else:
            text = as_html(document)
        (folder / document.file).write_text(text, encoding="utf-8")


def text_of(section: Section) -> str:
    """The sentences of a section as one paragraph."""
    return " ".join(sentence.text for sentence in section.sentences)


def as_markdown(document: Document) -> str:
    """A document as Markdown, its sections under headings."""
    text = f"# {document.heading}\n\n{document.introduction}\n"
    for section in document.sections:
        text += f"\n## {section.name}\n\n{text_of(section)}\n"
    return text


def as_text(document: Document) -> str:
    """A document as plain text, which has no headings of sections."""
    text = f"{document.heading}\n\n{document.introduction}\n"
    for section in document.sections:
        text += f"\n{text_of(section)}\n"
    return text


def as_html(document: Document) -> str:
    """A document as HTML; only names and sentences of the table may have characters to escape."""
    text = f'<!doctype html>\n<html lang="en">\n<head><title>{document.heading}</title></head>\n<body>\n'
    text += f"<h1>{document.heading}</h1>\n<p>{document.introduction}</p>\n"
    for section in document.sections:
        text += f"<h2>{html.escape(section.name)}</h2>\n<p>{html.escape(text_of(section))}</p>\n"
    return text + "</body>\n</html>\n"


def all_sentences() -> list[Sentence]:
    """The sentences of all documents, by which `facts_of` knows what a text states."""
    sentences = []
    for document in documents():
        for section in document.sections:
            sentences += section.sentences
    return sentences


SENTENCES = all_sentences()


def facts_of(text: str) -> list[Fact]:
    """The facts of the table's sentences in a text, if their subject is in the text too.

    A sentence may name its subject by a pronoun, so it says nothing to a reader of a passage that lacks the name.
    """
    plain = " ".join(text.split())
    facts = []
    for sentence in SENTENCES:
        if sentence.text in plain:
            facts += [fact for fact in sentence.facts if fact[0] in plain]
    return facts


def objects_of(facts: set[Fact], subject: str, predicate: str) -> set[str]:
    """The objects of a subject's predicate in the facts, also from inverse facts ("X designed Y" for a designer)."""
    objects = set()
    for fact_subject, fact_predicate, fact_object in facts:
        if fact_subject == key(subject) and fact_predicate == predicate:
            objects.add(fact_object)
        if key(fact_object) == key(subject) and INVERSE.get(fact_predicate) == predicate:
            objects.add(full_name(fact_subject))
    return objects


def things_of_owner(facts: set[Fact], owner: str, predicate: str) -> set[str]:
    """The things whose predicate has this owner, for example all things with this designer."""
    names = set()
    for fact_subject, fact_predicate, fact_object in facts:
        if fact_subject == key(owner) and INVERSE.get(fact_predicate) == predicate:
            names.add(fact_object)
        if key(fact_object) == key(owner) and fact_predicate == predicate:
            names.add(full_name(fact_subject))
    return names


def full_name(normal: str) -> str:
    """The name of the thing with this key, as the table writes it."""
    return NAMES[normal]


def name_in_sentence(name: str) -> str:
    """A name as it stands in a sentence, with what English puts around the names of products and projects."""
    kind = KINDS.get(key(name))
    if kind == "product":
        return f"the {name}"
    if kind == "project":
        return f"the {name} project"
    return name
