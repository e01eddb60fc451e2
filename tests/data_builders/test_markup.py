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
    "numbers of items": (
        "<ol start=3><li>a<li><p>b</p><p>c</p><li value=9>d<li hidden>x<li><del>y</del><li>z</ol>"
        "<ol type=a><li>One<ol type=I><li>Two<li>Three</ol><li><ul><li>q</ul></ol><p>End",
        ["3. a", "4. b", "c", "9. d", "11. z", "a. One", "I. Two", "II. Three", "b. q", "End"],
    ),
    "numbers that fall": (
        "<ol reversed start=2><li>a<li>b</ol><ol reversed><li>c<li>d</ol>",
        ["2. a", "1. b", "c", "d"],
    ),
    "numbers in cells and before cells": (
        "<table><tr><td>See<ol><li>a<li><p>b</ol><td>c</table><ol><li><table><tr><td>d<td>e</table><li><h3></h3>"
        "<input type=checkbox>Tea<li></ol><p>f<ol><li></ol><p>g",
        ["See 1. a 2. b | c", "1. d | e", "2. [ ] Tea", "f", "g"],
    ),
    "numbers before what is left out or raised": (
        "<ol><li><div hidden>x</div>y<li><sup>1</sup>/<sub>2</sub> cup<li style='text-decoration:line-through'>x"
        "<template><li>q</template><li><math><mfrac><mn>1</mn><mn>2</mn></mfrac></math></ol>",
        ["1. y", "2. 1/2 cup", "4. 1/2"],
    ),
    "lists of notes and lists whose numbers are not shown": (
        "<style>.a{list-style-type:upper-roman}</style><ol class=references><li>a</ol><ol><li id=fn:1>b<li>c</ol>"
        "<ol style='list-style: none'><li>d</ol><ol class=a><li>e<li style='list-style:none'>f<li>g</ol><li>h",
        ["a", "b", "2. c", "d", "I. e", "f", "III. g", "h"],
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


def _level(place, form, text, more=""):
    values = f'<w:start w:val="1"/><w:numFmt w:val="{form}"/>{more}<w:lvlText w:val="{text}"/>'
    return f'<w:lvl w:ilvl="{place}">{values}</w:lvl>'


def _item(text, number=1, level=0):
    place = f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>'
    return f"<w:p><w:pPr>{place}</w:pPr>{text if text.startswith('<') else run(text)}</w:p>"


NUMBERING = (
    f'<w:abstractNum w:abstractNumId="7">{_level(0, "decimal", "%1.")}{_level(1, "lowerLetter", "%1%2)")}'
    f'</w:abstractNum><w:abstractNum w:abstractNumId="8">{_level(0, "bullet", "o")}</w:abstractNum>'
    f'<w:abstractNum w:abstractNumId="9">{_level(0, "upperRoman", "Part %1")}</w:abstractNum>'
    '<w:num w:numId="1"><w:abstractNumId w:val="7"/></w:num><w:num w:numId="2"><w:abstractNumId w:val="8"/></w:num>'
    '<w:num w:numId="3"><w:abstractNumId w:val="9"/></w:num><w:num w:numId="4"><w:abstractNumId w:val="7"/>'
    '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="5"/></w:lvlOverride></w:num>'
)


def test_items_of_a_word_file_have_the_numbers_that_word_shows(tmp_path):
    items = [_item("Battery"), paragraph("It is new."), _item("Crew"), _item("Ida", level=1), _item("Bo", level=1)]
    struck = [_item(run("Gone", "<w:strike/>")), _item("<w:del><w:r><w:delText>Gone</w:delText></w:r></w:del>")]
    deleted = '<w:p><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr><w:rPr><w:del/></w:rPr></w:pPr></w:p>'
    more = [_item("Sails"), _item("Tea", 2), _item("Rope", 4), paragraph("End", style="Numbered")]
    numbered = (
        '<w:style w:type="paragraph" w:styleId="Numbered"><w:basedOn w:val="Base1"/></w:style>'
        '<w:style w:type="paragraph" w:styleId="Base1"><w:pPr><w:numPr><w:numId w:val="3"/></w:numPr></w:pPr></w:style>'
    )
    cells = f"<w:tbl><w:tr><w:tc>{_item('Oar', 4)}</w:tc><w:tc>{_item('Map', 4)}</w:tc></w:tr></w:tbl>"
    texts, _ = _texts(
        tmp_path / "a.docx", word("".join([*items, *struck, deleted, *more, cells]), "", NUMBERING, numbered)
    )
    first = ["1. Battery", "It is new.", "2. Crew", "2a) Ida", "2b) Bo"]
    assert texts == [*first, "5. Sails", "Tea", "5. Rope", "Part I End", "6. Oar | 7. Map"]


def test_items_of_markdown_keep_their_numbers(tmp_path):
    text = "1. **Battery** is new.\n2. Crew rota\n   - Ida\n   1. Bo\n\nText.\n\n7. Sails\n\n   Two.\n\n8) Rope\n"
    texts, _ = _texts(tmp_path / "a.md", text)
    assert texts == ["1. Battery is new.", "2. Crew rota", "Ida", "1. Bo", "Text.", "7. Sails", "Two.", "8. Rope"]


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
