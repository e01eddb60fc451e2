import asyncio
from functools import partial
from zlib import crc32

import numpy as np
import pytest

from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.text_index import embed_rows, open_text_index, reciprocal_rank_fusion

ROWS = ["a cab", "bad", "face", "face", "the of", "cage bead"]


def letters(texts, kind):
    return np.array([[1 + text.lower().count(letter) for letter in "abcdefgh"] for text in texts])


def hashed(texts, kind):
    return np.stack([np.random.default_rng(crc32(text.encode())).normal(size=16) for text in texts])


@pytest.fixture
def embedder():
    return Embedder("letters", letters)


def ranked(index, query, k=5):
    return asyncio.run(index.rank([query], k))[0]


def rows(index, query, k=5):
    return [row for row, _ in ranked(index, query, k)]


def opened(kind, folder, embedder=None, texts=ROWS):
    return open_text_index(kind, folder, {"rows": texts}, lambda: iter(texts), len(texts), embedder)


def test_reciprocal_rank_fusion_by_hand():
    fused = reciprocal_rank_fusion([[(7, 9.0), (3, 8.0)], [(3, 0.9), (1, 0.8), (7, 0.7)]])
    assert [row for row, _ in fused] == [3, 7, 1]
    assert fused[0][1] == pytest.approx(1 / 62 + 1 / 61)
    assert [row for row, _ in reciprocal_rank_fusion([[(5, 1.0)], [(2, 1.0)]])] == [2, 5]


def test_vectors_rank_by_cosine_and_ties_keep_their_order(tmp_path, embedder):
    index = opened("dense", tmp_path, embedder)
    exact = letters(ROWS, "text") / np.linalg.norm(letters(ROWS, "text"), axis=1, keepdims=True)
    query = letters(["face"], "query")[0] / np.linalg.norm(letters(["face"], "query"))
    found = ranked(index, "face", 6)
    assert [row for row, _ in found] == list(np.argsort(-(exact @ query).round(6), kind="stable"))
    assert [score for _, score in found] == pytest.approx(sorted(exact @ query, reverse=True), abs=1e-3)
    assert rows(index, "face", 1) == [2]
    same = opened("dense", tmp_path / "same", embedder, ["same"] * 40)
    assert rows(same, "same", 3) == [0, 1, 2]


def test_a_graph_finds_what_exact_search_finds(tmp_path):
    texts = [f"row {number}" for number in range(500)]
    embedder = Embedder("hashed", hashed)
    flat = opened("dense", tmp_path, embedder, texts)
    for _ in range(2):
        graph = open_text_index("dense", tmp_path, {"rows": texts}, lambda: iter(texts), 500, embedder, "hnsw")
        for number in (3, 77, 499):
            assert ranked(graph, f"row {number}", 5) == ranked(flat, f"row {number}", 5)
    assert len(ranked(graph, "row 1", 600)) == 500
    assert (tmp_path / "hnsw" / "graph.faiss").is_file()
    hybrid = open_text_index("hybrid", tmp_path, {"rows": texts}, lambda: iter(texts), 500, embedder, "hnsw")
    assert ranked(hybrid, "row 77", 1)[0][0] == 77


def test_vectors_of_another_encoder_stay(tmp_path, embedder):
    opened("dense", tmp_path, embedder)
    other = Embedder("hashed", hashed)
    with pytest.raises(
        FileExistsError, match="with encoder letters, not with hashed: give another --index, or add --ov"
    ):
        opened("dense", tmp_path, other)
    how = ("dense", tmp_path, {"rows": ROWS}, lambda: iter(ROWS), len(ROWS), other)
    assert rows(open_text_index(*how, overwrite=True), "face", 1) == [2]


def test_rows_are_found_across_blocks(tmp_path, embedder, monkeypatch):
    monkeypatch.setattr("tripletune.rag.search.text_index._COMPARED", 3)
    monkeypatch.setattr("tripletune.rag.search.text_index._CACHED", 2)
    blocks = ranked(opened("dense", tmp_path, embedder), "cage bead", 6)
    monkeypatch.undo()
    assert blocks == ranked(opened("dense", tmp_path, embedder), "cage bead", 6)


