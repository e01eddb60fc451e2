"""RAS beside its authors' code: graph, loss, gradients, prompts, loop and scores on equal tiny random weights.

One random LLaMA (2 layers, width 64) and one set of graph modules serve both sides; ours gets the authors' weights,
token ids, labels and graphs. The loop runs with scripted models, so that each case shows one rule.
"""

import asyncio
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch_geometric.data import Batch, Data

from tests.fakes import Facts, Model, Shelf
from tests.parity.stand_ins import SentenceVectors, vectors_of
from tests.parity.table import NOT_RUN, Row
from tests.parity.their_side import run_theirs
from tests.parity.theirs_ras import ARGS, PROJECTOR_WIDTH
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import ModelInput, Step
from tripletune.core.data.rendering import render
from tripletune.core.data.triples import Triple, format_triples, parse_triples
from tripletune.eval.metrics import exact_match, f1, golden_match
from tripletune.models.graph_llm import add_adapter
from tripletune.models.graph_llm.graphs import batch_graphs, build_graph
from tripletune.models.graph_llm.model import GraphLLM, GraphLLMConfig
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.rag import Trace
from tripletune.rag.systems import LoopOptions, Tools
from tripletune.rag.systems.ras import ras

SECTION = "RAS"
QUESTION = "Which river flows through the town where Vera Holt was born?"
STEPS = (
    Step("Where was Vera Holt born?", (Triple("Vera Holt", "born in", "Quell"), Triple("Vera Holt", "is", "painter"))),
    Step("Which river flows through Quell?", (Triple("Quell", "lies on", "Sarn"), Triple("Quell", "lies on", "Sarn"))),
)
ALL_TRIPLES = (*STEPS[0].triples, *STEPS[1].triples)
INPUTS = {
    "first plan": (ModelInput("planning", QUESTION), "[SUBQ] Where was Vera Holt born?"),
    "later plan": (ModelInput("planning", QUESTION, STEPS[:1]), "[SUBQ] Which river flows through Quell?"),
    "answer": (ModelInput("answering", QUESTION, STEPS), "Sarn"),
    "answer without retrieval": (ModelInput("answering", QUESTION), "Sarn"),
}
PASSAGES = {
    QUESTION: ["Vera Holt was born in Quell.", "Vera Holt is a painter."],
    "Which river flows through Quell?": ["Quell lies on the Sarn."],
}
TRIPLES_OF = {
    "Vera Holt was born in Quell.": "(S> Vera Holt| P> born in| O> Quell), (S> Quell| P> is| O> town)",
    "Vera Holt is a painter.": "(S> Vera Holt| P> is| O> painter)",
    "Quell lies on the Sarn.": "(S> Quell| P> lies on| O> Sarn)",
}
PAIRS = [
    ("Sarn", "Sarn"), ("the Sarn", "Sarn"), ("The river Sarn.", "Sarn"), ("Kelm", "Sarn"), ("U.S.", "US"),
    ("yes, both are", "yes"), ("B", "A"), ("A", "A"),
]  # fmt: skip


class Case(NamedTuple):
    """A question of the loop: what the planner and the answerer reply."""

    plans: list[str]
    answer: str = "Sarn"


CASES = {
    "two rounds": Case(["[SUBQ] Where was Vera Holt born?", "[SUBQ] Which river flows through Quell?", "[SUFFICIENT]"]),
    "no retrieval": Case(["[NO_RETRIEVAL]"]),
    "a sub-query with the word sufficient": Case(
        ["[SUBQ] first", "[SUBQ] How many votes are sufficient?", "[SUFFICIENT]"]
    ),
    "no end of plans": Case([f"[SUBQ] sub-query {number}" for number in range(9)]),
    "a repeated sub-query": Case(["[SUBQ] first", "[SUBQ] again", "[SUBQ] again", "[SUFFICIENT]"]),
    "an unreadable plan": Case(["[SUBQ] first", "I think so.", "[SUFFICIENT]"]),
}


def compare(clone: str, folder: Path) -> list[Row]:
    """Run both sides, and return the rows of the table."""
    base = _write_world(folder)
    run_theirs("theirs_ras", clone, folder)
    theirs = torch.load(folder / "theirs.pt", weights_only=False)
    ours = _our_model(base, theirs["weights"])
    return [
        *_graph_rows(theirs),
        *_loss_rows(ours, theirs),
        *_prompt_rows(base[1], theirs),
        *_loop_rows(dict(zip(CASES, theirs["loops"], strict=True))),
        *_score_rows(theirs["scores"]),
        Row("building training data", f"{NOT_RUN}: the script stops at an unbound name", "data released, build subq"),
        Row("extractor, dense index, Claude", f"{NOT_RUN}: models of the hub, an index of Wikipedia, a paid model", ""),
    ]


