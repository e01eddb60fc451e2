"""The side of RAS's authors: their loss and gradients, their graphs and their loop on made-up inputs, in one process.

Called by `tests.parity.ras` with the clone and a folder that holds `world.json`, a tokenizer and a tiny model; it
writes `theirs.pt`.
"""

import json
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch_geometric.utils import scatter

from tests.parity.stand_ins import SentenceVectors, package, replace, stand_in

PROJECTOR_WIDTH = 2048
ARGS = {
    "llm_frozen": "False", "finetune_method": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.05,
    "gnn_model_name": "gt", "gnn_in_dim": SentenceVectors.width, "gnn_hidden_dim": 32, "gnn_num_layers": 3,
    "gnn_dropout": 0.1, "gnn_num_heads": 4, "max_txt_len": 2500, "max_new_tokens": 300,
}  # fmt: skip


def main(clone: str, folder: Path) -> None:
    """Run all steps and write what they gave."""
    sys.path.insert(0, f"{clone}/framework")
    package("models", f"{clone}/framework/models")  # the root of this repository has a folder of this name, too
    stand_in("torch_scatter", scatter=scatter)
    stand_in("jsonlines", "orjson", "nltk", "rouge_score", "mauve")
    # These two load an index and call a paid model.
    replace("td_retriever")
    replace("sonnet")
    world = json.loads((folder / "world.json").read_text())
    import sentence_transformers

    sentence_transformers.SentenceTransformer = SentenceVectors
    utils = import_module("utils")
    processor = utils.GraphProcessor()
    torch.manual_seed(0)
    model = _model(folder)
    instructions = {"planning": utils.get_planner_instruction(""), "answering": utils.get_answerer_instruction("")}
    records = []
    for record in world["records"]:
        graphs = [processor.create_graph_from_triples(triples)[0] for triples in record["graphs"]]
        text = f"{instructions[record['task']]}\n{record['body']}"
        records.append(_record(model, [text], [record["label"]], [graphs]))
    pair = [records[0], records[1]]
    both = _record(model, *[[record[name][0] for record in pair] for name in ("texts", "labels", "graphs")])
    torch.save(
        {
            "weights": {name: weight.detach() for name, weight in model.named_parameters()},
            "records": records,
            "pair": both,
            "graph": _graph(processor, world["graph"]),
            "name": _graph(processor, [world["bracketed"]])["nodes"],
            "loops": [_loop(processor, case, world["triples_of"], utils) for case in world["loops"]],
            "scores": _scores(world["pairs"]),
        },
        folder / "theirs.pt",
    )


def _model(folder: Path) -> Any:
    """Their model around the tiny language model; its projector ends at that model's width, not at 4096."""
    load = transformers.AutoModelForCausalLM.from_pretrained

    def load_on_cpu(path: str, **_: Any) -> Any:
        return load(path)

    transformers.AutoModelForCausalLM.from_pretrained = load_on_cpu
    model = import_module("models.graphllm").GraphLLM(Namespace(llm_model_path=str(folder / "base"), **ARGS))
    width = model.word_embedding.weight.shape[1]
    model.projector = torch.nn.Sequential(
        torch.nn.Linear(ARGS["gnn_hidden_dim"], PROJECTOR_WIDTH), torch.nn.Sigmoid(),
        torch.nn.Linear(PROJECTOR_WIDTH, width),
    )  # fmt: skip
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would leave the other matrix without a gradient
            torch.nn.init.normal_(weight, std=0.1)
    return model.eval()


