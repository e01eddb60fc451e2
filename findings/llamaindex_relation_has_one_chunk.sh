#!/usr/bin/env bash
# llama-index-core 0.14.25: the property graph store knows each relation once, under subject, label and object, with the
# chunk that stated it first (`triplet_source_id`). Two chunks that state the same fact leave one relation and no trace of
# the second chunk, so a retriever that goes from relations to their chunks misses it. Expected: both chunks.
#
# Seen on 29 November 2026 with Python 3.11.7 on Linux x86_64:
#     2 chunks state the fact, 1 relation, of the chunk: "Velsund lies in Norway."
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llama-index-core==0.14.25

cat > "$folder/build.py" <<'PYTHON'
from llama_index.core import Document, PropertyGraphIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.indices.property_graph import SimpleLLMPathExtractor
from llama_index.core.llms import MockLLM


def parse(reply):
    return [("Velsund", "lies in", "Norway")]


texts = ["Velsund lies in Norway.", "Again: Velsund lies in Norway."]
index = PropertyGraphIndex.from_documents(
    [Document(text=text) for text in texts],
    llm=MockLLM(),
    embed_model=MockEmbedding(4),
    embed_kg_nodes=False,
    kg_extractors=[SimpleLLMPathExtractor(llm=MockLLM(), parse_fn=parse, num_workers=1)],
)
graph = index.property_graph_store.graph
(relation,) = graph.relations.values()
chunk = graph.nodes[relation.properties["triplet_source_id"]]
print(f'2 chunks state the fact, {len(graph.relations)} relation, of the chunk: "{chunk.text}"')
assert len(graph.relations) == 1 and chunk.text == texts[0], "another chunk is kept now"
PYTHON
"$folder/venv/bin/python" "$folder/build.py"
