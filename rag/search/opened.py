"""Open corpus, triples and indexes from the options of `rag/search/options.py`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tripletune.core.calls import LLMClient
from tripletune.core.options import set_values
from tripletune.llm.backends import LLMOptions
from tripletune.models.specs import PYPI
from tripletune.rag.search.embedding import Embedder, open_embedder
from tripletune.rag.search.index import PassageStore, check_index_folder
from tripletune.rag.search.options import TEACHER, SearchOptions
from tripletune.rag.search.retrievers import CorpusRetriever, open_retriever
from tripletune.rag.triple_store import TripleSource, TripleStore, is_store, open_triples
from tripletune.rag.triples.names import EntityNames, read_names

if TYPE_CHECKING:
    from tripletune.rag.search.triple_index import TripleIndex


def build_indexes(options: SearchOptions, embedder: Embedder | None = None, vectors: str | None = None) -> None:
    """Build the indexes of a corpus and of given triples, for the `--index` of runs.

    Options without effect are errors here, because their index would be used for a long time.

    Args:
        embedder: Replaces the encoder in the options.
        vectors: A NumPy file with the vectors of the passages, which are then not embedded; see `import_vectors`.
    """
    if not options.corpus or not options.index:
        raise ValueError("an index needs passages and a folder: give --corpus and --index")
    if options.extractor and not (options.triples and is_store(options.triples)):
        raise ValueError(
            f"--extractor {options.extractor} has no effect, since --triples is not a store: leave out --extractor"
        )
    if options.entities and not options.triples:
        raise ValueError(f"--entities {options.entities} has no effect without --triples: leave it out")
    if options.encoder and options.retriever == "bm25":
        raise ValueError(f"--encoder {options.encoder} has no effect, since BM25 embeds nothing: add --retriever dense")
    if vectors and options.retriever == "bm25":
        raise ValueError(f"--vectors {vectors} has no effect, since BM25 has no vectors: add --retriever dense")
    check_index_folder(Path(options.index))
    if embedder is None and options.retriever != "bm25" and options.encoder:
        embedder = search_embedder(options)
    if vectors:
        if embedder is None:
            raise ValueError(f"--vectors {vectors}: queries need the encoder that made the vectors: give --encoder")
        from tripletune.rag.search.imported_vectors import import_vectors

        passages = PassageStore(options.corpus, options.index, options.overwrite)
        wanted = {"corpus_sha256": passages.sha256}
        import_vectors(vectors, options.index, wanted, passages.texts, len(passages), embedder, options.overwrite)
    open_searches(options, Path(options.index), embedder)


class Searches(NamedTuple):
    """The search of a corpus's passages, and that of its triples; None without `--triples`."""

    passages: CorpusRetriever
    triples: TripleIndex | None


def open_searches(options: SearchOptions, index: Path, embedder: Embedder | None = None) -> Searches:
    """Open the indexes of a corpus and of given triples, and build what is missing.

    Args:
        index: The folder of the indexes.
        embedder: The encoder in the options; not used with BM25.
    """
    how = (embedder, options.vectors, options.language, options.overwrite)
    passages = open_retriever(options.retriever, str(options.corpus), index, *how)
    triples = None
    if options.triples:
        from tripletune.rag.search.triple_index import TripleIndex

        copy = index / "triples.sqlite"
        stored = open_triples(options.triples, copy, options.extractor, entities=options.entities)
        triples = TripleIndex(options.retriever, passages.passages, stored, index, *how)
    return Searches(passages, triples)


def extracts_in_loop(options: SearchOptions) -> bool:
    """Whether `--extractor` names a model that extracts in the loop, and not an extractor in `--triples`.

    A name that the store has is the stored extractor, even if a folder has the same name. What looks like a model is
    one.
    """
    name = options.extractor or ""
    if not options.triples or not is_store(options.triples):
        return True
    with closing(TripleStore(options.triples, create=False)) as store:
        stored_models = [extractor.model for extractor in store.extractors()]
    if name in stored_models:
        return False
    # Any other name is unknown to the store, whose error lists the known names.
    from tripletune.rag.served_extractor import is_served

    return is_served(name) or name == TEACHER or "/" in name or name.startswith(PYPI) or Path(name).is_dir()


def open_triple_source(
    options: SearchOptions, index: Path, llm: LLMClient | None, teacher: LLMOptions | None
) -> TripleSource:
    """Open the triples of a run, stored or extracted in the loop (see `extracts_in_loop`).

    Args:
        index: The folder of the indexes, which holds a copy of a JSON-lines file, or what is extracted.
        llm: The client of the run's chat model, which has the options `teacher`.
    """
    kept = index / "triples.sqlite"
    if not (options.extractor and extracts_in_loop(options)):
        return open_triples(str(options.triples), kept, options.extractor, entities=options.entities)
    # Imported here, because most runs read triples that were extracted before.
    from tripletune.rag.extract import CorpusExtraction
    from tripletune.rag.extractor import LocalOptions, open_local_extractor, teacher_extractor
    from tripletune.rag.served_extractor import is_served, open_served_extractor

    if options.extractor == TEACHER:
        if llm is None or teacher is None:
            raise ValueError("--extractor teacher needs a chat model: give --llm, or name a trained extractor")
        if options.extractor_set:
            raise ValueError("extractor_set has no effect with --extractor teacher: use --teacher-... instead")
        extractor = teacher_extractor(llm, teacher)
    elif is_served(str(options.extractor)):
        extractor = open_served_extractor(str(options.extractor), options.extractor_set)
    else:
        values, problems = set_values(LocalOptions, options.extractor_set, "--extractor")
        if problems:
            raise ValueError("; ".join(problems))
        extractor = open_local_extractor(str(options.extractor), LocalOptions(**values))
    store = TripleStore(options.triples or kept)
    names = read_names(options.entities) if options.entities else EntityNames()
    return CorpusExtraction(extractor, store, keep_unsupported=options.keep_unsupported, names=names)


def search_embedder(options: SearchOptions) -> Embedder:
    """Open the encoder of a search, with its prompts, similarity and type; only once per process (`open_embedder`)."""
    prompts = (options.query_prompt, options.text_prompt)
    how = (options.trust_remote_code, options.similarity, options.encoder_dtype)
    return open_embedder(str(options.encoder), *prompts, *how)
