"""Rows of `benchmarks speed`: which row trains what, and that G-Retriever computes the loss of our Graph-LLM."""

import pytest
import torch

from benchmarks import peers
from benchmarks.speed import SpeedOptions
from tripletune.models.graph_llm.graphs import SampleGraph, batch_graphs


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ways": ["ours", "hf-trainer"]}, None),
        ({"ways": ["trl-chunked"]}, "ways: trl-chunked needs --peer-python"),
        ({"ways": ["trl-chunked"], "peer_python": "python"}, None),
        ({"ways": ["g-retriever"]}, "ways: g-retriever does not train records"),
        ({"work": "graphs", "ways": ["ours", "hf-trainer"]}, "ways: hf-trainer does not train graphs"),
        ({"work": "pairs", "ways": ["ours-interleaved"]}, "ways: ours-interleaved does not train pairs"),
        ({"work": "pairs", "data": "runs/subq"}, "data: pairs are made here, so leave --data out"),
    ],
)
def test_rows_that_cannot_train_the_work_are_refused(options, problem):
    if problem is None:
        assert SpeedOptions(**options).ways == options["ways"]
        return
    with pytest.raises(ValueError, match=problem):
        SpeedOptions(**options)


class FakeRetriever(torch.nn.Module):
    """PyG's GRetriever after its own imports: what `_OnRows` needs of it."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.llm = self
        self.tokenizer = type("Tokenizer", (), {"pad_token_id": 0})
        self.word_embedding = model.language_model.get_input_embeddings()
        self.projector = torch.nn.Sequential(*model.projector, torch.nn.Unflatten(-1, (1, -1)))

    def _pad_embeds(self, padding, embeds, masks, labels):
        from torch_geometric.llm.models.llm import LLM

        self.device = "cpu"
        return LLM._pad_embeds(self, padding, embeds, masks, labels)

    def forward(self, question, x, edge_index, batch, label, edge_attr):
        nodes = peers._Nodes(self.model.graph_encoder)(x, edge_index, edge_attr)
        # As GRetriever pools, and without a token for the second graph, which is empty.
        tokens = [self.projector(nodes[batch == 0].mean(0, keepdim=True))[0], None]
        embeds, mask, labels = self.llm._get_embeds(question, None, tokens, label)
        return self.model.language_model(inputs_embeds=embeds, attention_mask=mask, labels=labels).loss


def test_g_retriever_on_our_rows_has_our_loss(make_graph_llm):
    model = make_graph_llm("llama")[0].eval()
    token = model.config.graph_token_id
    rows = [
        {"input_ids": [5, token, 6, 7, 8, 9], "labels": [-100] * 4 + [8, 9]},
        {"input_ids": [4, token, 3, 2], "labels": [-100] * 3 + [2]},
    ]
    width = model.config.text_embedding_width
    samples = [SampleGraph([1, 2], [3, 4], [0, 1], [1, 0], [0, 0]), SampleGraph([], [], [], [], [])]
    torch.manual_seed(0)
    graphs = batch_graphs(samples, lambda labels: torch.randn(len(labels), width))
    ids = torch.tensor([rows[0]["input_ids"], [*rows[1]["input_ids"], 0, 0]])
    labels = torch.tensor([rows[0]["labels"], [*rows[1]["labels"], -100, -100]])
    ours = model(input_ids=ids, labels=labels, graphs=graphs).loss
    theirs = peers._OnRows(FakeRetriever(model), token)(rows, graphs)["loss"]
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
