"""Write the triples as RDF, in N-Triples and Turtle: `python rdflib_7.py FOLDER`."""

import sys
from pathlib import Path

from facts import TRIPLES, names_in
from rdflib import RDFS, XSD, Graph, Literal, URIRef

graph = Graph()
uris = {}
for triples in TRIPLES.values():
    for name in names_in(triples):
        uris.setdefault(name, URIRef(f"http://example.org/entity/Q{len(uris)}"))
for name, uri in uris.items():
    if not name[0].isdigit():
        graph.add((uri, RDFS.label, Literal(name, lang="en")))
        graph.add((uri, RDFS.label, Literal(f"{name} (de)", lang="de")))
for triples in TRIPLES.values():
    for subject, predicate, object_ in triples:
        words = predicate.split()
        property_ = "".join([words[0], *(word.title() for word in words[1:])])
        value = Literal(object_, datatype=XSD.string) if object_[0].isdigit() else uris[object_]
        graph.add((uris[subject], URIRef(f"http://example.org/property/{property_}"), value))
folder = Path(sys.argv[1])
folder.mkdir()
graph.serialize(folder / "graph.nt", format="nt", encoding="utf-8")
graph.serialize(folder / "graph.ttl", format="turtle")
