"""The benchmark of embedding: the texts that it makes, and the vectors that it compares."""

import numpy as np
import pytest
import torch

from benchmarks import embedding
from benchmarks.embedding import EmbeddingOptions

REAL_TEXTS = [f"Title {number}: {'words of a text ' * 10}" for number in range(5)]


@pytest.fixture
def threads():
    """The case computes on one thread; the tests after it do not."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_texts_have_15_to_105_words_and_are_the_same_in_every_run():
    texts = embedding._texts_to_embed(REAL_TEXTS, EmbeddingOptions(count=200))
    lengths = [len(text.split()) for text in texts]
    assert len(texts) == 200
    assert min(lengths) >= 15
    # A passage has 100 words behind the two of its title, so the longest texts end before 105.
    assert max(lengths) == 102
    assert len(set(lengths)) > 50
    assert texts == embedding._texts_to_embed(REAL_TEXTS, EmbeddingOptions(count=200))


def test_the_vector_that_differs_most_counts_whatever_its_length():
    expected = np.array([[1.0, 0.0], [1.0, 0.0]], np.float32)
    assert embedding._least_cosine(np.array([[5.0, 0.0], [3.0, 4.0]]), expected) == pytest.approx(0.6)


def test_every_way_embeds_all_texts(tiny_encoder, tmp_path, monkeypatch, threads):
    monkeypatch.setattr(embedding, "ENCODER", str(tiny_encoder))
    (tmp_path / "texts.txt").write_text("\n".join(REAL_TEXTS))
    result = embedding.embedding(EmbeddingOptions(repeats=1, texts=str(tmp_path / "texts.txt"), count=6))
    assert [row["name"] for row in result.rows] == [
        "encode",
        "encode, bfloat16, batches of 8",
        "encode, bfloat16, batches of 32",
        "encode, bfloat16, batches of 128",
        "ours, encoder_dtype=auto",
    ]
    assert {row["texts"] for row in result.rows} == {6}
    assert result.rows[0]["least_cosine"] == pytest.approx(1.0)
    assert all(0.99 < row["least_cosine"] <= 1.001 for row in result.rows[1:])
