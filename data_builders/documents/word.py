"""Make of a Word file one that mammoth reads to the end: fields, formulas, numbers, and hidden or struck text.

mammoth (1.13) leaves out elements that it does not know, with their text: simple fields, formulas, text with a
direction, text boxes of drawings. It reads hidden text and the instructions of nested fields, and sees only formats of
the run itself, not those of its style. The XML of the document and of its notes is rewritten before mammoth reads it.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from tripletune.data_builders.documents.lists import WordNumbers
from tripletune.data_builders.documents.marks import formula

_TRANSITIONAL = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main"
# Parts that mammoth reads, in the folder "word" of nearly all files.
_PARTS = ("document", "footnotes", "endnotes", "document2")
_NUMBERING = "word/numbering.xml"
# Elements around text that mammoth does not know.
_WRAPPERS = frozenset({"fldSimple", "dir", "bdo", "subDoc"})
# Elements of Office's formulas with MathML's names, and their children in MathML's order.
_FORMULAS = {
    "sSup": ("msup", ("e", "sup")),
    "sSub": ("msub", ("e", "sub")),
    "sSubSup": ("msubsup", ("e", "sub", "sup")),
    "f": ("mfrac", ("num", "den")),
    "limLow": ("munder", ("e", "lim")),
    "limUpp": ("mover", ("e", "lim")),
}
_OFF = ("0", "false", "off")
# Half points by which raised text stands above the line.
_RAISED = 4
# Word's limit of columns.
_MOST_COLUMNS = 63


def readable_docx(path: Path, notes: Counter[str]) -> IO[bytes]:
    """The DOCX file as mammoth is to read it; `notes` counts hidden texts."""
    copy = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
        style_sheet = _read_xml(source, "word/styles.xml")
        styles = _Styles(style_sheet, WordNumbers(_read_xml(source, _NUMBERING), style_sheet), notes)
        for name in source.namelist():
            stem = name.removeprefix("word/").removesuffix(".xml")
            if name.startswith("word/media/") or name == _NUMBERING:
                # No image is read, and numbers are written into the paragraphs.
                continue
            if name == f"word/{stem}.xml" and stem in _PARTS:
                root = _read_xml(source, name)
                if root is not None:
                    _rewrite_part(root, styles)
                    target.writestr(name, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))
                    continue
            target.writestr(name, source.read(name))
    copy.seek(0)
    return copy


def _read_xml(archive: zipfile.ZipFile, name: str) -> Element | None:
    """The root of a file of the archive; None if the document has no such file."""
    if name not in archive.namelist():
        return None
    return ElementTree.fromstring(archive.read(name))


def _local_name(element: Element) -> str:
    """The name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def _first_child(element: Element | None, name: str) -> Element | None:
    """The first child of this local name."""
    if element is None:
        return None
    for child in element:
        if _local_name(child) == name:
            return child
    return None


def _elements_in_first_child(element: Element, name: str) -> list[Element]:
    """The elements in the first child of this local name."""
    child = _first_child(element, name)
    return [] if child is None else list(child)


def _val_attribute(element: Element | None) -> str | None:
    """The attribute `val` of an element."""
    if element is None:
        return None
    for name, value in element.attrib.items():
        if name.rpartition("}")[2] == "val":
            return value
    return None


