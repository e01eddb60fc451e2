#!/usr/bin/env bash
# langchain-core's `dumps`, its serialiser, writes a GraphDocument of langchain-community 0.4.2 as "not_implemented" with
# the text of `repr`, without an error; `loads` then refuses the file. The paid extraction is in it, but no program reads it.
# Expected: JSON of the document, as `model_dump_json` writes it, or an error when it is written.
#
# Seen on 29 November 2026 with Python 3.11.7, langchain-core 1.8.3 on Linux x86_64:
#     dumps: type not_implemented, fields id, lc, repr, type; loads: NotImplementedError
#     model_dump_json: fields nodes, relationships, source
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check langchain-community==0.4.2 langchain-core==1.8.3

cat > "$folder/dump.py" <<'PYTHON'
import json
import warnings

warnings.simplefilter("ignore")
from langchain_community.graphs.graph_document import GraphDocument, Node, Relationship
from langchain_core.documents import Document
from langchain_core.load import dumps, loads

ada, kelm = Node(id="Ada"), Node(id="Kelm")
graph = GraphDocument(
    nodes=[ada, kelm],
    relationships=[Relationship(source=ada, target=kelm, type="LIVES_IN")],
    source=Document(page_content="Ada lives in Kelm."),
)
written = json.loads(dumps(graph))
try:
    loads(json.dumps(written))
    outcome = "no error"
except Exception as error:
    outcome = type(error).__name__
print(f"dumps: type {written['type']}, fields {', '.join(sorted(written))}; loads: {outcome}")
print(f"model_dump_json: fields {', '.join(json.loads(graph.model_dump_json()))}")
assert written["type"] == "not_implemented" and outcome != "no error", "a GraphDocument can be dumped now"
PYTHON
"$folder/venv/bin/python" "$folder/dump.py"
