"""Compare extractors on the thirty documents of `tests/data_builders/pages`: characters and facts that are wrong.

    python -m tests.data_builders.compare_pages --peers PEERS/bin/python --tree before=FOLDER

`--peers` is a Python with pypdfium2, mammoth, markitdown[docx,pdf] and docling-slim[format-html,format-markdown,
format-docx], which needs torch; `--tree` is a checkout of another version.
Texts are compared without markup (`plain`), so that Markdown and plain text count alike. An error of facts is a
statement of the page that is missing, or one that is there and is wrong, hidden or deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.data_builders.pages import Page, html, markdown, pdf, word

FORMATS = {"HTML": html.PAGES, "Markdown": markdown.PAGES, "DOCX": word.PAGES, "PDF": pdf.PAGES}
_OURS = """
import json, sys
from collections import Counter
from pathlib import Path
from tripletune.data_builders.documents.blocks import read_blocks
texts = {}
for path in map(Path, sys.argv[1:]):
    lines, above = [], ()
    try:
        for block in read_blocks(path, (), (), Counter()):
            lines += [name for name in block.heading if name not in above] + [block.text]
            above = block.heading
    except ValueError as error:
        print(path.name, error, file=sys.stderr)
    texts[path.name] = "\\n".join(lines)
print(json.dumps(texts))
"""
# Each peer prints its texts by the names of the files that it reads.
_PEERS = {
    "pypdfium2": """
import json, sys, pypdfium2
texts = {}
for path in sys.argv[1:]:
    if path.endswith(".pdf"):
        document = pypdfium2.PdfDocument(path)
        texts[path.split("/")[-1]] = "\\n".join(page.get_textpage().get_text_range() for page in document)
print(json.dumps(texts))
""",
    "mammoth": """
import json, sys, mammoth
texts = {}
for path in sys.argv[1:]:
    if path.endswith(".docx"):
        with open(path, "rb") as file:
            texts[path.split("/")[-1]] = mammoth.convert_to_markdown(file).value
print(json.dumps(texts))
""",
    "markitdown": """
import json, sys, markitdown
converter = markitdown.MarkItDown()
print(json.dumps({path.split("/")[-1]: converter.convert(path).text_content for path in sys.argv[1:]}))
""",
    # Its models of PDF pages come from the Hub, so PDF is left out.
    "docling": """
import json, sys
from docling.document_converter import DocumentConverter
converter = DocumentConverter()
texts = {}
for path in sys.argv[1:]:
    if not path.endswith(".pdf"):
        result = converter.convert(path, raises_on_error=False)
        texts[path.split("/")[-1]] = result.document.export_to_markdown() if result.document else ""
        if result.errors:
            print(path, *result.errors, file=sys.stderr)
print(json.dumps(texts))
""",
}


class Errors(NamedTuple):
    """The errors of an extractor on some pages; `characters` is the number of characters of the right texts."""

    edits: int
    characters: int
    facts: int


def plain(text: str) -> str:
    """A text without markup, marks of notes, struck text, brackets and line breaks; fractions of TeX have a slash."""
    text = re.sub(r"~~.*?~~|<s>.*?</s>|<del>.*?</del>", "", text)
    text = re.sub(r"\[\[?\w{1,2}\]?\]\(#[^()]*\)", "", text)
    text = re.sub(r"\[(\[?[^\[\]]*\]?)\]\([^()]*\)", r"\1", text)
    text = re.sub(r"\[\^?\w{1,2}\]:?", "", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"<(sup|sub)>|\^|\$", " ", text)
    text = re.sub(r"[(){}]", "", text)
    text = re.sub(r"<[^<>]*>|\\(?=\W)", "", text)
    text = re.sub(r"(?m)^\s*(?:#+|[-+*>]|\d+\.)\s+|^[|\s:-]*$", "", text)
    text = re.sub(r"[*_`|\u00ad\ufffe\x02]+", " ", text)
    return " ".join(text.split())


def edits(text: str, right: str) -> int:
    """The edit distance of two texts, by Wagner and Fischer's algorithm, one row at a time."""
    codes = np.array([ord(character) for character in right])
    places = np.arange(len(right) + 1)
    row = places
    for number, character in enumerate(text, 1):
        changed = np.empty(len(right) + 1, dtype=np.int64)
        changed[0] = number
        changed[1:] = np.minimum(row[1:] + 1, row[:-1] + (codes != ord(character)))
        # What is inserted costs one for each place: the least of all earlier places.
        row = np.minimum.accumulate(changed - places) + places
    return int(row[-1])


def errors(texts: dict[str, str], pages: list[Page]) -> Errors:
    """The errors of these texts."""
    total = characters = facts = 0
    for page in pages:
        text = plain(texts[page.name])
        right = plain(page.text)
        total += edits(text, right)
        characters += len(right)
        facts += sum(plain(fact) not in text for fact in page.facts)
        # As it stands, since "10 6" is right and "106" is wrong.
        facts += sum(plain(wrong) in text for wrong in page.wrong)
    return Errors(total, characters, facts)


def read(python: str, code: str, paths: list[Path], tree: str = "") -> dict[str, str]:
    """The texts that a program prints; with `tree`, it imports the tripletune of that folder."""
    environment = os.environ | {"PYTHONPATH": tree} if tree else dict(os.environ)
    command = [python, "-c", code, *map(str, paths)]
    ran = subprocess.run(command, env=environment, cwd=paths[0].parent, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python with pypdfium2, mammoth, markitdown and docling")
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER", help="another version of ours")
    parser.add_argument("--show", action="store_true", help="print each wrong fact")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for page in [page for pages in FORMATS.values() for page in pages]:
            path = Path(folder, page.name)
            path.write_bytes(page.content if isinstance(page.content, bytes) else page.content.encode())
            paths.append(path)
        texts = {"ours": read(sys.executable, _OURS, paths, str(Path(__file__).parents[2]))}
        for name, _, tree in (given.partition("=") for given in options.tree):
            texts[name] = read(sys.executable, _OURS, paths, tree)
        if options.peers:
            for name, code in _PEERS.items():
                texts[name] = read(options.peers, code, paths)
    for kind, pages in FORMATS.items():
        checked = sum(len(page.facts) + len(page.wrong) for page in pages)
        print(f"{kind}: {len(pages)} pages, {checked} statements")
        for name, of_name in texts.items():
            if all(page.name in of_name for page in pages):
                found = errors(of_name, pages)
                share = 100 * found.edits / found.characters
                print(f"  {name:12} {share:6.1f} % of characters wrong, {found.facts:3} facts wrong")
            if options.show:
                for page in pages:
                    show(name, page, of_name.get(page.name))


def show(name: str, page: Page, text: str | None) -> None:
    """Print the wrong facts of a page."""
    if text is None:
        return
    missing = [fact for fact in page.facts if plain(fact) not in plain(text)]
    wrong = [wrong for wrong in page.wrong if plain(wrong) in plain(text)]
    if missing or wrong:
        print(f"    {name}, {page.name}: missing {missing}, wrong {wrong}")


if __name__ == "__main__":
    main()