class _Styles:
    """The formats of runs by their styles, with those that a style is based on.

    Args:
        root: The root of `word/styles.xml`; None if the file has no styles.
        numbers: The numbers of the document's paragraphs.
        notes: Counts what is met while reading.
    """

    def __init__(self, root: Element | None, numbers: WordNumbers, notes: Counter[str]) -> None:
        self.numbers = numbers
        self.notes = notes
        # The open fields of a document: whether its "instruction" or its "result" is read.
        self.fields: list[str] = []
        self._styles: dict[str, Element] = {}
        for style in root if root is not None else ():
            for name, value in style.attrib.items():
                if name.endswith("}styleId"):
                    self._styles[value] = style

    def format_of(self, name: str, *properties: Element | None) -> Element | None:
        """The format of this name in the first of a run's and a paragraph's properties that sets it."""
        for own in properties:
            if own is None:
                continue
            place = _first_child(own, "rPr") if _local_name(own) == "pPr" else own
            # The format of a paragraph's own properties is that of its mark alone.
            found = _first_child(place, name) if _local_name(own) == "rPr" else None
            if found is None:
                style = _val_attribute(_first_child(own, "rStyle" if _local_name(own) == "rPr" else "pStyle"))
                found = self._of_style(style, name)
            if found is not None:
                return found
        return None

    def _of_style(self, style: str | None, name: str) -> Element | None:
        """The format of a style, or of the nearest style that it is based on; a damaged file may name a circle."""
        seen: set[str] = set()
        while style in self._styles and style not in seen:
            seen.add(style)
            element = self._styles[style]
            found = _first_child(_first_child(element, "rPr"), name)
            if found is not None:
                return found
            style = _val_attribute(_first_child(element, "basedOn"))
        return None

    def is_on(self, name: str, *properties: Element | None) -> bool:
        """Whether a format that is on or off is on."""
        found = self.format_of(name, *properties)
        return found is not None and _val_attribute(found) not in _OFF


def _rewrite_part(root: Element, styles: _Styles) -> None:
    """Rewrite the XML of a part of a document in place; files of Word's strict format have a namespace of their own."""
    space = _STRICT if root.tag.startswith(f"{{{_STRICT}}}") else _TRANSITIONAL
    _rewrite_children(root, None, styles, space)


def _rewrite_children(parent: Element, paragraph: Element | None, styles: _Styles, space: str) -> None:
    """Rewrite the elements below one in place; `paragraph` has the properties of the paragraph around them.

    The children are replaced after the loop, since it walks over them.
    """
    children: list[Element] = []
    for child in parent:
        is_paragraph = _local_name(child) == "p"
        own = _first_child(child, "pPr") if is_paragraph else paragraph
        children += _replacement_of(child, own, styles, space)
        number = styles.numbers.take(child) if is_paragraph else ""
        if number:
            # Behind the paragraph's properties, which give it the number.
            child.insert(1, _text_run(number, space))
    parent[:] = children


def _replacement_of(element: Element, paragraph: Element | None, styles: _Styles, space: str) -> list[Element]:
    """The elements that stand for an element in mammoth's file: itself, rewritten in place, others, or none.

    What is in an element is rewritten before the element, because a wrapper is replaced by what it holds. A formula is
    the exception: `_formula_in_one_line` reads the elements that Office wrote.
    """
    name = _local_name(element)
    if name in ("oMath", "oMathPara"):
        return [_text_run(_formula_in_one_line(element), space)]
    _rewrite_children(element, paragraph, styles, space)
    if name in _WRAPPERS:
        # The properties of a wrapper have no text.
        return [inner for inner in element if not _local_name(inner).endswith("Pr")]
    if name == "ruby":
        return list(_without_ruby(element, space))
    if name == "r":
        return _replacement_of_run(element, paragraph, styles, space)
    if name == "drawing":
        return _text_boxes(element, space)
    if name == "tr":
        _keep_columns(element, space)
    if name == "altChunk":
        styles.notes["embedded documents left out"] += 1
    if name == "cr":
        return [Element(f"{{{space}}}br")]
    if name == "ptab":
        return [Element(f"{{{space}}}tab")]
    if name == "AlternateContent" and not _has_text(_first_child(element, "Fallback")):
        # mammoth reads only the fallback.
        return _elements_in_first_child(element, "Choice")
    if name == "sdt" and _first_child(_first_child(element, "sdtPr"), "showingPlcHdr") is not None:
        # A placeholder, such as "Click here to enter text."
        return []
    return [element]


