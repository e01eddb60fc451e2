"""The side of TH-RAG's authors: their graph, selection, evidence and answers against the fake server, in one process.

Called by `tests.parity.thrag` with a copy of the clone, into which their code writes its results, and a folder that
holds `world.json`; it writes `theirs.json`. A token is a word, because the vocabulary of their tokenizer is not here.
"""

import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.parity.stand_ins import replace

DATA = "made_up"


class Words:
    """A tokenizer whose tokens are words with the spaces before them."""

    def __init__(self, *_: Any) -> None:
        self.words: list[str] = []

    def encode(self, text: str, **_: Any) -> list[int]:
        start = len(self.words)
        self.words += re.findall(r"\s*\S+", text)
        return list(range(start, len(self.words)))

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.words[token] for token in tokens)


def main(clone: str, folder: Path) -> None:
    """Run all steps and write what they gave."""
    world = json.loads((folder / "world.json").read_text())
    os.environ.update(
        OPENAI_BASE_URL=world["url"], DEFAULT_MODEL="fake", CHAT_MODEL="fake-answer", TOPIC_CHOICE_MIN="1",
        SUBTOPIC_CHOICE_MIN="1", MAX_WORKERS="1", RETRY_BACKOFF="0",
    )  # fmt: skip
    replace("tiktoken", encoding_for_model=Words, get_encoding=Words)
    replace("dotenv", load_dotenv=lambda: None)
    sys.path.insert(0, clone)
    config = import_module("config")
    defaults = config.get_config()
    text = "\n".join(world["documents"])
    graph_construction = import_module("index.graph_construction")
    default_chunks = graph_construction.chunk_text(text, defaults.max_tokens, defaults.overlap, "")
    data = Path(clone) / "data" / DATA
    data.mkdir(parents=True)
    (data / "contexts.txt").write_text(text)
    os.environ.update(MAX_TOKENS=str(world["window"]), OVERLAP="0")
    import_module("index.build_graph").main(DATA)
    own = config.get_config(DATA)
    chunks = json.loads(own.get_kv_store_file().read_text())
    blocks = json.loads(own.get_graph_json_file().read_text())
    rag = import_module("generate.graph_based_rag_short").GraphRAG(DATA)
    calls = _count_calls()
    questions = {}
    for name, question in world["questions"].items():
        calls.clear()
        questions[name] = _ask(rag, question, world) | {"calls": len(calls)}
    calls.clear()
    topic_choice = import_module("index.topic_choice")
    topic_choice.choose_topics_from_graph(next(iter(world["questions"].values())), rag.retriever.graph, rag.client,
                                          min_topics=99)  # fmt: skip
    kinds = [data["type"] for _, data in rag.retriever.graph.nodes(data=True)]
    judge = import_module("evaluate.judge_F1")
    (folder / "theirs.json").write_text(
        json.dumps(
            {
                "defaults": {"chunks": len(default_chunks), "K1": defaults.top_k1, "K2": defaults.top_k2},
                "chunks": {name: chunk["content"].strip() for name, chunk in chunks.items()},
                "triples": {block["chunk_id"]: len(block["triples"]) for block in blocks},
                "records": rag.retriever.embedder.edge_records,
                "topics": topic_choice.extract_graph_topic_labels(rag.retriever.graph),
                "subtopics": kinds.count("subtopic"),
                "entities": kinds.count("entity"),
                "pairs": _pairs(rag.retriever.graph),
                "questions": questions,
                "calls_for_all": len(calls),
                "scores": [judge.compute_metrics(reply, gold)[:2] for reply, gold in world["pairs"]],
            }
        )
    )


def _ask(rag: Any, question: str, world: dict[str, Any]) -> dict[str, Any]:
    """What one question finds, and its answer."""
    found: list[dict[str, Any]] = []
    retrieve = type(rag.retriever).retrieve

    def recorded(query: str, **options: Any) -> dict[str, Any]:
        found.append(retrieve(rag.retriever, query, **options))
        return found[-1]

    rag.retriever.retrieve = recorded
    answer, _, _ = rag.answer(question, top_k1=world["K1"], top_k2=world["K2"])
    return {"answer": answer, **found[0]}


def _count_calls() -> list[str]:
    """A list that gets the model of each chat request from now on."""
    from openai.resources.chat.completions import Completions

    calls: list[str] = []
    create = Completions.create

    def counted(self: Any, **options: Any) -> Any:
        calls.append(options["model"])
        return create(self, **options)

    Completions.create = counted
    return calls


def _pairs(graph: Any) -> int:
    """Edges between entities."""
    return sum(data.get("relation_type") == "predicate_relation" for _, _, data in graph.edges(data=True))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
