"""Make of a Word file one that mammoth reads to the end: fields, formulas, readings, and hidden or struck text.

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

from tripletune.data_builders.documents.marks import formula

_TRANSITIONAL = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main"
# Parts that mammoth reads, in the folder "word" of nearly all files.
_PARTS = ("document", "footnotes", "endnotes", "document2")
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
        styles = _Styles(_read(source, "word/styles.xml"), notes)
        for name in source.namelist():
            stem = name.removeprefix("word/").removesuffix(".xml")
            if name.startswith("word/media/"):
                # No image is read.
                continue
            if name == f"word/{stem}.xml" and stem in _PARTS:
                root = _read(source, name)
                if root is not None:
                    _rewrite(root, styles)
                    target.writestr(name, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))
                    continue
            target.writestr(name, source.read(name))
    copy.seek(0)
    return copy


def _read(archive: zipfile.ZipFile, name: str) -> Element | None:
    """The root of a file of the archive; None if the document has no such file."""
    if name not in archive.namelist():
        return None
    return ElementTree.fromstring(archive.read(name))


def _local(element: Element) -> str:
    """The name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def _child(element: Element | None, name: str) -> Element | None:
    """The first child of this local name."""
    if element is None:
        return None
    for child in element:
        if _local(child) == name:
            return child
    return None


def _children(element: Element, name: str) -> list[Element]:
    """The elements in the first child of this local name."""
    child = _child(element, name)
    return [] if child is None else list(child)