def _replacement_of_run(run: Element, paragraph: Element | None, styles: _Styles, space: str) -> list[Element]:
    """A run with the formats that its styles give it, or nothing if it is an instruction or hidden."""
    if _follow_fields(run, styles.fields):
        return []
    if styles.is_on("vanish", _first_child(run, "rPr"), paragraph):
        if "".join(run.itertext()).strip():
            styles.notes["hidden texts left out"] += 1
        return []
    _copy_formats_of_styles(run, paragraph, styles, space)
    return [run]


def _copy_formats_of_styles(run: Element, paragraph: Element | None, styles: _Styles, space: str) -> None:
    """Write the formats that a run has by its styles into the run itself.

    mammoth looks only at the run's own formats. Of these, `strike` and `vertAlign` are all that `html.py` reads: struck
    text is left out there, and raised text gets its mark. A format of the run's own stays, since it overrides a style.
    """
    properties = _first_child(run, "rPr")
    if properties is None:
        properties = Element(f"{{{space}}}rPr")
        run.insert(0, properties)
    is_struck = styles.is_on("strike", properties, paragraph) or styles.is_on("dstrike", properties, paragraph)
    if is_struck and _first_child(properties, "strike") is None:
        properties.append(Element(f"{{{space}}}strike"))
    alignment = styles.format_of("vertAlign", properties, paragraph)
    raised = _val_attribute(styles.format_of("position", properties, paragraph)) or ""
    if alignment is None and raised.isdecimal() and int(raised) >= _RAISED:
        alignment = Element(f"{{{space}}}vertAlign", {f"{{{space}}}val": "superscript"})
    if alignment is not None and _first_child(properties, "vertAlign") is None:
        properties.append(alignment)


def _follow_fields(run: Element, fields: list[str]) -> bool:
    """Bring `fields` (`_Styles.fields`) up to date by the marks in a run; return whether the run is an instruction.

    Such a run belongs to the instruction of a field around it, as of a field that another one compares. The instruction
    of a field itself stays, since it may be a link.
    """
    before = fields.copy()
    has_instruction = False
    for child in run:
        name = _local_name(child)
        has_instruction = has_instruction or name == "instrText"
        if name != "fldChar":
            continue
        kind = next((value for key, value in child.attrib.items() if key.endswith("}fldCharType")), "")
        if kind == "begin":
            fields.append("instruction")
        elif fields and kind == "separate":
            fields[-1] = "result"
        elif fields and kind == "end":
            fields.pop()
    if "instruction" in before[:-1]:
        return True
    is_inside = bool(before) and before[-1] == "instruction"
    return is_inside and not has_instruction and len(fields) >= len(before) and fields[len(before) - 1] != "result"


def _has_text(element: Element | None) -> bool:
    """Whether an element holds visible characters; None has none."""
    return element is not None and bool("".join(element.itertext()).strip())


def _text_boxes(drawing: Element, space: str) -> list[Element]:
    """A drawing, or its text boxes in the form of older files, which mammoth reads."""
    boxes = [element for element in drawing.iter() if _local_name(element) == "txbxContent"]
    if not boxes:
        return [drawing]
    picture = Element(f"{{{space}}}pict")
    picture.extend(boxes)
    return [picture]


def _keep_columns(row: Element, space: str) -> None:
    """Give the columns that a row leaves out before its first cell, or merges in the form of older files, their cells.

    mammoth would move the cells behind them to other columns.
    """
    skipped = _val_attribute(_first_child(_first_child(row, "trPr"), "gridBefore"))
    if skipped and skipped.isdecimal():
        cell = Element(f"{{{space}}}tc")
        ElementTree.SubElement(cell, f"{{{space}}}p")
        first = next(number for number, child in enumerate([*row, cell]) if _local_name(child) == "tc")
        for _ in range(min(int(skipped), _MOST_COLUMNS)):
            row.insert(first, cell)
    wide: Element | None = None
    for cell in [child for child in row if _local_name(child) == "tc"]:
        merge = _first_child(_first_child(cell, "tcPr"), "hMerge")
        if merge is None or _val_attribute(merge) == "restart":
            wide = cell
        elif wide is not None:
            row.remove(cell)
            _widen_cell(wide, space)


