"""Read our exports with networkx, rdflib and LlamaIndex: `python read_back.py FOLDER`; prints the facts of each."""

import csv
import json
import sys
from pathlib import Path

import networkx
import rdflib
from llama_index.core.graph_stores import SimplePropertyGraphStore
from llama_index.core.graph_stores.types import EntityNode, Relation

folder = Path(sys.argv[1])
graph = networkx.read_graphml(folder / "graph.graphml", force_multigraph=True)
names = networkx.get_node_attributes(graph, "label")
edges = [[names[source], values["predicate"], names[target]] for source, target, values in graph.edges(data=True)]

rdf = rdflib.Graph().parse(folder / "graph.nt", format="nt")
labels = {uri: str(label) for uri, label in rdf.subject_objects(rdflib.RDFS.label)}
facts = []
for subject, predicate, object_ in rdf:
    if predicate != rdflib.RDFS.label:
        facts.append([labels[subject], labels[predicate], labels[object_]])

store = SimplePropertyGraphStore()
with (folder / "graph.csv").open(newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
        ends = [EntityNode(name=row["subject"]), EntityNode(name=row["object"])]
        store.upsert_nodes(ends)
        store.upsert_relations([Relation(label=row["predicate"], source_id=ends[0].id, target_id=ends[1].id)])
relations = []
for relation in store.graph.relations.values():
    relations.append([relation.source_id, relation.label, relation.target_id])
print(json.dumps({"networkx": sorted(edges), "rdflib": sorted(facts), "llama-index-core": sorted(relations)}))
