"""Pages of Word: a report, a contract with revisions, minutes, a thesis, a price list, a letter, a form, a guideline."""

import io
import zipfile

from tests.data_builders.files import docx
from tests.data_builders.pages import Page

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"
_STYLES = (
    '<w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="heading 1"/></w:style>'
    '<w:style w:type="character" w:styleId="Gone"><w:name w:val="Gone"/><w:rPr><w:strike/></w:rPr></w:style>'
    '<w:style w:type="character" w:styleId="Up"><w:name w:val="Up"/><w:rPr><w:vertAlign w:val="superscript"/></w:rPr>'
    '</w:style><w:style w:type="character" w:styleId="Secret"><w:name w:val="Secret"/><w:basedOn w:val="Base"/></w:style>'
    '<w:style w:type="character" w:styleId="Base"><w:name w:val="Base"/><w:rPr><w:vanish/></w:rPr></w:style>'
)


def word(body: str, notes: str = "", numbering: str = "", styles: str = "") -> bytes:
    """A DOCX file with this body, footnotes, definitions of lists, and more styles."""
    source = zipfile.ZipFile(io.BytesIO(docx([("Normal", "")])))
    file = io.BytesIO()
    spaces = f'xmlns:w="{_WORD}" xmlns:m="{_MATH}"'
    with zipfile.ZipFile(file, "w") as packed:
        for name in source.namelist():
            content = source.read(name).decode()
            if name == "word/document.xml":
                content = f"<w:document {spaces}><w:body>{body}</w:body></w:document>"
            content = content.replace("</w:styles>", f"{_STYLES}{styles}</w:styles>")
            packed.writestr(name, content)
        if notes:
            packed.writestr("word/footnotes.xml", f"<w:footnotes {spaces}>{notes}</w:footnotes>")
        if numbering:
            packed.writestr("word/numbering.xml", f"<w:numbering {spaces}>{numbering}</w:numbering>")
    return file.getvalue()


def run(text: str, properties: str = "") -> str:
    """A run of text with these properties."""
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(*content: str, style: str = "Normal") -> str:
    """A paragraph of runs, or of texts."""
    runs = "".join(part if part.startswith("<") else run(part) for part in content)
    return f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr>{runs}</w:p>'


def heading(text: str) -> str:
    """A heading."""
    return paragraph(text, style="Heading1")


def deleted(text: str) -> str:
    """A tracked deletion."""
    return f'<w:del w:author="x"><w:r><w:delText xml:space="preserve">{text}</w:delText></w:r></w:del>'


def inserted(text: str) -> str:
    """A tracked insertion."""
    return f'<w:ins w:author="x">{run(text)}</w:ins>'


def field(instruction: str, text: str) -> str:
    """A simple field with its result."""
    return f'<w:fldSimple w:instr="{instruction}">{run(text)}</w:fldSimple>'


def raised(text: str) -> str:
    """A superscript."""
    return run(text, '<w:vertAlign w:val="superscript"/>')


def note(number: int, text: str) -> str:
    """A footnote."""
    return f'<w:footnote w:id="{number}">{paragraph(text)}</w:footnote>'


def mark(number: int) -> str:
    """The mark of a footnote."""
    return f'<w:r><w:footnoteReference w:id="{number}"/></w:r>'


def cell(text: str, properties: str = "") -> str:
    """A cell of a table."""
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{paragraph(text)}</w:tc>"


def table(*rows: list[str]) -> str:
    """A table of cells."""
    content = ""
    for cells in rows:
        content += f"<w:tr>{''.join(cells)}</w:tr>"
    return f"<w:tbl>{content}</w:tbl>"


def symbol(text: str) -> str:
    """A run of a formula."""
    return f"<m:r><m:t>{text}</m:t></m:r>"


