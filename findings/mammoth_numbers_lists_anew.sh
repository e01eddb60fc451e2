#!/usr/bin/env bash
# mammoth 1.13.0 makes a new <ol> after each paragraph without a number, although the paragraphs belong to one list of
# Word (one w:numId), which goes on counting: Word shows "a) b) note c)", the HTML shows 1, 2, note, 1. The form of the
# numbers (letters here) is lost, too, and no message says so. So a reference in the text ("see item c") leads nowhere or
# to another item. Expected: start="3" and type="a", or at least a message.
#
# Seen on 30 November 2026 with Python 3.11 on Linux x86_64:
#     html: <ol><li>Doors</li><li>Locks</li></ol><p>Note.</p><ol><li>Keys</li></ol>, messages: []
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "mammoth==1.13.0" "python-docx==1.2.0"

cat > "$folder/read.py" <<'PYTHON'
import sys

import docx
import mammoth
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls

document = docx.Document()
numbering = document.part.numbering_part.element
abstract = parse_xml(
    f'<w:abstractNum {nsdecls("w")} w:abstractNumId="77"><w:multiLevelType w:val="singleLevel"/><w:lvl w:ilvl="0">'
    '<w:start w:val="1"/><w:numFmt w:val="lowerLetter"/><w:lvlText w:val="%1)"/></w:lvl></w:abstractNum>'
)
# The schema wants all w:abstractNum before the first w:num.
numbering.insert(0, abstract)
numbering.append(parse_xml(f'<w:num {nsdecls("w")} w:numId="77"><w:abstractNumId w:val="77"/></w:num>'))
for text, has_number in (("Doors", True), ("Locks", True), ("Note.", False), ("Keys", True)):
    paragraph = document.add_paragraph(text)
    if has_number:
        properties = paragraph._p.get_or_add_pPr()
        properties.append(
            parse_xml(f'<w:numPr {nsdecls("w")}><w:ilvl w:val="0"/><w:numId w:val="77"/></w:numPr>')
        )
document.save(sys.argv[1])

with open(sys.argv[1], "rb") as file:
    read = mammoth.convert_to_html(file)
messages = [message.message for message in read.messages]
print(f"html: {read.value}, messages: {messages}")
expected = "<ol><li>Doors</li><li>Locks</li></ol><p>Note.</p><ol><li>Keys</li></ol>"
assert read.value == expected and not messages, "mammoth numbers lists otherwise now"
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder/page.docx"
