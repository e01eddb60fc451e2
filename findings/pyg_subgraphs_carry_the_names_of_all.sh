#!/usr/bin/env bash
# torch_geometric.llm's get_features_for_triplets_groups gives one Data per group of triples, with features of the group's
# nodes and edges. But `pid` and `e_pid`, the names of nodes and edges, are in every Data the names of all groups: a list
# of lists, in which the group's place has to be known. Names by node index are wrong, and memory and files grow with the
# square of the number of questions. Expected: as many names as nodes.
#
# Seen on 30 November 2026 with Python 3.11.7 and torch 2.13.0 on Linux x86_64, torch_geometric 2.8.1:
#     2 nodes, pid [['Dune', 'Herbert'], ['Rome', 'Italy', 'Oslo', 'Norway']]
#     4 nodes, pid [['Dune', 'Herbert'], ['Rome', 'Italy', 'Oslo', 'Norway']]
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "torch_geometric==2.8.1"

cat > "$folder/names.py" <<'PYTHON'
import torch
from torch_geometric.llm.large_graph_indexer import LargeGraphIndexer, get_features_for_triplets_groups

GROUPS = [
    [("Dune", "author", "Herbert")],
    [("Rome", "capital of", "Italy"), ("Oslo", "capital of", "Norway")],
]
indexer = LargeGraphIndexer.from_triplets(GROUPS[0] + GROUPS[1])
indexer.add_node_feature("x", torch.arange(6.0)[:, None])
indexer.add_edge_feature("edge_attr", torch.arange(3.0)[:, None])
graphs = list(get_features_for_triplets_groups(indexer, GROUPS, num_workers=1))
for graph in graphs:
    print(f"{graph.num_nodes} nodes, pid {graph.pid}")
print("all" if graphs[0].pid == graphs[1].pid and len(graphs[0].e_pid) == 2 else "own")
PYTHON

seen=$("$folder/venv/bin/python" -W ignore "$folder/names.py" 2> /dev/null)
echo "$seen"
if [ "$(tail -1 <<< "$seen")" != all ]; then
    echo "changed: each graph has its own names"
    exit 1
fi