def _widen_cell(cell: Element, space: str) -> None:
    """Let a cell span one column more, by its `gridSpan`."""
    properties = _first_child(cell, "tcPr")
    if properties is None:
        properties = Element(f"{{{space}}}tcPr")
        cell.insert(0, properties)
    span = _first_child(properties, "gridSpan")
    if span is None:
        span = ElementTree.SubElement(properties, f"{{{space}}}gridSpan", {f"{{{space}}}val": "1"})
    columns = _val_attribute(span) or "1"
    span.set(f"{{{space}}}val", str(int(columns) + 1 if columns.isdecimal() else 2))


def _without_ruby(ruby: Element, space: str) -> Iterator[Element]:
    """The characters of a ruby element, with their reading in brackets behind them."""
    yield from _elements_in_first_child(ruby, "rubyBase")
    reading = ""
    for inner in _elements_in_first_child(ruby, "rt"):
        reading += "".join(inner.itertext()).strip()
    if reading:
        yield _text_run(f"({reading})", space)


def _text_run(text: str, space: str) -> Element:
    """A run of text in the namespace of its document."""
    run = Element(f"{{{space}}}r")
    content = ElementTree.SubElement(run, f"{{{space}}}t")
    content.text = text
    return run


def _formula_in_one_line(element: Element) -> str:
    """A formula of Office in one line, written as `marks.formula` writes MathML, so that both kinds read alike.

    The first case that fits decides; an element that is not listed is the sequence of what it holds. Where Office
    leaves out a sign (a fence, the operator of `nary`), its default is written: brackets, the integral.
    """
    name = _local_name(element)
    if name in ("t", "delText"):
        return element.text or ""
    if name.endswith("Pr"):
        return ""
    if name in _FORMULAS:
        tag, order = _FORMULAS[name]
        return formula(tag, [_text_of_operand(element, part) for part in order])
    if name == "rad":
        degree = _text_of_operand(element, "deg")
        tag = "mroot" if degree else "msqrt"
        return formula(tag, [_text_of_operand(element, "e"), degree])
    if name == "nary":
        sign = _val_attribute(_first_child(_first_child(element, "naryPr"), "chr")) or "∫"
        limits = [_text_of_operand(element, "sub"), _text_of_operand(element, "sup")]
        return f"{formula('msubsup', [sign, *limits])} {_text_of_operand(element, 'e')}"
    if name == "d":
        properties = _first_child(element, "dPr")
        begin = _val_attribute(_first_child(properties, "begChr"))
        end = _val_attribute(_first_child(properties, "endChr"))
        inner = ", ".join(_formula_in_one_line(child) for child in element if _local_name(child) == "e")
        return f"{'(' if begin is None else begin}{inner}{')' if end is None else end}"
    if name == "func":
        return f"{_text_of_operand(element, 'fName')} {_text_of_operand(element, 'e')}"
    if name == "sPre":
        return (
            f" ^{_text_of_operand(element, 'sup')}_{_text_of_operand(element, 'sub')}{_text_of_operand(element, 'e')}"
        )
    if name == "m":
        return f"[{' '.join(_formula_in_one_line(child) for child in element).strip('; ')}]"
    if name in ("mr", "eqArr"):
        return formula("mtr", [_formula_in_one_line(child) for child in element])
    if name == "del":
        return ""
    return "".join(_formula_in_one_line(child) for child in element)


def _text_of_operand(element: Element, name: str) -> str:
    """The text of a part of a formula; "" if the formula lacks it."""
    child = _first_child(element, name)
    if child is None:
        return ""
    return _formula_in_one_line(child).strip()
