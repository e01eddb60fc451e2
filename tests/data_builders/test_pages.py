from collections import Counter

import pytest

from tests.data_builders.pages import html, markdown, pdf, word
from tripletune.data_builders.documents.blocks import read_blocks

PAGES = [*html.PAGES, *markdown.PAGES, *word.PAGES, *pdf.PAGES]


def text_of(path):
    """Headings and paragraphs of a document in reading order, one a line, with white space folded."""
    lines, above = [], ()
    for block in read_blocks(path, (), (), Counter()):
        lines += [name for name in block.heading if name not in above]
        above = block.heading
        lines.append(" ".join(block.text.split()))
    return lines


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_says_what_its_reader_reads(tmp_path, page):
    path = tmp_path / page.name
    path.write_bytes(page.content if isinstance(page.content, bytes) else page.content.encode())
    text = "\n".join(text_of(path))
    assert [fact for fact in page.facts if fact not in text.replace("\n", " ")] == []
    assert [wrong for wrong in page.wrong if wrong in text.replace("\n", " ")] == []
    assert " ".join(text.split()).removeprefix("Report of Velo ") == " ".join(page.text.split())
