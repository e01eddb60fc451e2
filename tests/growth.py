"""An index whose corpus grows from 100,000 passages by 1,000: seconds, texts embedded, rankings beside a fresh build's.

`python tests/growth.py`; some minutes, with a stub encoder that counts.
"""

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from zlib import crc32

import numpy as np

from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.retrievers import open_retriever

KINDS = ("bm25", "dense", "hybrid")
asked = []


def encode(texts, kind):
    """Vectors (texts, 384) of word counts; texts of the corpus, which are not queries, are noted in `asked`."""
    asked.extend(texts if kind == "text" else [])
    words = [[crc32(word.encode()) % 384 for word in text.split()] for text in texts]
    return np.stack([np.bincount(one, minlength=384) for one in words])


def main():
    """Build each kind of index twice, grown and fresh, and print times and whether the rankings are equal."""
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(20000)}" for _ in range(60)) for _ in range(101_000)]
    embedder, found = Embedder("counting", encode), {}
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch, "corpus.jsonl")
        for name, count in (("index", 100_000), ("index", 101_000), ("fresh", 101_000)):
            corpus.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts[:count]))
            for kind in KINDS:
                asked.clear()
                start = time.monotonic()
                opened = open_retriever(kind, corpus, Path(scratch, name), embedder, language="english")
                print(f"{name} {kind} {count:,}: {time.monotonic() - start:.1f} s, {len(asked):,} embedded", flush=True)
                queries = [" ".join(text.split()[:6]) for text in texts[:: count // 100]]
                hits = [asyncio.run(opened.retrieve(query, 10)) for query in queries]
                found[name, kind] = [[(hit.position, hit.score) for hit in one] for one in hits]
    print("rankings equal:", {kind: found["index", kind] == found["fresh", kind] for kind in KINDS})


if __name__ == "__main__":
    main()