_BEGIN, _GOES_ON, _TWO = '<w:vMerge w:val="restart"/>', "<w:vMerge/>", '<w:gridSpan w:val="2"/>'
_ENERGY = f"<m:oMath>{symbol('E=m')}<m:sSup><m:e>{symbol('v')}</m:e><m:sup>{symbol('2')}</m:sup></m:sSup></m:oMath>"
_MEAN = (
    f"<m:oMathPara><m:oMath>{symbol('a=')}<m:f><m:num>{symbol('x+y')}</m:num><m:den>{symbol('2')}</m:den></m:f></m:oMath>"
    "</m:oMathPara>"
)
_CHOICE = "<w:sdt><w:sdtPr><w:showingPlcHdr/></w:sdtPr><w:sdtContent>{}</w:sdtContent></w:sdt>"
PAGES = [
    Page(
        "report.docx",
        word(
            heading("Report of the Arn")
            + paragraph("The Arn carries 4 × 10", raised("6"), " tons of sand. It was surveyed in 1887", mark(1), " by Ida.")
            + paragraph("Its energy is ", _ENERGY, " in the model."),
            note(1, "Town Records of Kelm."),
        ),
        "Report of the Arn\nThe Arn carries 4 × 10^6 tons of sand. It was surveyed in 1887 by Ida.\n"
        "Its energy is E=mv^2 in the model.\nTown Records of Kelm.",
        ("10^6 tons of sand", "surveyed in 1887 by Ida", "energy is E=mv^2 in", "Town Records of Kelm"),
        ("106", "18871"),
    ),
    Page(
        "contract.docx",
        word(
            heading("Contract")
            + paragraph("The fee is ", deleted("9,000"), inserted("8,500"), " crowns", run(" (we would take 7,000)", "<w:vanish/>"), ".")
            + paragraph("Velo delivers in ", run("May", "<w:strike/>"), run("April", "<w:dstrike/>"), " June.")
            + paragraph("Rights stay ", run("with Rell ", '<w:rStyle w:val="Gone"/>'), "with Velo.")
            + paragraph(run("Draft of Bo Mor", '<w:rStyle w:val="Secret"/>')),
        ),
        "Contract\nThe fee is 8,500 crowns.\nVelo delivers in June.\nRights stay with Velo.",
        ("The fee is 8,500 crowns.", "Velo delivers in June.", "Rights stay with Velo."),
        ("9,000", "7,000", "May", "April", "with Rell", "Draft of"),
    ),
    Page(
        "minutes.docx",
        word(
            heading("Minutes")
            + paragraph("The chair of the council is ", field("AUTHOR", "Ann Vel"), ", born in Kelm.")
            + paragraph("The meeting of ", field("DATE", "3 May 2024"), " began at ", field("TIME", "19:30"), ".")
            + paragraph("<w:r><w:t>Votes: 7 yes</w:t><w:cr/><w:t>2 no</w:t></w:r>"),
        ),
        "Minutes\nThe chair of the council is Ann Vel, born in Kelm.\nThe meeting of 3 May 2024 began at 19:30.\n"
        "Votes: 7 yes 2 no",
        ("council is Ann Vel, born in Kelm", "3 May 2024 began at 19:30", "7 yes 2 no"),
        ("yes2",),
    ),
    Page(
        "thesis.docx",
        word(
            heading("Method")
            + paragraph("The mean of two gauges is")
            + _MEAN
            + paragraph("It holds for 3", run("4", '<w:rStyle w:val="Up"/>'), " runs; H", run("2", '<w:vertAlign w:val="subscript"/>'), "O was used."),
        ),
        "Method\nThe mean of two gauges is\na=(x+y)/2\nIt holds for 3^4 runs; H2O was used.",
        ("a=(x+y)/2", "3^4 runs", "H2O was used"),
        ("34 runs",),
    ),
    Page(
        "prices.docx",
        word(
            heading("Prices")
            + table(
                [cell("Bike"), cell("Crowns", _TWO)],
                [cell("Tern", _BEGIN), cell("city"), cell("990")],
                [cell("", _GOES_ON), cell("tour"), cell("1,450")],
                [cell("Gull", _BEGIN), cell("city"), cell("1,100")],
                [cell("", _GOES_ON), cell("tour"), cell("1,700")],
            ),
        ),
        "Prices\nBike | Crowns | Crowns\nTern | city | 990\nTern | tour | 1,450\nGull | city | 1,100\nGull | tour | 1,700",
        ("Tern | tour | 1,450", "Gull | tour | 1,700"),
    ),
    Page(
        "letter.docx",
        word(
            paragraph("Dear Mary O’Neil,")
            + paragraph(f"<w:bdo w:val='ltr'>{run('Your order 4711')}</w:bdo>", " left Kelm on 4 May.")
            + paragraph("It comes to ", _CHOICE.format(run("Click here to enter text.")), "Rell by ship.")
            + paragraph("Yours, Jean", "<w:r><w:noBreakHyphen/></w:r>", "Luc"),
        ),
        "Dear Mary O’Neil,\nYour order 4711 left Kelm on 4 May.\nIt comes to Rell by ship.\nYours, Jean‑Luc",
        ("Your order 4711 left Kelm", "It comes to Rell by ship"),
    ),
    Page(
        "form.docx",
        word(
            heading("Permit")
            + table([cell("Holder"), cell("Cy Dorn")], [cell("Boats allowed on the Arn", _TWO)], [cell("Tern"), cell("2")])
            + paragraph("Valid until ", deleted("2023"), inserted("2026"), ". Text in ", "<w:r><w:ruby><w:rt>" + run("きょうと") + "</w:rt><w:rubyBase>" + run("京都") + "</w:rubyBase></w:ruby></w:r>", "."),
        ),
        "Permit\nHolder | Cy Dorn\nBoats allowed on the Arn\nTern | 2\nValid until 2026. Text in 京都(きょうと).",
        ("Holder | Cy Dorn", "Valid until 2026", "京都"),
        ("2023",),
    ),
    Page(
        "guideline.docx",
        word(
            heading("Guideline")
            + paragraph("Dose: 5 mg for each m", raised("2"), ", at most 10", raised("3"), " units", mark(1), " a day.")
            + paragraph(deleted("Children take half."), inserted("Children take none.")),
            note(1, "Of the old scale."),
        ),
        "Guideline\nDose: 5 mg for each m^2, at most 10^3 units a day.\nChildren take none.\nOf the old scale.",
        ("each m^2, at most 10^3 units a day", "Children take none."),
        ("103", "take half", "units1"),
    ),
]  # fmt: skip