def _record(model: Any, texts: list[str], labels: list[str], graphs: list[list[Any]]) -> dict[str, Any]:
    """Loss, gradients, and the token ids and labels that reached the language model."""
    looked_up: list[torch.Tensor] = []
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        model.word_embedding.register_forward_hook(lambda _, inputs, __: looked_up.append(inputs[0])),
        model.model.register_forward_pre_hook(lambda _, __, given: seen.update(given), with_kwargs=True),
    ]
    model.zero_grad()
    loss = model({"input": texts, "label": labels, "graphs": graphs})
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.grad is not None:
            gradients[name] = weight.grad.clone()
    opening, _, *bodies = looked_up
    return {
        "texts": texts, "labels": labels, "graphs": graphs, "loss": loss.item(), "gradients": gradients,
        "opening": opening.tolist(), "bodies": [body.tolist() for body in bodies],
        "label_ids": seen["labels"].tolist(),
    }  # fmt: skip


def _graph(processor: Any, triples: list[str]) -> dict[str, Any]:
    """Nodes and edges of their graph; names are found again by their vectors."""
    asked: list[str] = []
    encode = processor.sentence_model.encode

    def recorded(texts: list[str]) -> Any:
        asked.append(texts)
        return encode(texts)

    processor.sentence_model.encode = recorded
    graph, _ = processor.create_graph_from_triples(triples)
    processor.sentence_model.encode = encode
    nodes, predicates = asked
    sources, targets = graph.edge_index.tolist()
    edges = [[nodes[a], predicate, nodes[b]] for a, predicate, b in zip(sources, predicates, targets, strict=True)]
    return {"nodes": sorted(nodes), "edges": sorted(edges)}


class _Replies:
    """A model whose replies come in order; it keeps the inputs."""

    def __init__(self, replies: list[str]) -> None:
        self.replies = list(replies)
        self.inputs: list[str] = []

    def inference(self, sample: dict[str, Any]) -> dict[str, list[str]]:
        self.inputs.append(sample["input"][0])
        return {"pred": [f"{self.replies.pop(0)}</s>"]}


class _Shelf:
    """Finds the passages of a query, in which a marker does not matter."""

    def __init__(self, passages: dict[str, list[str]]) -> None:
        self.passages = passages
        self.queries: list[str] = []

    def retrieve(self, query: str, top_k: int) -> list[tuple[str, float]]:
        self.queries.append(query)
        texts = self.passages.get(query.replace("[SUBQ] ", ""), [f"Nothing about {query}."])
        return [(text, 1.0) for text in texts[:top_k]]


def _loop(processor: Any, case: dict[str, Any], triples_of: dict[str, str], utils: Any) -> dict[str, Any]:
    """Their loop over one question, with scripted models."""
    run = import_module("run_ras")
    run.text_to_triples = lambda _, __, text: triples_of.get(text, "(S> it| P> says| O> nothing)")
    planner, answerer = _Replies(case["plans"]), _Replies([case["answer"]])
    shelf = _Shelf(case["passages"])
    names = {"planner_model": "llama2-7b", "answerer_model": "llama2-7b"}
    args = Namespace(dataset="hotpotqa", debug=False, max_iteration=run_default(run, "max_iteration"), **names)
    first = case["passages"].get(case["question"], [])
    answer, _, triples, queries, _ = run.ras(
        args, (planner, answerer, None, None), case["question"], first, processor, shelf
    )
    heads = utils.get_planner_instruction("") + "\n", utils.get_answerer_instruction("") + "\n"
    return {
        "answer": answer,
        "searches": queries,
        "triples": triples,
        "plan_inputs": [text.removeprefix(heads[0]) for text in planner.inputs],
        "answer_input": answerer.inputs[0].removeprefix(heads[1]),
    }


def run_default(run: Any, name: str) -> Any:
    """The default of one of their command line options."""
    words = sys.argv
    sys.argv = words[:1]
    try:
        return getattr(run.read_args(), name)
    finally:
        sys.argv = words


def _scores(pairs: list[tuple[str, str]]) -> list[list[float]]:
    """Exact match, F1 and match of each reply and gold answer."""
    metrics = import_module("metrics")
    scores = []
    for reply, gold in pairs:
        row = metrics.exact_match_score(reply, gold), metrics.f1_score(reply, [gold]), metrics.match(reply, [gold])
        scores.append([float(value) for value in row])
    return scores


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