def _write_world(folder: Path) -> tuple[Any, Any]:
    """Write the tiny model, its tokenizer and the inputs of both sides; return model and tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [render(sample) for sample, _ in INPUTS.values()],
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.3,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    records = []
    for sample, label in INPUTS.values():
        graphs = [list(map(str, step.triples)) for step in sample.steps]
        records.append({"task": sample.task, "body": render(sample), "label": label, "graphs": graphs})
    loops = []
    for case in CASES.values():
        loops.append({"question": QUESTION, "passages": PASSAGES, "plans": case.plans, "answer": case.answer})
    world = {
        "records": records,
        "graph": list(map(str, ALL_TRIPLES)),
        "bracketed": str(Triple("Quell", "near", "Oslo (NO)")),
        "triples_of": TRIPLES_OF,
        "loops": loops,
        "pairs": PAIRS,
    }
    (folder / "world.json").write_text(json.dumps(world))
    return model, tokenizer


def _our_model(base: tuple[Any, Any], weights: dict[str, torch.Tensor]) -> Any:
    """Our model with the authors' weights."""
    language_model, tokenizer = base
    config = GraphLLMConfig(
        text_config=language_model.config, graph_token_id=len(tokenizer), text_embedding_width=SentenceVectors.width,
        graph_hidden_width=ARGS["gnn_hidden_dim"], graph_layers=ARGS["gnn_num_layers"],
        graph_heads=ARGS["gnn_num_heads"], projector_width=PROJECTOR_WIDTH,
    )  # fmt: skip
    model = add_adapter(GraphLLM(config, language_model), rank=ARGS["lora_r"], alpha=ARGS["lora_alpha"]).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.copy_(weights[_their_name(name)])
    return model


def _their_name(name: str) -> str:
    """The authors' name of one of our weights."""
    name = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
    if name.startswith("language_model."):
        return f"model.base_model.model.{name.removeprefix('language_model.')}"
    name = name.replace("projector.up", "projector.0").replace("projector.out", "projector.2")
    return name.replace("convolutions", "convs")


def _graph_rows(theirs: dict[str, Any]) -> list[Row]:
    """The graph of two steps' triples in one, and a name that ends with a bracket."""
    graph = build_graph([Step("", ALL_TRIPLES)])
    edges = []
    for source, predicate, target in zip(graph.sources, graph.edges, graph.targets, strict=True):
        edges.append([graph.nodes[source], predicate, graph.nodes[target]])
    their_edges = theirs["graph"]["edges"]
    distinct = sorted(set(map(tuple, their_edges)))
    (bracketed,) = parse_triples(str(Triple("Quell", "near", "Oslo (NO)"))).triples
    return [
        Row("nodes of a graph", theirs["graph"]["nodes"], sorted(graph.nodes)),
        Row("distinct edges, with reverse edges", distinct, sorted(map(tuple, edges))),
        Row("edges of 4 triples, one repeated", len(their_edges), len(edges), "repeated triples in a graph"),
        Row("names of Quell, near, Oslo (NO)", theirs["name"], sorted([bracketed.subject, bracketed.object]),
            "a name that ends with a bracket"),
    ]  # fmt: skip


def _batch(samples: Sequence[Sequence[Data]]) -> Batch:
    """The authors' graphs as our model reads them."""
    merged = []
    before = 0
    for graphs in samples:
        nodes = 0
        parts: dict[str, list[torch.Tensor]] = {"x": [], "edge_index": [], "edge_attr": [], "subgraph_of": []}
        for graph in graphs:
            parts["x"].append(graph.x)
            parts["edge_index"].append(graph.edge_index + nodes)
            parts["edge_attr"].append(graph.edge_attr)
            parts["subgraph_of"].append(torch.full((len(graph.x),), before, dtype=torch.long))
            nodes += len(graph.x)
            before += 1
        if graphs:
            joined = {name: torch.cat(values, dim=-1 if name == "edge_index" else 0) for name, values in parts.items()}
            merged.append(Data(**joined, num_nodes=nodes))
        else:
            none = torch.zeros(0, SentenceVectors.width)
            empty = torch.zeros(0, dtype=torch.long)
            merged.append(Data(x=none, edge_index=empty.reshape(2, 0), edge_attr=none, subgraph_of=empty, num_nodes=0))
    return Batch.from_data_list(merged)


