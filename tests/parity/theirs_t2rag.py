"""The side of T2RAG's authors, in one process: their propositions, searches, clues and answers.

Called by `tests.parity.t2rag` with the clone and a folder that holds `world.json`; it writes `theirs.json`. A call to
the fake server has its role and its clues beside the prompt, so that the server's rules need not read their prompts.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.parity.stand_ins import package, replace

_ROLES = {"reason_and_form_triples": "decompose", "resolve_clues": "resolve", "final_qa": "answer",
          "_retry_triple_extraction_simple": "retry"}  # fmt: skip


def main(clone: str, folder: Path) -> None:
    """Run all steps and write what they gave."""
    # Their package imports every model and index that any of their systems needs; only the folder is taken.
    package("src", f"{clone}/src")
    sys.path.insert(0, clone)
    # Models of the hub, a paid service, and the extraction of triples, which the world has already.
    for name in ("GritLM", "Cohere", "Contriever", "NVEmbedV2"):
        replace(f"src.embedding_model.{name}")
    replace("src.llm.bedrock_llm")
    replace("src.information_extraction")
    world = json.loads((folder / "world.json").read_text())
    rag = _open(world, folder / "theirs", _documents(world["passages"]))
    calls = _record_calls(rag)
    rounds = _record_rounds(rag)
    questions = {}
    for name, question in world["questions"].items():
        calls.clear()
        rounds.clear()
        (solution,), _, _ = rag.rag_qa([question])
        questions[name] = {"answer": solution.answer, "calls": list(calls), "rounds": list(rounds)}
    kinds = []
    for clue in world["clues"]:
        sorted_clues = _read_clue(rag, " | ".join(clue))
        kinds.append([kind for kind in ("resolved", "traceable", "fuzzy") if sorted_clues[f"{kind}_clues"]])
    medical = []
    if world["medical_questions"]:
        extracted = json.loads((Path(clone) / world["medical_triples"]).read_text())
        published = _open(world, folder / "theirs_medical", extracted, k=5)
        medical = [_search(published, [question]) for question in world["medical_questions"]]
    (folder / "theirs.json").write_text(
        json.dumps(
            {
                "propositions": rag.all_propositions,
                "passages": [_search(rag, queries) for queries in world["queries"]],
                "questions": questions,
                "medical": medical,
                "kinds": kinds,
                "fields": _fields(rag, world["four_fields"]),
                "scores": _scores(world["pairs"]),
            }
        )
    )


def _documents(passages: list[dict[str, Any]]) -> dict[str, Any]:
    """The world's passages as their extraction writes them."""
    docs = []
    for passage in passages:
        docs.append({"idx": passage["id"], "passage": passage["text"], "extracted_triples": passage["triples"]})
    return {"docs": docs}


def _open(world: dict[str, Any], data: Path, extracted: dict[str, Any], k: int = 0) -> Any:
    """Their system on a file of extracted triples."""
    data.mkdir()
    (data / "openie_results_ner.json").write_text(json.dumps(extracted))
    config = import_module("src.utils.config_utils").BaseConfig(
        save_dir=str(data), llm_name="fake", llm_base_url=world["url"], embedding_base_url=world["url"],
        embedding_model_name="text-embedding-fake", embedding_base_dir=str(data), exclude_llm_from_paths=True,
        qa_top_k=k or world["k"], dataset="made_up",
    )  # fmt: skip
    return import_module("src.TRAG").TRAG(global_config=config)


def _record_calls(rag: Any) -> list[str]:
    """Give each call its role and clues, and keep the roles."""
    calls: list[str] = []
    state: dict[str, Any] = {}
    infer = rag.llm_model.infer

    def infer_in_role(messages: Any) -> Any:
        calls.append(state["role"])
        return infer(messages, extra_body={"parity": dict(state)})

    def in_role(name: str, role: str) -> None:
        method = getattr(rag, name)

        def wrapped(*arguments: Any) -> Any:
            before = dict(state)
            clues = []
            if role == "resolve":
                clues = [*arguments[0], *arguments[1]]
            elif role == "answer":
                clues = arguments[1]
            state.update(role=role, clues=[[clue["subject"], clue["predicate"], clue["object"]] for clue in clues])
            try:
                return method(*arguments)
            finally:
                state.update(before)

        setattr(rag, name, wrapped)

    for name, role in _ROLES.items():
        in_role(name, role)
    rag.llm_model.infer = infer_in_role
    return calls


def _record_rounds(rag: Any) -> list[dict[str, Any]]:
    """Keep the queries and passages of each round."""
    rounds: list[dict[str, Any]] = []
    retrieve, encode = rag.retrieve_and_double_check, rag.embedding_model.batch_encode
    asked: list[list[str]] = []

    def encode_recorded(texts: list[str], **options: Any) -> Any:
        asked.append(list(texts))
        return encode(texts, **options)

    def recorded(clues: Any, query: str) -> Any:
        asked.clear()
        result = retrieve(clues, query)
        passages = [passage["passage_id"] for passage in result["retrieved_passages"]]
        rounds.append({"queries": asked[0] if asked else [], "passages": passages})
        return result

    rag.embedding_model.batch_encode = encode_recorded
    rag.retrieve_and_double_check = recorded
    return rounds


def _search(rag: Any, queries: list[str]) -> list[str]:
    """The passages that queries find; a question that is only a question word adds no query of its own."""
    clues = [{"subject": query, "predicate": "", "object": ""} for query in queries]
    result = type(rag).retrieve_and_double_check(rag, clues, "what?")
    return [passage["passage_id"] for passage in result["retrieved_passages"]]


def _read_clue(rag: Any, line: str) -> dict[str, Any]:
    """What they make of a reply with one clue."""
    rag.llm_model.infer = lambda *_: (f"Triples:\n{line}", {}, False)
    result: dict[str, Any] = type(rag).reason_and_form_triples(rag, "Which?")
    return result


def _fields(rag: Any, line: str) -> list[str]:
    """A row of four fields as they read it."""
    (clue,) = _read_clue(rag, line)["all_triples"]
    return [clue["subject"], clue["predicate"], clue["object"]]


def _scores(pairs: list[list[str]]) -> list[list[float]]:
    """Exact match and F1 of each reply and gold answer."""
    qa_eval = import_module("src.evaluation.qa_eval")
    scores = []
    for reply, gold in pairs:
        row = []
        for metric in (qa_eval.QAExactMatch(), qa_eval.QAF1Score()):
            pooled, _ = metric.calculate_metric_scores([[gold]], [reply])
            row += [float(value) for value in pooled.values()]
        scores.append(row)
    return scores


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
