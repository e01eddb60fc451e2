#!/usr/bin/env bash
# rdflib 7.6.0 rewrites typed literals while it reads: "007"^^xsd:integer becomes 7.
# A code or a phone number that a publisher typed as a number loses its zeros,
# and a file that is read and written again is another file. Expected: the text of the file; the value as a value.
# `rdflib.NORMALIZE_LITERALS = False` before reading keeps the text.
#
# Seen on 29 November 2026 with Python 3.11.7 on Linux x86_64:
#     default: 7; NORMALIZE_LITERALS = False: 007
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check rdflib==7.6.0

cat > "$folder/read.py" <<'PYTHON'
import rdflib

LINE = '<urn:a> <urn:code> "007"^^<http://www.w3.org/2001/XMLSchema#integer> .'


def code():
    (value,) = rdflib.Graph().parse(data=LINE, format="nt").objects()
    return str(value)


default = code()
rdflib.NORMALIZE_LITERALS = False
kept = code()
print(f"default: {default}; NORMALIZE_LITERALS = False: {kept}")
assert (default, kept) == ("7", "007"), "rdflib reads literals otherwise now"
PYTHON
"$folder/venv/bin/python" "$folder/read.py"