def _our_loss(model: Any, record: dict[str, Any], graphs: Batch) -> torch.Tensor:
    """Our loss of the authors' token ids, with their padding on the left."""
    labels = torch.tensor(record["label_ids"])
    rows, masks = [], []
    for body in record["bodies"]:
        tokens = [*record["opening"], model.config.graph_token_id, *body]
        padding = labels.shape[1] - len(tokens)
        rows.append([0] * padding + tokens)
        masks.append([0] * padding + [1] * len(tokens))
    model.zero_grad()
    loss: torch.Tensor = model(
        input_ids=torch.tensor(rows), attention_mask=torch.tensor(masks), labels=labels, graphs=graphs
    ).loss
    return loss


def _loss_rows(model: Any, theirs: dict[str, Any]) -> list[Row]:
    """Losses and gradients of four records, of two in a batch, and of our own graph."""
    rows = []
    for (name, (sample, _)), record in zip(INPUTS.items(), theirs["records"], strict=True):
        loss = _our_loss(model, record, _batch(record["graphs"]))
        loss.backward()
        rows.append(_loss_row(f"loss: {name}", record["loss"], loss.item()))
        rows.append(_gradient_row(model, name, record["gradients"]))
        if sample.steps:
            own = batch_graphs([build_graph(sample.steps)], _vectors)
            own_loss = _our_loss(model, record, own).item()
            rows.append(_loss_row(f"loss on the graph built here: {name}", record["loss"], own_loss))
    pair = theirs["pair"]
    graphs = [record["graphs"][0] for record in theirs["records"][:2]]
    return [*rows, _loss_row("loss: a batch of two", pair["loss"], _our_loss(model, pair, _batch(graphs)).item())]


def _vectors(labels: list[str]) -> torch.Tensor:
    """The made-up vectors of node and edge labels (labels, `SentenceVectors.width`), equal on both sides."""
    return torch.tensor(vectors_of(labels, SentenceVectors.width))


def _loss_row(step: str, theirs: float, ours: float) -> Row:
    """A row on two losses, which are equal if they differ by less than 2e-5."""
    return Row(step, f"{theirs:.5f}", f"{ours:.5f}", is_equal=abs(theirs - ours) < 2e-5)


def _gradient_row(model: Any, name: str, theirs: dict[str, torch.Tensor]) -> Row:
    """The gradients of all trained weights; those that the authors' forward pass never uses have none."""
    worst = 0.0
    count = 0
    missing = []
    for our_name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        gradient = theirs.get(_their_name(our_name))
        if gradient is None:
            if weight.grad is not None and weight.grad.abs().max() > 0:
                missing.append(our_name)
            continue
        count += 1
        scale = gradient.abs().max().clamp(min=1e-6)
        worst = max(worst, float((gradient - weight.grad).abs().max() / scale))
    is_equal = worst < 1e-3 and not missing and count == len(theirs)
    ours = f"{count} tensors, worst relative difference {worst:.0e}"
    return Row(f"gradients: {name}", f"{len(theirs)} tensors", ours, is_equal=is_equal)


def _prompt_rows(tokenizer: Any, theirs: dict[str, Any]) -> list[Row]:
    """The words and spaces of a prompt if ours has the authors' instructions."""
    rows = []
    instructions = []
    for record, (sample, _) in zip(theirs["records"], INPUTS.values(), strict=True):
        instructions.append(record["texts"][0].removesuffix(render(sample)).rstrip("\n"))
    processor = GraphLLMProcessor.create(
        tokenizer, prompt_format="llama2", planning_instruction=instructions[0], answering_instruction=instructions[2]
    )
    for (name, (sample, label)), record in zip(INPUTS.items(), theirs["records"], strict=True):
        ours = tokenizer.decode(processor.encode_input(sample).input_ids).replace("<|graph|>", "")
        ours += f"{label}</s>"
        their_text = tokenizer.decode([*record["opening"], *record["bodies"][0]])
        rows.append(Row(f"words of the sequence: {name}", _hashed(their_text), _hashed(ours)))
    learned = [token for token in theirs["records"][2]["label_ids"][0] if token != -100]
    ours_learned = [*processor.encode_text(INPUTS["answer"][1]), tokenizer.eos_token_id]
    rows.append(Row("tokens with a loss", learned, ours_learned))
    their_space, our_space = (text.partition("[INST]")[2][:1].isspace() for text in (their_text, ours))
    rows.append(Row("a space after [INST]", their_space, our_space, "spaces of a prompt's frame"))
    return rows


