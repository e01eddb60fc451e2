#!/usr/bin/env bash
# lightrag-hku 1.5.7 stores relations in an undirected graph, one per pair of names: of the replies "Ida Morn wrote Glass
# Harbour" and "Glass Harbour written by Ida Morn" one edge stays, with the keywords "written by,wrote", and "Ida Morn
# born in Velsund" is an edge from Velsund to Ida Morn. Nothing in the GraphML says who did what. Expected: the direction
# of the reply. The cached replies (kv_store_llm_response_cache.json) have it.
#
# Seen on 29 November 2026 with Python 3.11.7 on Linux x86_64:
#     3 relations in the replies, 2 edges: Ida Morn -- written by,wrote -- Glass Harbour; Velsund -- born in -- Ida Morn
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lightrag-hku==1.5.7

cat > "$folder/build.py" <<'PYTHON'
import asyncio
import sys

import networkx as nx
import numpy as np
from lightrag import LightRAG
from lightrag.utils import EmbeddingFunc, Tokenizer

REPLIES = {
    "Velsund lies": ["Velsund<|#|>Ida Morn"],
    "Ida Morn wrote": ["Ida Morn<|#|>Glass Harbour<|#|>wrote", "Ida Morn<|#|>Velsund<|#|>born in"],
    "Glass Harbour is": ["Glass Harbour<|#|>Ida Morn<|#|>written by"],
}
TEXTS = ["Velsund lies on a river.", "Ida Morn wrote Glass Harbour. She was born in Velsund.", "Glass Harbour is by Ida Morn."]


class Characters:
    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


async def reply(prompt, system_prompt=None, history_messages=(), **options):
    if history_messages:
        return "<|COMPLETE|>"
    for beginning, relations in REPLIES.items():
        if beginning in prompt:
            names = dict.fromkeys(name for row in relations for name in row.split("<|#|>")[:2])
            rows = [f"entity<|#|>{name}<|#|>other<|#|>{name} is named." for name in names]
            rows += [f"relation<|#|>{row}<|#|>It says so." for row in relations if row.count("<|#|>") == 2]
            return "\n".join([*rows, "<|COMPLETE|>"])
    return ""


async def embed(texts):
    return np.ones((len(texts), 4), dtype="float32")


async def main():
    rag = LightRAG(
        working_dir=sys.argv[1],
        llm_model_func=reply,
        embedding_func=EmbeddingFunc(embedding_dim=4, max_token_size=99, func=embed, model_name="fake"),
        tokenizer=Tokenizer("characters", Characters()),
    )
    await rag.initialize_storages()
    await rag.ainsert(TEXTS, file_paths=["a.txt", "b.txt", "c.txt"])
    await rag.finalize_storages()


asyncio.run(main())
graph = nx.read_graphml(f"{sys.argv[1]}/graph_chunk_entity_relation.graphml")
edges = sorted(f"{source} -- {values['keywords']} -- {target}" for source, target, values in graph.edges(data=True))
print(f"3 relations in the replies, {len(edges)} edges: {'; '.join(edges)}", file=sys.stdout)
assert not graph.is_directed() and len(edges) == 2, "LightRAG's graph has directions or both relations now"
PYTHON
"$folder/venv/bin/python" "$folder/build.py" "$folder/rag" 2>/dev/null | grep "relations in the replies"
