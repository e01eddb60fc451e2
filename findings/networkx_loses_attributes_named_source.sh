#!/usr/bin/env bash
# networkx 3.6.1 writes graphs to node-link JSON, GML and Cytoscape JSON without a word about attributes whose names the
# format uses itself. The edge of a triple with `source="passage 7"` loses its passage (node-link and GML drop it; in
# Cytoscape JSON it becomes the subject), and a node's `id`, such as one of Wikidata, is dropped by the first two. In
# Cytoscape JSON it replaces the node's own, so edges lead to a node that the file does not have. The docstring of
# node_link_data says that node and edge attributes are stored, and its error about names that are not unique compares
# the options alone. Expected: the attributes, or an error. GraphML keeps both here.
#
# Seen on 1 December 2026 with Python 3.11 on Linux x86_64:
#     node-link: passage None, id None
#     gml:       passage None, id None
#     cytoscape: passage Ida Morn, id Q1; nodes ['Q1', 'Velsund'], edge from Ida Morn
#     graphml:   passage passage 7, id Q1
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "networkx==3.6.1"

cat > "$folder/formats.py" <<'PYTHON'
import sys

import networkx as nx

graph = nx.DiGraph()
graph.add_node("Ida Morn", id="Q1")
graph.add_edge("Ida Morn", "Velsund", predicate="born in", source="passage 7")


def kept(read):
    """The edge's `source` and the node's `id` in a graph that was read back."""
    return read.edges["Ida Morn", "Velsund"].get("source"), read.nodes["Ida Morn"].get("id")


nx.write_gml(graph, f"{sys.argv[1]}/graph.gml")
nx.write_graphml(graph, f"{sys.argv[1]}/graph.graphml")
cytoscape = nx.cytoscape_data(graph)
nodes = [node["data"]["id"] for node in cytoscape["elements"]["nodes"]]
start = cytoscape["elements"]["edges"][0]["data"]["source"]
link = kept(nx.node_link_graph(nx.node_link_data(graph)))
gml = kept(nx.read_gml(f"{sys.argv[1]}/graph.gml"))
loop = kept(nx.cytoscape_graph(cytoscape))
graphml = kept(nx.read_graphml(f"{sys.argv[1]}/graph.graphml"))
print(f"node-link: passage {link[0]}, id {link[1]}")
print(f"gml:       passage {gml[0]}, id {gml[1]}")
print(f"cytoscape: passage {loop[0]}, id {loop[1]}; nodes {nodes}, edge from {start}")
print(f"graphml:   passage {graphml[0]}, id {graphml[1]}")
assert link == gml == (None, None), "changed: node-link or GML keeps the attributes"
assert loop[0] == "Ida Morn" and start not in nodes, "changed: Cytoscape JSON keeps the attributes"
assert graphml == ("passage 7", "Q1"), "changed: GraphML no longer keeps them"
PYTHON
"$folder/venv/bin/python" "$folder/formats.py" "$folder"