def _hashed(text: str) -> str:
    """The number of letters and a digest of a text without its spaces; the table prints no prompt."""
    text = "".join(text.split())
    return f"{len(text)} letters, {sha256(text.encode()).hexdigest()[:8]}"


def _run_loop(case: Case) -> tuple[Trace, Model, list[str]]:
    """Our loop with the same replies."""
    model = Model(*case.plans, answer=case.answer)
    shelf = Shelf(lambda query: [Passage("", text) for text in PASSAGES.get(query, [f"Nothing about {query}."])])

    def triples_of(passage: Passage) -> tuple[Triple, ...]:
        text = TRIPLES_OF.get(passage.text, "(S> it| P> says| O> nothing)")
        return tuple(parse_triples(text).triples)

    tools = Tools(model, model, shelf, Facts(triples_of))
    trace = asyncio.run(ras(QUESTION, QUESTION, tools, LoopOptions()))
    return trace, model, [query for query, _ in shelf.queries]


def _loop_rows(theirs: dict[str, dict[str, Any]]) -> list[Row]:
    """Searches, prompts, triples, calls and answers of the loop's cases."""
    runs = {name: _run_loop(case) for name, case in CASES.items()}
    loop, (trace, model, queries) = theirs["two rounds"], runs["two rounds"]
    plans = [render(sample) for sample, _, _ in model.inputs[:-1]]
    our_triples = [list(step.triples) for step in model.inputs[-1][0].steps]
    their_counts = [len(triples) for triples in loop["triples"]]
    their_lines, our_lines = loop["plan_inputs"][1].split("\n"), plans[1].split("\n")
    steps = model.inputs[-1][0].steps
    rows = [
        Row("first search", loop["searches"][0], queries[0]),
        Row("later searches", loop["searches"][1:], queries[1:], "later searches"),
        Row("plans asked for", len(loop["plan_inputs"]), len(plans)),
        Row("first plan's input", loop["plan_inputs"][0], plans[0], "input of the first plan"),
        Row("first step's line in a later input", their_lines[0], our_lines[0], "first step in an input"),
        Row("triples of two passages in a round", their_counts[0], len(our_triples[0]),
            "structuring of several passages"),
        Row("triples of one passage in a round", their_counts[1], len(our_triples[1])),
        Row("how triples are written", loop["triples"][1], format_triples(steps[1].triples), "triples in a prompt"),
        Row("last line of an input", their_lines[-1], our_lines[-1]),
        Row("answer", loop["answer"], trace.answer, "end of an answer"),
    ]  # fmt: skip
    for name, named in (
        ("a sub-query with the word sufficient", "end of planning"),
        ("no end of plans", "end of planning"),
        ("a repeated sub-query", "a repeated sub-query"),
        ("an unreadable plan", "an unreadable plan"),
    ):
        bare = [query.replace("[SUBQ] ", "") for query in theirs[name]["searches"]]
        our_queries = runs[name][2]
        rows.append(Row(f"searches with {name}", _counted(bare), _counted(our_queries), named, bare == our_queries))
        plans_asked = len(theirs[name]["plan_inputs"]), len(runs[name][1].inputs) - 1
        rows.append(Row(f"plans with {name}", *plans_asked, named))
    alone, our_alone = theirs["no retrieval"], render(runs["no retrieval"][1].inputs[-1][0])
    rows.append(Row("answer's input without retrieval", alone["answer_input"], our_alone, "answer without retrieval"))
    return rows


def _counted(queries: list[str]) -> str:
    """How many searches, and the last one."""
    return f"{len(queries)}, last: {queries[-1]}"


def _score_rows(theirs: list[list[float]]) -> list[Row]:
    """Exact match, F1 and golden match of pairs of reply and gold answer."""
    rows = []
    for (reply, gold), scores in zip(PAIRS, theirs, strict=True):
        ours = [metric(reply, [gold]) for metric in (exact_match, f1, golden_match)]
        their_scores, our_scores = (" ".join(f"{score:.2f}" for score in values) for values in (scores, ours))
        named = "a gold answer that is an article" if gold == "A" else ""
        rows.append(Row(f"EM, F1, match of {reply!r} for {gold!r}", their_scores, our_scores, named))
    return rows