def test_hybrid_fuses_both(tmp_path, embedder):
    parts = [ranked(opened(kind, tmp_path, embedder), "bad cage", 100) for kind in ("bm25", "dense")]
    hybrid = opened("hybrid", tmp_path, embedder)
    assert ranked(hybrid, "bad cage", 4) == reciprocal_rank_fusion(parts)[:4]
    assert rows(hybrid, "?!", 2) == rows(opened("dense", tmp_path, embedder), "?!", 2)


class Counting:
    """Vectors of texts, which it notes; it fails at one of them."""

    def __init__(self, bad=""):
        self.texts, self.bad = [], bad

    def __call__(self, texts, kind):
        if self.bad in texts:
            raise RuntimeError("killed")
        self.texts += texts if kind == "text" else []
        return hashed(texts, kind)


OLD = [f"row {number} of {number % 7}" for number in range(60)]


@pytest.mark.parametrize(
    ("rows", "new"),
    [
        ([*OLD, "row x", "row 3 of 3", "row y"], ["row x", "row y"]),
        ([*OLD[:9], *OLD[10:]], []),
        ([*OLD[:9], "row z", *OLD[10:]], ["row z"]),
        (OLD[::-1], []),
        (["row new", *OLD[40:]], ["row new"]),
    ],
    ids=["added", "deleted", "changed", "turned", "most"],
)
@pytest.mark.parametrize(
    ("kind", "search"), [("bm25", "flat"), ("dense", "flat"), ("dense", "hnsw"), ("hybrid", "flat")]
)
def test_rows_that_stay_are_not_embedded_again(tmp_path, monkeypatch, kind, search, rows, new):
    monkeypatch.setattr("tripletune.rag.search.text_index.embed_rows", partial(embed_rows, chunk=16))
    encode = Counting()

    def opened(folder, texts):
        how = (Embedder("counting", encode), search)
        return open_text_index(kind, tmp_path / folder, {"rows": texts}, lambda: iter(texts), len(texts), *how)

    opened("index", OLD)
    encode.texts.clear()
    grown = opened("index", rows)
    assert [text for text in encode.texts if text != "width"] == (new if kind != "bm25" else [])
    fresh = opened("fresh", rows)
    for query in ("row 3", "row x of 5", "row y"):
        assert ranked(grown, query, 70) == ranked(fresh, query, 70) != []


def test_another_encoder_embeds_all_rows(tmp_path):
    for name, weights in (("one", "a"), ("one", "b"), ("other", "b")):
        encode = Counting()
        how = ("dense", tmp_path, {"rows": OLD}, lambda: iter(OLD), len(OLD), Embedder(name, encode, weights))
        assert rows(open_text_index(*how, overwrite=True), OLD[7], 1) == [7]
        assert encode.texts == ["width", *OLD]


def test_a_killed_update_leaves_the_old_index_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("tripletune.rag.search.text_index.embed_rows", partial(embed_rows, chunk=16))
    files = lambda: {path: path.read_bytes() for path in (tmp_path / "dense").iterdir()}  # noqa: E731
    more = [*OLD, *(f"more {number}" for number in range(40))]

    def opened(encode, texts):
        return open_text_index(
            "dense", tmp_path, {"rows": texts}, lambda: iter(texts), len(texts), Embedder("e", encode)
        )

    opened(Counting(), OLD)
    before = files()
    with pytest.raises(RuntimeError, match="killed"):
        opened(Counting(bad="more 30"), more)
    assert files() == before
    encode = Counting()
    index = opened(encode, more)
    assert encode.texts == ["width", *more[64:]]
    assert rows(index, "more 5", 1) == [65]


def test_a_damaged_index_is_not_taken_over(tmp_path):
    opened("dense", tmp_path, Embedder("e", hashed), OLD)
    (tmp_path / "dense" / "vectors.f16").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"vectors\.f16 is damaged: remove the folder"):
        opened("dense", tmp_path, Embedder("e", hashed), OLD[1:])


def test_vectors_of_a_killed_build_are_kept(tmp_path):
    encoded = []

    def encode(texts, kind):
        encoded.append(len(texts))
        return letters(texts, kind)

    embedder = Embedder("counting", encode)
    assert embedder.width == 8
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    embed_rows(ROWS, 6, whole, embedder, chunk=2)
    cut.write_bytes(whole.read_bytes()[: 3 * 16 + 5])
    embed_rows(ROWS, 6, cut, embedder, chunk=2)
    assert cut.read_bytes() == whole.read_bytes()
    assert encoded == [1, 2, 2, 2, 2, 1]
