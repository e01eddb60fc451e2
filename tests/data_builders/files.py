"""Small files of documents, made without their libraries: PDF with an outline, DOCX."""

import io
import zipfile
from html import escape


def pdf(pages, outline=(), extra=""):
    """A PDF of these lines of text by page; `outline` has (title, page from 0), `extra` goes into the trailer."""
    bodies = {1: "", 2: "", 3: "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"}
    kids = []
    for lines in pages:
        number = len(bodies) + 1
        shown = " ".join(f"({line}) Tj T*".replace("\\", "\\\\") for line in lines)
        stream = f"BT /F1 12 Tf 72 720 Td 14 TL {shown} ET"
        bodies[number] = (
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {number + 1} 0 R >>"
        )
        bodies[number + 1] = f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream"
        kids.append(number)
    bodies[2] = f"<< /Type /Pages /Kids [{' '.join(f'{kid} 0 R' for kid in kids)}] /Count {len(kids)} >>"
    root = len(bodies) + 1
    marks = [root + 1 + n for n in range(len(outline))]
    links = ""
    for place, (title, page) in enumerate(outline):
        links = f"/Next {marks[place + 1]} 0 R" if place + 1 < len(outline) else ""
        bodies[marks[place]] = f"<< /Title ({title}) /Parent {root} 0 R {links} /Dest [{kids[page]} 0 R /Fit] >>"
    first_last = f"/First {marks[0]} 0 R /Last {marks[-1]} 0 R" if marks else ""
    bodies[root] = f"<< /Type /Outlines {first_last} /Count {len(marks)} >>"
    bodies[1] = f"<< /Type /Catalog /Pages 2 0 R /Outlines {root} 0 R >>"
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number in sorted(bodies):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{bodies[number]}\nendobj\n".encode("cp1252")
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(bodies) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R {extra}>>\n"
    return bytes(out) + f"{end}startxref\n{len(out)}\n%%EOF\n".encode()


# No password opens it.
LOCKED = f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'00' * 32}> /U <{'00' * 32}> >> /ID [<00> <00>] "


def docx(paragraphs):
    """A DOCX file of (style, text) pairs; "Heading1" is the id of a style of that name, rows of cells are a table."""
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    styles = sorted({style for style, _ in paragraphs})

    def content(style, text):
        if isinstance(text, str):
            return f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr><w:r><w:t>{escape(text)}</w:t></w:r></w:p>'
        rows = ("".join(f"<w:tc>{content(style, cell)}</w:tc>" for cell in row) for row in text)
        return f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in rows)}</w:tbl>"

    body = "".join(content(style, text) for style, text in paragraphs)
    named = "".join(
        f'<w:style w:type="paragraph" w:styleId="{style}"><w:name w:val="{style.replace("Heading", "heading ")}"/>'
        "</w:style>"
        for style in styles
    )
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/word/document.xml" ContentType="{kind}.document.main+xml"/>'
        f'<Override PartName="/word/styles.xml" ContentType="{kind}.styles+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{office}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/_rels/document.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{office}/styles" Target="styles.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{word}"><w:body>{body}</w:body></w:document>',
        "word/styles.xml": f'<w:styles xmlns:w="{word}">{named}</w:styles>',
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        # A fixed date: the bytes are the name of a test, which all processes of a test run must agree on.
        for name, text in parts.items():
            packed.writestr(zipfile.ZipInfo(name), '<?xml version="1.0" encoding="UTF-8"?>' + text)
    return file.getvalue()


def drawn_pdf(pages, information=""):
    """A PDF of pages of texts at their places, (x, y, size, text) and perhaps "bold"; `information` is its metadata."""

    def shown(text):
        return text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")

    kids = " ".join(f"{5 + 2 * number} 0 R" for number in range(len(pages)))
    bodies = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        f"<< {information} >>",
    ]
    for number, texts in enumerate(pages):
        drawn = ""
        for x, y, size, text, *bold in texts:
            drawn += f"/F{2 if bold else 1} {size} Tf 1 0 0 1 {x} {y} Tm ({shown(text)}) Tj "
        stream = f"BT {drawn} ET"
        bodies.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R "
            "/F2 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica-Bold /Encoding /WinAnsiEncoding >> >> >> "
            f"/Contents {6 + 2 * number} 0 R >>"
        )
        bodies.append(f"<< /Length {len(stream.encode('cp1252'))} >>\nstream\n{stream}\nendstream")
    out = bytearray(b"%PDF-1.4\n")
    table = ""
    for number, body in enumerate(bodies, 1):
        table += f"{len(out):010} 00000 n \n"
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("cp1252")
    size = len(bodies) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R /Info 4 0 R >>\n"
    return bytes(out) + f"{end}startxref\n{len(out)}\n%%EOF\n".encode()
