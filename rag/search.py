"""What a system searches, opened from options that `tripletune ask` and `tripletune eval run` share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tripletune.models.llm import LLMClient
from tripletune.models.llm.backends import LLMOptions
from tripletune.models.loading import PYPI
from tripletune.models.options import set_values, setting
from tripletune.rag.embedding import Embedder, Similarity, open_embedder
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.extractor import LocalOptions, open_local_extractor, teacher_extractor
from tripletune.rag.index import PassageStore
from tripletune.rag.retrievers import open_retriever
from tripletune.rag.systems import LoopOptions, System, Tools
from tripletune.rag.text_index import RetrieverKind, VectorSearch
from tripletune.rag.triple_index import TripleIndex
from tripletune.rag.triple_store import StoredTriples, TripleSource, TripleStore, is_store, open_triples

# Names the chat model of the run as the one that extracts.
TEACHER = "teacher"

T = TypeVar("T")


@dataclass(kw_only=True)
class SearchOptions:
    """Corpus, triples, and how they are searched."""

    corpus: str | None = setting(
        None, "passages to retrieve from: JSON lines with text, perhaps title, id (eval run: all contexts in --data)"
    )
    triples: str | None = setting(
        None, 'triples of the passages: JSON lines of {"title", "text", "triples"}, or a store of `rag extract`'
    )
    extractor: str | None = setting(
        None,
        "whose triples: an extractor that --triples holds, by number or model; or a trained model (folder, hub id) or "
        f"'{TEACHER}', the run's chat model, that reads retrieved passages which the store --triples (default: in "
        "--index) does not hold yet",
    )
    extractor_set: tuple[str, ...] = setting(
        (), "options of that trained model, as beams=4,max_tokens=256,dtype=bfloat16", flag=False
    )
    retriever: RetrieverKind = setting("bm25", "how passages (or triples) are found")
    encoder: str | None = setting(
        None,
        "sentence encoder of dense retrieval and of reranking: hub id, folder, pypi:<package>, or openai:<model> on an "
        "OpenAI-compatible server (OPENAI_BASE_URL, OPENAI_API_KEY)",
    )
    vectors: VectorSearch = setting(
        "flat",
        "compare a query with all vectors, or find the nearest through an HNSW graph: for a million and more",
        flag=False,
    )
    query_prompt: str | None = setting(
        None, "put before queries (default: what the encoder's settings say)", flag=False
    )
    text_prompt: str | None = setting(None, "put before texts (default: what the encoder's settings say)", flag=False)
    similarity: Similarity | None = setting(
        None,
        "how vectors are compared (default: what the encoder's settings say, else cosine); dot for Contriever",
        flag=False,
    )
    trust_remote_code: bool = setting(False, "run Python code that comes with the encoder", flag=False)
    index: str | None = setting(None, "folder of the indexes (default: OUTPUT/index of a run, a temporary one of ask)")


@dataclass
class Opened:
    """What several runs share: indexes, stores, models, each opened when the first of them needs it."""

    things: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made under that key, now or before."""
        if key not in self.things:
            self.things[key] = make()
        return self.things[key]


def search_problems(options: SearchOptions, system: System, loop: Any) -> list[str]:
    """What of the options can't work, before anything is read or loaded."""
    problems = []
    if system.needs_triples(loop) and not (options.triples or options.extractor):
        instead = "--evidence text" if isinstance(loop, LoopOptions) else "other options"
        problems.append(f"--system {system.name} reads triples: give --triples FILE, --extractor MODEL, or {instead}")
    if system.searches_triples(loop) and options.extractor and extracts(options):
        problems.append(
            f"--system {system.name} searches the triples of the whole corpus, which --extractor {options.extractor} "
            "can't read in the loop: run `tripletune rag extract` first and give its store as --triples"
        )
    if system.needs_reranker(loop) and options.retriever == "bm25" and not options.encoder:
        ways = {"rerank": ", or --set rerank=no", "synonyms": ", or --set synonyms=none"}
        instead = next((text for name, text in ways.items() if hasattr(loop, name)), "")
        problems.append(
            f"--system {system.name} reranks triples with an embedder, and BM25 has none: give --encoder SPEC{instead}"
        )
    if system.needs_corpus(loop) and options.retriever != "bm25" and not options.encoder:
        problems.append(f"--retriever {options.retriever} needs --encoder: a hub id, a folder or pypi:<package>")
    return problems


