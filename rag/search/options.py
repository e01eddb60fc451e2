"""Options for corpus, triples and search, which `tripletune ask`, `eval run` and other programs share.

`rag/search/opened.py` opens what they name. This module imports nothing that searches, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tripletune.core.data.words import AUTO
from tripletune.core.options import rare, setting

RetrieverKind = Literal["bm25", "dense", "hybrid"]
# How the nearest vectors are found; see `near_rows`.
VectorSearch = Literal["flat", "gpu", "hnsw", "ivf"]
Similarity = Literal["cosine", "dot"]
# The value of --extractor that makes the run's chat model extract.
TEACHER = "teacher"


@dataclass(kw_only=True)
class SearchOptions:
    """Options for corpus, triples and search."""

    corpus: str | None = setting(
        None,
        "passages to search: a folder of `build passages`, or JSON lines with text and optional title, id "
        "(default for eval run: all contexts in --data)",
    )
    triples: str | None = setting(
        None, 'triples of the passages: JSON lines of {"title", "text", "triples"}, or a store of `rag extract`'
    )
    entities: str | None = setting(
        None, "file of `rag entities`, reviewed by you: names in triples that are read as one name per entity"
    )
    extractor: str | None = setting(
        None,
        "extractor (number or model) whose triples in --triples are used; or the model that extracts passages missing "
        "in the store --triples (default: in --index): a trained model (folder, owner/name[@revision], or "
        f"openai:NAME@URL on a server) or '{TEACHER}', the run's chat model",
    )
    extractor_set: tuple[str, ...] = rare(
        (),
        "options of a trained --extractor, for example vocabulary=FILE,max_tokens=256,dtype=bfloat16; on a server "
        "prompt=FILE (prompt.md of its export), vocabulary, outside, max_tokens, concurrency, api_key_env",
        needs="extractor",
    )
    keep_unsupported: bool = rare(
        False,
        "keep extracted triples with a name or number that the passage does not have, as in RAS",
        needs="extractor",
    )
    retriever: RetrieverKind = setting("bm25", "retrieval of passages or triples")
    encoder: str | None = setting(
        None,
        "sentence encoder for dense retrieval and reranking: owner/name[@revision], folder, pypi:<package>, or "
        "openai:<model>[@URL] for an OpenAI-compatible server (default: OPENAI_BASE_URL with OPENAI_API_KEY)",
    )
    vectors: VectorSearch = rare(
        "flat",
        "flat: compare a query with all vectors; gpu: the same in a GPU's memory; hnsw: search an HNSW graph (for a "
        "million texts); ivf: search lists of short codes (for many millions)",
    )
    query_prompt: str | None = rare(None, "text before each query (default: the encoder's)", needs="encoder")
    text_prompt: str | None = rare(None, "text before each passage or triple (default: the encoder's)", needs="encoder")
    similarity: Similarity | None = rare(
        None, "similarity of vectors, dot for Contriever (default: the encoder's, else cosine)", needs="encoder"
    )
    encoder_dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = rare(
        None,
        "type in which the encoder computes: auto is bfloat16 where the hardware multiplies it, about twice as fast "
        "(default: the type in its files)",
        needs="encoder",
    )
    trust_remote_code: bool = rare(False, "run Python code that comes with the encoder")
    language: str = rare(AUTO, "language of BM25's stems and stop words: auto, none, or for example german")
    overwrite: bool = setting(False, "replace an index of another corpus or encoder in --index")
    index: str | None = setting(
        None, "folder of the indexes (default: in an evaluation's output folder; of ask and serve, a temporary one)"
    )
