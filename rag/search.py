"""Open corpus, triples and indexes from options that `tripletune ask` and `tripletune eval run` share."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tripletune.models.data.words import AUTO
from tripletune.models.llm import LLMClient
from tripletune.models.llm.backends import LLMOptions
from tripletune.models.loading import PYPI
from tripletune.models.options import rare, set_values, setting
from tripletune.rag.embedding import Embedder, Similarity, open_embedder
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.extractor import LocalOptions, open_local_extractor, teacher_extractor
from tripletune.rag.index import check_index
from tripletune.rag.retrievers import open_retriever
from tripletune.rag.text_index import RetrieverKind, VectorSearch
from tripletune.rag.triple_index import TripleIndex
from tripletune.rag.triple_store import StoredTriples, TripleStore, is_store, open_triples

# Names the chat model of the run as the one that extracts.
TEACHER = "teacher"


@dataclass(kw_only=True)
class SearchOptions:
    """Corpus, triples, and how they are searched."""

    corpus: str | None = setting(
        None,
        "passages to retrieve from: a folder of `build passages`, or JSON lines of text and optional title, id "
        "(default of eval run: all contexts in --data)",
    )
    triples: str | None = setting(
        None, 'triples of the passages: JSON lines of {"title", "text", "triples"}, or a store of `rag extract`'
    )
    extractor: str | None = setting(
        None,
        "take the triples of this extractor in --triples, by number or model; or let a trained model (folder, hub "
        f"id) or '{TEACHER}', the run's chat model, read the retrieved passages that the store --triples (default: in "
        "--index) lacks",
    )
    extractor_set: tuple[str, ...] = rare(
        (), "options of a trained --extractor, for example beams=4,max_tokens=256,dtype=bfloat16", needs="extractor"
    )
    retriever: RetrieverKind = setting("bm25", "how to find passages (or triples)")
    encoder: str | None = setting(
        None,
        "sentence encoder for dense retrieval and reranking: hub id, folder, pypi:<package>, or openai:<model> on an "
        "OpenAI-compatible server (OPENAI_BASE_URL, OPENAI_API_KEY)",
    )
    vectors: VectorSearch = rare(
        "flat", "compare a query with all vectors (flat), or search an HNSW graph (a million and more)"
    )
    query_prompt: str | None = rare(None, "text before each query (default: the encoder's)", needs="encoder")
    text_prompt: str | None = rare(None, "text before each passage or triple (default: the encoder's)", needs="encoder")
    similarity: Similarity | None = rare(
        None, "how to compare vectors, dot for Contriever (default: the encoder's, else cosine)", needs="encoder"
    )
    trust_remote_code: bool = rare(False, "run Python code that comes with the encoder")
    language: str = rare(AUTO, "language of BM25's stems and stop words: auto, none, or for example german")
    overwrite: bool = setting(False, "replace an index of another corpus or encoder in --index")
    index: str | None = setting(None, "folder of the indexes (default: OUTPUT/index; ask, serve: a temporary one)")


def build_indexes(options: SearchOptions, embedder: Embedder | None = None) -> None:
    """Build the indexes of a corpus and of given triples, for the `--index` of runs.

    `embedder` replaces the encoder that the options name.
    """
    if not options.corpus or not options.index:
        raise ValueError("an index needs --corpus, the passages, and --index, its folder")
    if options.extractor and not (options.triples and is_store(options.triples)):
        raise ValueError(
            f"--extractor {options.extractor}: without effect, since --triples names no store; leave it out"
        )
    if options.encoder and options.retriever == "bm25":
        raise ValueError(
            f"--encoder {options.encoder}: without effect, since BM25 embeds nothing; add --retriever dense"
        )
    check_index(Path(options.index))
    if embedder is None and options.retriever != "bm25" and options.encoder:
        embedder = search_embedder(options)
    how = (embedder, options.vectors, options.language, options.overwrite)
    retriever = open_retriever(options.retriever, options.corpus, options.index, *how)
    if options.triples:
        triples = open_triples(options.triples, Path(options.index) / "triples.sqlite", options.extractor)
        TripleIndex(options.retriever, retriever.passages, triples, options.index, *how)


def extracts(options: SearchOptions) -> bool:
    """Whether `--extractor` reads passages in the loop instead of naming an extractor of `--triples`."""
    name = options.extractor or ""
    if not options.triples or not is_store(options.triples):
        return True
    with closing(TripleStore(options.triples, create=False)) as store:
        stored = [one.model for one in store.extractors()]
    # Anything else is a name that the store lacks, and what it has is worth telling.
    return name not in stored and (name == TEACHER or "/" in name or name.startswith(PYPI) or Path(name).is_dir())


def open_source(
    options: SearchOptions, index: Path, llm: LLMClient | None, teacher: LLMOptions | None
) -> StoredTriples | CorpusExtraction:
    """The triples of a run, stored or read in the loop (see `extracts`); `llm` was opened with `teacher`."""
    kept = index / "triples.sqlite"
    if not (options.extractor and extracts(options)):
        return open_triples(str(options.triples), kept, options.extractor)
    if options.extractor == TEACHER:
        if llm is None or teacher is None:
            raise ValueError("--extractor teacher: there is no chat model, so name one, or a trained extractor")
        if options.extractor_set:
            raise ValueError("extractor_set is for a trained model; a chat model has its --teacher-...")
        extractor = teacher_extractor(llm, teacher)
    else:
        values, problems = set_values(LocalOptions, options.extractor_set, "--extractor")
        if problems:
            raise ValueError("; ".join(problems))
        extractor = open_local_extractor(str(options.extractor), LocalOptions(**values))
    return CorpusExtraction(extractor, TripleStore(options.triples or kept))


def search_embedder(options: SearchOptions) -> Embedder:
    """The encoder of a search."""
    prompts = (options.query_prompt, options.text_prompt)
    return open_embedder(str(options.encoder), *prompts, options.trust_remote_code, options.similarity)
