from collections import Counter

import pytest

from tests.data_builders.pages.word import paragraph, run, word
from tripletune.data_builders.documents.blocks import read_blocks
from tripletune.data_builders.documents.html import html_blocks

CASES = {
    "marks of notes": (
        "<p>Of 1987<sup>3</sup>; 1987<a href='#n'>3</a>, see <a href='#s'>3</a>.<sup>7</sup> A[1]<sup>[2]</sup>."
        "<p>An end.<a href='x#b'>↩</a>",
        ["Of 1987^3; 1987, see 3. A[1].", "An end."],
    ),
    "superscripts": (
        "<p>10<sup>−6</sup> x<sup>n+1</sup> log<sub>10</sub>100 <sup>14</sup>C M<sup>me</sup> A. 19<sup>th</sup> "
        "H<sub>2</sub>O 5<sup>1</sup>/<sub>2</sub> 11<sub>2</sub> Tern<sup>TM</sup>",
        ["10^−6 x^(n+1) log10 100 14C Mme A. 19th H2O 5 1/2 11_2 Tern"],
    ),
    "raised by a style": (
        "<p>1990<span style='vertical-align: super'>4</span> 10<span style='vertical-align:sub'>2</span> "
        "Vel<sup>1,2</sup> 3<sup>a</sup> 1990<sup>a</sup>",
        ["1990^4 10_2 Vel 3a 1990^a"],
    ),
    "elements without end tags": (
        "<div><nav><a>Menu</a></div><p>One.<p hidden>No.<p>Two.<noscript>x</noscript><ul><li style='display:none'>No."
        "<li>Three.</ul><button>Go</button><select><option>a</select><p>Four <button>five.<p>Six.",
        ["Menu", "One.", "Two.", "Three.", "Four five.", "Six."],
    ),
    "cells over rows and columns": (
        "<table><tr><td rowspan=0>A<td colspan=2>b<tr><td>c<td>d<tr><td>e<td>e</table>"
        "<table><tr><td>Yes<td>Yes<tr><td rowspan=2>B<td>g<tr><td>f<tr><td colspan=2>All</table>",
        ["A | b | b", "A | c | d", "A | e | e", "Yes | Yes", "B | g", "B | f", "All"],
    ),
    "cells end with their rows' group": (
        "<table><tbody><tr><td rowspan=3>Kelm<td>Arn<tr><td>Bek</tbody><tbody><tr><td>Rell<td>Cor</table>",
        ["Kelm | Arn", "Kelm | Bek", "Rell | Cor"],
    ),
    "elements in elements of the same name": (
        "<p>A<span hidden><span>x</span>y</span>b <b>c</b><sup><i>2</i></sup> "
        "<span><span style='display:none'>x</span>d</span>",
        ["Ab c^2 d"],
    ),
    "hidden rows and cells": (
        "<table><tr><td>A<td hidden>x<td>B<tr style='display:none'><td>y<td>z<tr><td><del>q</del>r<td>s</table>",
        ["A | B", "r | s"],
    ),
    "a table in a cell": (
        "<table><tr><td rowspan=2>Kelm<td><table><tr><td>Arn<td>5</table><tr><td>Bek</table>",
        ["Kelm", "Arn | 5", "Kelm | Bek"],
    ),
    "the whole page hidden until it is ready": (
        "<body style='opacity: 0'><main hidden><p>One.<p style='opacity:0.5'>Two.<p style='opacity:0'>No.",
        ["One.", "Two."],
    ),
    "deleted blocks": (
        "<del><h2>Old</h2><p>Gone.</p></del><p>It is <strike>1</strike> 2. <ins>New.</ins><s>Lost</s>",
        ["It is 2. New."],
    ),
    "formulas": (
        "<p>So <span class=k><math><msup><mn>10</mn><mn>6</mn></msup><mo>=</mo> <msqrt><mi>x</mi></msqrt><annotation>"
        "\\x</annotation></math></span><span aria-hidden=true>106=x</span>.<p>A <span style='display:none'><math>"
        "<mfrac><mn>1</mn><mn>2</mn></mfrac></math></span><img alt='1/2'> b.",
        ["So 10^6=sqrt(x).", "A 1/2 b."],
    ),
    "a formula of one sign beside its drawing": (
        "<p>Let <span class=k><span class=m><math><mi>x</mi></math></span><span aria-hidden=true>x</span></span> be 2.",
        ["Let x be 2."],
    ),
    "rules of style sheets": (
        "<style><!-- .draft, #old { display: none } p.fee { text-decoration: line-through }\n.up{vertical-align:super}"
        "@media print { .shown { display: none } } div .x { display: none } /* .y{display:none} */ --></style>"
        "<p>One.<p class='a draft'>No.<p id=old>No.<p class=fee>10.<p class=shown>10<i class=up>6</i>.<p class=x>Two."
        "<p class=draft style='display: block'>Three.<p class=y>Four.",
        ["One.", "10^6.", "Two.", "Three.", "Four."],
    ),
    "boxes that are ticked": (
        "<p><input type=checkbox checked>Tea <input type=Radio>Milk <input type=text value=no>",
        ["[x] Tea [ ] Milk"],
    ),
    "footers": (
        "<article><p>A.<footer>By B.</footer></article><footer><p>© 2024</footer><p>C.",
        ["A.", "By B.", "C."],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_cut", [False, True])
def test_text_is_what_a_reader_sees(name, is_cut):
    page, expected = CASES[name]
    pieces = list(page) if is_cut else [page]
    assert [block.text for block in html_blocks(pieces, Counter())] == expected


def test_what_is_hidden_or_deleted_is_counted():
    notes = Counter()
    assert not list(html_blocks(["<p hidden>One.</p><p><del>Two</del><span style='display:none'></span>"], notes))
    assert notes == {"hidden texts left out": 1, "deleted texts left out": 1}


def _texts(path, content):
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        path.write_bytes(content)
    notes = Counter()
    return [block.text for block in read_blocks(path, ["text"], ["title"], notes)], notes


BOX = f"<w:txbxContent>{paragraph('A box.')}</w:txbxContent>"
DRAWING = f'<w:drawing><a xmlns=""><b>{BOX}</b></a></w:drawing>'
CHOICE = '<c:AlternateContent xmlns:c="http://schemas.openxmlformats.org/markup-compatibility/2006"><c:Choice>'


def _field(kind, more=""):
    return f'<w:r><w:fldChar w:fldCharType="{kind}">{more}</w:fldChar></w:r>'


def _cell(text, properties=""):
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{paragraph(text)}</w:tc>"


INSTRUCTION = "<w:r><w:instrText>IF </w:instrText></w:r>"
NESTED = _field("begin") + INSTRUCTION + _field("separate") + run("7") + _field("end")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (paragraph("One.", f"<w:r>{DRAWING}</w:r>"), ["One.", "A box."]),
        (paragraph("One.", f"<w:r>{CHOICE}{DRAWING}</c:Choice></c:AlternateContent></w:r>"), ["One.", "A box."]),
        (paragraph("At ", _field("begin"), INSTRUCTION, NESTED, INSTRUCTION, _field("separate"), "9.", _field("end")),
         ["At 9."]),
        (paragraph(_field("begin", "<w:ffData><w:checkBox><w:checked/></w:checkBox></w:ffData>"),
                   "<w:r><w:instrText> FORMCHECKBOX </w:instrText></w:r>", _field("end"), " Tea"), ["[x] Tea"]),
        ("<w:tbl><w:tr>" + _cell("Kelm", '<w:hMerge w:val="restart"/>') + _cell("", "<w:hMerge/>") + _cell("Rell")
         + '</w:tr><w:tr><w:trPr><w:gridBefore w:val="1"/></w:trPr>' + _cell("2") + _cell("3") + "</w:tr></w:tbl>",
         ["Kelm | Kelm | Rell", "2 | 3"]),
        (paragraph("10", run("6", '<w:position w:val="12"/>'), " tons"), ["10^6 tons"]),
    ],
    ids=["drawing", "choice", "nested field", "checkbox", "merged", "raised"],
)  # fmt: skip
def test_what_mammoth_would_not_read_of_a_word_file(body, expected, tmp_path):
    texts, _ = _texts(tmp_path / "a.docx", word(body))
    assert texts == expected


def test_an_embedded_document_is_counted(tmp_path):
    _, notes = _texts(tmp_path / "a.docx", word(f"{paragraph('One.')}<w:altChunk/>"))
    assert notes["embedded documents left out"] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ann of [[Kelm|the town]], [[Arn#Source]] and [[#Part]], [[1]](#r), `[[ -f x ]]`. ![[map.png]]\n",
         ["Ann of the town, Arn and [[#Part]], [1], [[ -f x ]]."]),
        ("One %% no %% two 5%% and 6%%.\n\n%%\nno\n\nno\n%%\n\nThree.\n", ["One  two 5%% and 6%%.", "Three."]),
        ('---\n"og:title": River\n---\nOne.\n', ["One."]),
    ],
)  # fmt: skip
def test_what_commonmark_does_not_know(text, expected, tmp_path):
    texts, _ = _texts(tmp_path / "a.md", text)
    assert [" ".join(text.split()) for text in texts] == [" ".join(text.split()) for text in expected]
