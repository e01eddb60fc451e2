#!/usr/bin/env bash
# json-repair 0.64.6 takes JSON values that follow one another without a comma for versions of one value if they have
# the same form (the same keys and types, or lists of the same length and types), and returns the last alone. So of a
# model's reply of one triple per line, numbered or in code fences, one triple is left, and the result is no longer a
# list. With commas, or if a line has another key, all are returned. Its README does not say so, and nothing is raised
# unless `strict=True`, which refuses several values altogether. Expected: a list of all, as with commas.
#
# Seen on 1 December 2026 with Python 3.11 on Linux x86_64:
#     lines of objects: {'subject': 'Oslo', 'object': 'Norway'}
#     lines of lists:   ['Oslo', 'lies in', 'Norway']
#     with commas:      [{'subject': 'Dune', 'object': 'Herbert'}, {'subject': 'Oslo', 'object': 'Norway'}]
#     other keys:       [{'subject': 'Dune', 'object': 'Herbert'}, {'city': 'Oslo'}]
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "json-repair==0.64.6"

cat > "$folder/lines.py" <<'PYTHON'
import json

import json_repair

OBJECTS = [{"subject": "Dune", "object": "Herbert"}, {"subject": "Oslo", "object": "Norway"}]
LISTS = [["Dune", "author", "Herbert"], ["Oslo", "lies in", "Norway"]]


def read(values, between="\n"):
    return json_repair.loads(between.join(json.dumps(value) for value in values))


print("lines of objects:", read(OBJECTS))
print("lines of lists:  ", read(LISTS))
print("with commas:     ", read(OBJECTS, ",\n"))
print("other keys:      ", read([OBJECTS[0], {"city": "Oslo"}]))
assert read(OBJECTS) == OBJECTS[1] and read(LISTS) == LISTS[1], "changed: more than the last line is kept"
assert read(OBJECTS, ",\n") == OBJECTS, "changed: commas no longer help"
PYTHON
"$folder/venv/bin/python" "$folder/lines.py"
