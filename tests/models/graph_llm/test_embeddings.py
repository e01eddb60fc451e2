import json
from types import SimpleNamespace

import pytest
import torch

from tripletune.models.graph_llm import embeddings as text_embeddings
from tripletune.models.graph_llm.embeddings import EmbeddingTable, LiveEmbeddings, TextEncoder, encoder_dimension

STRINGS = ["London", "born in", "inverse_born in", "紫式部", "London", "born in", " London", "x" * 400]


@pytest.fixture
def encoded(monkeypatch):
    """Every string that reaches an encoder."""
    seen: list[str] = []
    original = TextEncoder.encode

    def spy(self, strings):
        seen.extend(strings)
        return original(self, strings)

    monkeypatch.setattr(TextEncoder, "encode", spy)
    # The test compares numbers, so it wants the exact type whatever this machine multiplies fastest.
    monkeypatch.setattr(text_embeddings, "best_dtype", lambda: torch.float32)
    return seen


@pytest.mark.parametrize("chunk", [4096, 2])
def test_a_table_embeds_each_string_once_and_gives_what_the_encoder_gives(
    tmp_path, tiny_encoder, encoded, chunk, monkeypatch
):
    monkeypatch.setattr(text_embeddings, "CHUNK", chunk)
    table = EmbeddingTable.build(STRINGS, str(tiny_encoder), tmp_path / "t")
    assert encoded == list(dict.fromkeys(STRINGS))
    assert len(table) == 6
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["keys.npy", "table.json", "vectors.npy"]
    direct = torch.cat([torch.from_numpy(TextEncoder(str(tiny_encoder)).encode([text])) for text in STRINGS]).float()
    assert torch.allclose(table.vectors(STRINGS), direct, atol=2e-3)
    assert torch.allclose(LiveEmbeddings(str(tiny_encoder), 16).vectors(STRINGS), direct, atol=2e-3)
    assert not torch.allclose(direct[0], direct[1], atol=0.1)
    assert direct.dtype is torch.float32


def test_strings_that_are_not_there_are_told(tmp_path, tiny_encoder):
    table = EmbeddingTable.build(STRINGS, str(tiny_encoder), tmp_path / "t")
    with pytest.raises(KeyError, match="1 strings are missing"):
        table.vectors(["London", "Paris"])
    assert table.vectors([]).shape == (0, 16)
    empty = EmbeddingTable.build([], str(tiny_encoder), tmp_path / "empty")
    assert (len(empty), tuple(empty[[]].shape)) == (0, (0, 16))


def test_a_table_cut_off_in_the_middle_is_no_table(tmp_path, tiny_encoder, monkeypatch):
    folder = tmp_path / "t"

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(text_embeddings, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            EmbeddingTable.build(STRINGS, str(tiny_encoder), folder)
    table = EmbeddingTable.build(STRINGS, str(tiny_encoder), folder)
    assert table.vectors(STRINGS).shape == (len(STRINGS), 16)
    assert json.loads((folder / "table.json").read_text())["strings"] == 6


def test_live_embeddings_embed_once_and_forget_when_full(tiny_encoder, encoded):
    live = LiveEmbeddings(str(tiny_encoder), 16, capacity=3)
    assert live.vectors([]).shape == (0, 16)
    first = live.vectors(["a", "b", "a"])
    assert torch.equal(first[0], first[2])
    assert torch.equal(live.vectors(["b", "a"]), first[[1, 0]])
    assert encoded == ["a", "b"]
    assert torch.allclose(live.vectors(["a", "c", "d"])[0], first[0], atol=2e-3)
    assert len(live._vectors) == 3
    # More at once than fits is still answered.
    assert live.vectors(["e", "f", "g", "h"]).shape == (4, 16)


@pytest.mark.parametrize(
    ("kinds", "pooling", "width"),
    [
        ("Transformer Pooling Normalize", {"word_embedding_dimension": 768, "pooling_mode_mean_tokens": True}, 768),
        ("Transformer Pooling", {"embedding_dimension": 768, "pooling_mode": "mean"}, 768),
        # The encoder is loaded where that is not sure.
        ("Transformer Pooling", {"embedding_dimension": 768, "pooling_mode": ["mean", "max"]}, 5),
        ("Transformer Pooling Dense", {"embedding_dimension": 768, "pooling_mode": "mean"}, 5),
        ("Transformer", {}, 5),
    ],
)
def test_width_is_read_without_weights_where_it_is_sure(kinds, pooling, width, tmp_path, monkeypatch):
    monkeypatch.setattr(text_embeddings, "TextEncoder", lambda spec: SimpleNamespace(dimension=5))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in kinds.split()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert encoder_dimension(str(tmp_path)) == width


def test_width_is_what_the_encoder_gives(tiny_encoder, monkeypatch):
    width = TextEncoder(str(tiny_encoder)).dimension
    monkeypatch.setattr(text_embeddings, "TextEncoder", lambda spec: pytest.fail("loaded"))
    assert encoder_dimension(str(tiny_encoder)) == width == 16