def _value(element: Element | None) -> str | None:
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
        notes: Counts what is met while reading.
    """

    def __init__(self, root: Element | None, notes: Counter[str]) -> None:
        self.notes = notes
        # The open fields of a document: whether its "instruction" or its "result" is read.
        self.fields: list[str] = []
        self._styles: dict[str, Element] = {}
        for style in root if root is not None else ():
            for name, value in style.attrib.items():
                if name.endswith("}styleId"):
                    self._styles[value] = style

    def find(self, name: str, *properties: Element | None) -> Element | None:
        """The format of this name in the first of a run's and a paragraph's properties that sets it."""
        for own in properties:
            if own is None:
                continue
            place = _child(own, "rPr") if _local(own) == "pPr" else own
            # The format of a paragraph's own properties is that of its mark alone.
            found = _child(place, name) if _local(own) == "rPr" else None
            if found is None:
                style = _value(_child(own, "rStyle" if _local(own) == "rPr" else "pStyle"))
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
            found = _child(_child(element, "rPr"), name)
            if found is not None:
                return found
            style = _value(_child(element, "basedOn"))
        return None

    def is_on(self, name: str, *properties: Element | None) -> bool:
        """Whether a format that is on or off is on."""
        found = self.find(name, *properties)
        return found is not None and _value(found) not in _OFF


def _rewrite(root: Element, styles: _Styles) -> None:
    """Rewrite a part of a document."""
    space = _STRICT if root.tag.startswith(f"{{{_STRICT}}}") else _TRANSITIONAL
    _rewrite_children(root, None, styles, space)


def _rewrite_children(parent: Element, paragraph: Element | None, styles: _Styles, space: str) -> None:
    """Rewrite the elements below one, inside the paragraph with these properties.

    The children are replaced after the loop, since it walks over them.
    """
    children: list[Element] = []
    for child in parent:
        own = _child(child, "pPr") if _local(child) == "p" else paragraph
        children += _rewritten(child, own, styles, space)
    parent[:] = children


def _rewritten(element: Element, paragraph: Element | None, styles: _Styles, space: str) -> list[Element]:
    """The elements that stand for an element in mammoth's file: itself, others, or none.

    What is in an element is rewritten before the element, because a wrapper is replaced by what it holds. A formula is
    the exception: `_linear` reads the elements that Office wrote.
    """
    name = _local(element)
    if name in ("oMath", "oMathPara"):
        return [_run(_linear(element), space)]
    _rewrite_children(element, paragraph, styles, space)
    if name in _WRAPPERS:
        # The properties of a wrapper have no text.
        return [inner for inner in element if not _local(inner).endswith("Pr")]
    if name == "ruby":
        return list(_without_ruby(element, space))
    if name == "r" and (_is_instruction(element, styles.fields) or not _is_shown(element, paragraph, styles, space)):
        return []
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
    if name == "AlternateContent" and not _has_text(_child(element, "Fallback")):
        # mammoth reads only the fallback.
        return _children(element, "Choice")
    if name == "sdt" and _child(_child(element, "sdtPr"), "showingPlcHdr") is not None:
        # A placeholder, such as "Click here to enter text."
        return []
    return [element]


def _is_shown(run: Element, paragraph: Element | None, styles: _Styles, space: str) -> bool:
    """Whether a run is seen; the formats that its styles give it become its own.

    mammoth looks only at the run's own formats. Of these, `strike` and `vertAlign` are all that `html.py` reads: struck
    text is left out there, and raised text gets its mark. A format of the run's own stays, since it overrides a style.
    """
    properties = _child(run, "rPr")
    if styles.is_on("vanish", properties, paragraph):
        if "".join(run.itertext()).strip():
            styles.notes["hidden texts left out"] += 1
        return False
    if properties is None:
        properties = Element(f"{{{space}}}rPr")
        run.insert(0, properties)
    is_struck = styles.is_on("strike", properties, paragraph) or styles.is_on("dstrike", properties, paragraph)
    if is_struck and _child(properties, "strike") is None:
        properties.append(Element(f"{{{space}}}strike"))
    alignment = styles.find("vertAlign", properties, paragraph)
    raised = _value(styles.find("position", properties, paragraph)) or ""
    if alignment is None and raised.isdecimal() and int(raised) >= _RAISED:
        alignment = Element(f"{{{space}}}vertAlign", {f"{{{space}}}val": "superscript"})
    if alignment is not None and _child(properties, "vertAlign") is None:
        properties.append(alignment)
    return True


def _is_instruction(run: Element, fields: list[str]) -> bool:
    """Whether a run belongs to the instruction of a field around it, such as a field that another one compares.

    The run's own marks of fields change `fields`. The instruction of a field itself stays, since it may be a link.
    """
    before = fields.copy()
    has_instruction = False
    for child in run:
        name = _local(child)
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
    return element is not None and bool("".join(element.itertext()).strip())


def _text_boxes(drawing: Element, space: str) -> list[Element]:
    """A drawing, or its text boxes in the form of older files, which mammoth reads."""
    boxes = [element for element in drawing.iter() if _local(element) == "txbxContent"]
    if not boxes:
        return [drawing]
    picture = Element(f"{{{space}}}pict")
    picture.extend(boxes)
    return [picture]


def _keep_columns(row: Element, space: str) -> None:
    """Give the columns that a row leaves out before its first cell, or merges in the form of older files, their cells.

    mammoth would move the cells behind them to other columns.
    """
    skipped = _value(_child(_child(row, "trPr"), "gridBefore"))
    if skipped and skipped.isdecimal():
        cell = Element(f"{{{space}}}tc")
        ElementTree.SubElement(cell, f"{{{space}}}p")
        first = next(number for number, child in enumerate([*row, cell]) if _local(child) == "tc")
        for _ in range(min(int(skipped), _MOST_COLUMNS)):
            row.insert(first, cell)
    wide: Element | None = None
    for cell in [child for child in row if _local(child) == "tc"]:
        merge = _child(_child(cell, "tcPr"), "hMerge")
        if merge is None or _value(merge) == "restart":
            wide = cell
        elif wide is not None:
            row.remove(cell)
            _widen(wide, space)


def _widen(cell: Element, space: str) -> None:
    """Let a cell span one column more."""
    properties = _child(cell, "tcPr")
    if properties is None:
        properties = Element(f"{{{space}}}tcPr")
        cell.insert(0, properties)
    span = _child(properties, "gridSpan")
    if span is None:
        span = ElementTree.SubElement(properties, f"{{{space}}}gridSpan", {f"{{{space}}}val": "1"})
    columns = _value(span) or "1"
    span.set(f"{{{space}}}val", str(int(columns) + 1 if columns.isdecimal() else 2))


def _without_ruby(ruby: Element, space: str) -> Iterator[Element]:
    """The characters of a ruby element, with their reading in brackets behind them."""
    yield from _children(ruby, "rubyBase")
    reading = ""
    for inner in _children(ruby, "rt"):
        reading += "".join(inner.itertext()).strip()
    if reading:
        yield _run(f"({reading})", space)


def _run(text: str, space: str) -> Element:
    """A run of text in the namespace of its document."""
    run = Element(f"{{{space}}}r")
    content = ElementTree.SubElement(run, f"{{{space}}}t")
    content.text = text
    return run


def _linear(element: Element) -> str:
    """A formula of Office in one line, written as `marks.formula` writes MathML, so that both kinds read alike.

    The first case that fits decides; an element that is not listed is the sequence of what it holds. Where Office
    leaves out a sign (a fence, the operator of `nary`), its default is written: brackets, the integral.
    """
    name = _local(element)
    if name in ("t", "delText"):
        return element.text or ""
    if name.endswith("Pr"):
        return ""
    if name in _FORMULAS:
        tag, order = _FORMULAS[name]
        return formula(tag, [_part(element, part) for part in order])
    if name == "rad":
        degree = _part(element, "deg")
        tag = "mroot" if degree else "msqrt"
        return formula(tag, [_part(element, "e"), degree])
    if name == "nary":
        sign = _value(_child(_child(element, "naryPr"), "chr")) or "∫"
        return f"{formula('msubsup', [sign, _part(element, 'sub'), _part(element, 'sup')])} {_part(element, 'e')}"
    if name == "d":
        properties = _child(element, "dPr")
        begin = _value(_child(properties, "begChr"))
        end = _value(_child(properties, "endChr"))
        inner = ", ".join(_linear(child) for child in element if _local(child) == "e")
        return f"{'(' if begin is None else begin}{inner}{')' if end is None else end}"
    if name == "func":
        return f"{_part(element, 'fName')} {_part(element, 'e')}"
    if name == "sPre":
        return f" ^{_part(element, 'sup')}_{_part(element, 'sub')}{_part(element, 'e')}"
    if name == "m":
        return f"[{' '.join(_linear(child) for child in element).strip('; ')}]"
    if name in ("mr", "eqArr"):
        return formula("mtr", [_linear(child) for child in element])
    if name == "del":
        return ""
    return "".join(_linear(child) for child in element)


def _part(element: Element, name: str) -> str:
    """The text of a part of a formula; "" if the formula lacks it."""
    child = _child(element, name)
    if child is None:
        return ""
    return _linear(child).strip()