def build_indexes(options: SearchOptions, embedder: Embedder | None = None) -> None:
    """Build the indexes of a corpus, and of its triples where they are given, so that runs find them in `--index`.

    `embedder` replaces the encoder that the options name.
    """
    if not options.corpus or not options.index:
        raise ValueError("an index needs --corpus, the passages, and --index, its folder")
    if embedder is None and options.retriever != "bm25" and options.encoder:
        embedder = search_embedder(options)
    how: tuple[Embedder | None, VectorSearch] = (embedder, options.vectors)
    retriever = open_retriever(options.retriever, options.corpus, options.index, *how)
    if options.triples:
        triples = open_triples(options.triples, Path(options.index) / "triples.sqlite", options.extractor)
        TripleIndex(options.retriever, retriever.passages, triples, options.index, *how)


def extracts(options: SearchOptions) -> bool:
    """Whether the `--extractor` given reads passages in the loop, and is not one whose triples `--triples` holds."""
    name = options.extractor or ""
    if not options.triples or not is_store(options.triples):
        return True
    with closing(TripleStore(options.triples, create=False)) as store:
        stored = [one.model for one in store.extractors()]
    # Anything else is a name that the store lacks, and what it has is worth telling.
    return name not in stored and (name == TEACHER or "/" in name or name.startswith(PYPI) or Path(name).is_dir())


def open_extraction(
    options: SearchOptions, index: Path, llm: LLMClient | None = None, teacher: LLMOptions | None = None
) -> CorpusExtraction:
    """The triples of a run whose `--extractor` reads passages in the loop; see `extracts`.

    Args:
        index: Folder of the store where `--triples` names none.
        llm: The chat model of the run.
        teacher: What it was opened with.
    """
    values, problems = set_values(LocalOptions, options.extractor_set, "--extractor")
    if options.extractor == TEACHER and (llm is None or teacher is None):
        problems.append("--extractor teacher: there is no chat model, so name one, or a trained extractor")
    elif options.extractor == TEACHER and options.extractor_set:
        problems.append("extractor_set is for a trained model; a chat model has its --teacher-...")
    if problems:
        raise ValueError("; ".join(problems))
    store = TripleStore(options.triples or index / "triples.sqlite")
    if options.extractor == TEACHER and llm is not None and teacher is not None:
        return CorpusExtraction(teacher_extractor(llm, teacher), store)
    return CorpusExtraction(open_local_extractor(str(options.extractor), LocalOptions(**values)), store)


def search_embedder(options: SearchOptions) -> Embedder:
    """The encoder of a search."""
    prompts = (options.query_prompt, options.text_prompt)
    return open_embedder(str(options.encoder), *prompts, options.trust_remote_code, options.similarity)


def open_search(
    options: SearchOptions,
    system: System,
    loop: Any,
    corpus: str | Path | None,
    index: Path,
    opened: Opened | None = None,
    llm: LLMClient | None = None,
    teacher: LLMOptions | None = None,
) -> Tools:
    """Open what a system searches under its options `loop`, building indexes that are missing.

    Args:
        corpus: The passages; None for a system that retrieves nothing.
        index: Holds all indexes of the corpus.
        opened: What other runs have opened, and share.
        llm: The chat model, which may read passages in the loop.
        teacher: What it was opened with for that.
    """
    once = (opened or Opened()).once
    where = (str(corpus), str(index), *(getattr(options, item.name) for item in fields(SearchOptions)))
    retriever = embedder = triples = None
    store: TripleSource | None = None
    if options.encoder and corpus and (options.retriever != "bm25" or system.needs_reranker(loop)):
        embedder = search_embedder(options)
    if system.needs_triples(loop) and options.extractor and extracts(options):
        which = ("extraction", options.triples or index, options.extractor, options.extractor_set)
        store = once(which, lambda: open_extraction(options, index, llm, teacher))
    elif system.needs_triples(loop):
        kept = index / "triples.sqlite"
        store = once(("store", where), lambda: open_triples(str(options.triples), kept, options.extractor))
    how = (embedder, options.vectors)
    if corpus and isinstance(store, StoredTriples) and system.searches_triples(loop):
        passages, stored = PassageStore(corpus, index), store
        triples = once(("rows", where), lambda: TripleIndex(options.retriever, passages, stored, index, *how))
    if corpus and (triples is None or system.searches_both):
        retriever = once(("passages", where), lambda: open_retriever(options.retriever, corpus, index, *how))
    reranker = embedder if system.needs_reranker(loop) else None
    return Tools(retriever=retriever, store=store, triples=triples, reranker=reranker, llm=llm)
