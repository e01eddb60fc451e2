#!/usr/bin/env bash
# torch_geometric.llm.models.TXT2KG.add_doc_2_KG with a pair of question and answer that is there already prints
# "Skipping...", but calls the model again and replaces the earlier triples with those of the second text: several
# documents of one question, as in HotpotQA, leave the last one's triples alone. Expected: skipped as it says, or added.
#
# Seen on 30 November 2026 with Python 3.11.7 and torch 2.13.0 on Linux x86_64, torch_geometric 2.8.1:
#     printed "Skipping...", 2 calls of the model
#     kept [('Ida Morn', 'born in', 'Velsund'), ('Velsund', 'lies in', 'Torren')]
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "torch_geometric==2.8.1"

cat > "$folder/documents.py" <<'PYTHON'
import contextlib
import io

from torch_geometric.llm.models import TXT2KG

REPLIES = {
    "Glass Harbour is a novel.": "('Glass Harbour', 'author', 'Ida Morn')\n('Glass Harbour', 'is', 'novel')",
    "Ida Morn was born in Velsund.": "('Ida Morn', 'born in', 'Velsund')\n('Velsund', 'lies in', 'Torren')",
}
asked = []


def reply(text):
    """What the model replies to a passage."""
    asked.append(text)
    return REPLIES[text]


graph = TXT2KG(local_LM=True)
graph._chunk_to_triples_str_local = reply
pair = ("Where was the author of Glass Harbour born?", "Velsund")
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    for text in REPLIES:
        graph.add_doc_2_KG(text, QA_pair=pair)
print(f'printed "{printed.getvalue().splitlines()[-1]}", {len(asked)} calls of the model')
print("kept", graph.relevant_triples[pair])
has_replaced = graph.relevant_triples[pair][0][0] == "Ida Morn" and "Skipping" in printed.getvalue()
print("replaced" if has_replaced else "skipped")
PYTHON

seen=$("$folder/venv/bin/python" -W ignore "$folder/documents.py" 2> /dev/null)
echo "$seen"
if [ "$(tail -1 <<< "$seen")" != replaced ]; then
    echo "changed: the first text's triples are kept"
    exit 1
fi
