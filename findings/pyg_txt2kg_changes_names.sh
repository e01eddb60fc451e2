#!/usr/bin/env bash
# torch_geometric.llm.models.TXT2KG asks a model for triples ('entity', 'relation', 'entity') and reads the reply:
# - A reply of one triple on one line keeps its quotation marks, and one of several lines loses them. So one entity has two
#   names, and the graph two nodes, depending on how much its passage said.
# - Of several lines, brackets and apostrophes are deleted inside names, too, and a name with a comma loses its triple.
# - A part before a space is lower-cased, the others are not.
# Nothing is counted or warned of. Expected: the names as the model wrote them.
#
# Seen on 30 November 2026 with Python 3.11.7 and torch 2.13.0 on Linux x86_64, torch_geometric 2.8.1:
#     one triple  [("'Paris'", "'capital of'", "'France'")]
#     two triples [('Paris', 'capital of', 'France'), ('Lyon', 'lies in', 'France')]
#     names       [('Mercury planet', 'orbits', 'Sun'), ('"Miles ONeal"', 'plays for', 'Hull')]
#     spaces      [('nasa', 'launched', 'Apollo 11'), ('NASA', 'built', 'Skylab')]
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "torch_geometric==2.8.1"

cat > "$folder/names.py" <<'PYTHON'
from torch_geometric.llm.models import TXT2KG


def triples_of(*lines):
    """The triples that are read from a model's reply."""
    graph = TXT2KG(local_LM=True)
    graph._chunk_to_triples_str_local = lambda text: "\n".join(lines)
    graph.add_doc_2_KG("A passage.")
    return graph.relevant_triples[0]


one = triples_of("('Paris', 'capital of', 'France')")
two = triples_of("('Paris', 'capital of', 'France')", "('Lyon', 'lies in', 'France')")
names = triples_of(
    "('Mercury (planet)', 'orbits', 'Sun')",
    "(\"Miles O'Neal\", 'plays for', 'Hull')",
    "('Paris, Texas', 'lies in', 'Texas')",
)
spaces = triples_of("('NASA ', 'launched', 'Apollo 11')", "('NASA', 'built', 'Skylab')")
print("one triple ", one)
print("two triples", two)
print("names      ", names)
print("spaces     ", spaces)
changed = one[0][0] == "'Paris'" and two[0][0] == "Paris" and len(names) == 2 and names[0][0] == "Mercury planet"
print("changed" if changed and spaces[0][0] != spaces[1][0] else "kept")
PYTHON

seen=$("$folder/venv/bin/python" -W ignore "$folder/names.py" 2> /dev/null)
echo "$seen"
if [ "$(tail -1 <<< "$seen")" != changed ]; then
    echo "changed: names are kept"
    exit 1
fi
