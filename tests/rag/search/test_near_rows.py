import asyncio
import json
from zlib import crc32

import faiss
import numpy as np
import pytest

from tripletune.rag.search import near_rows
from tripletune.rag.search.coarse_lists import _divide_in_proportion, number_of_lists, train_lists
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.near_rows import ListRows
from tripletune.rag.search.text_index import open_text_index

TEXTS = [f"row {number}" for number in range(2000)]
QUERIES = [f"question {number}" for number in range(40)]


def clustered(texts, kind="text"):
    """Vectors around 50 centres, as texts of some topics have."""
    vectors = []
    for text in texts:
        draw = np.random.default_rng(crc32(text.encode()))
        centre = np.random.default_rng(draw.integers(50)).normal(size=32)
        vectors.append(centre + 0.7 * draw.normal(size=32))
    return np.stack(vectors)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(near_rows, "FEWEST_ROWS", 100)


def opened(folder, texts=TEXTS, search="ivf", similarity="cosine"):
    embedder = Embedder("clustered", clustered, similarity=similarity)
    how = (lambda: iter(texts), len(texts), embedder, search)
    return open_text_index("dense", folder, {"rows": texts}, *how)


def rankings(index, k=10):
    return asyncio.run(index.rank(QUERIES, k))


def recall(found, exact):
    shares = []
    for own, all_rows in zip(found, exact, strict=True):
        shares.append(len({row for row, _ in own} & {row for row, _ in all_rows}) / len(all_rows))
    return np.mean(shares)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_lists_find_nearly_what_exact_search_finds_with_its_scores(tmp_path, similarity):
    exact = rankings(opened(tmp_path, search="flat", similarity=similarity))
    found = rankings(opened(tmp_path, similarity=similarity))
    assert recall(found, exact) > 0.95
    scores = [dict(ranking) for ranking in exact]
    for own, expected in zip(found, scores, strict=True):
        assert len(own) == 10
        shared = {row: score for row, score in own if row in expected}
        assert shared == pytest.approx({row: expected[row] for row in shared}, abs=1e-5, rel=1e-6)
    about = json.loads((tmp_path / "ivf/manifest.json").read_text())["about"]
    assert (about["rows"], about["lists"]) == (2000, 22)


def test_a_query_finds_the_same_alone_and_among_others(tmp_path):
    index = opened(tmp_path)
    together = rankings(index)
    assert [asyncio.run(index.rank([query], 10))[0] for query in QUERIES] == together

    async def with_others():
        return await asyncio.gather(index.rank(QUERIES[:1], 10), index.rank(QUERIES[1:], 50))

    assert asyncio.run(with_others())[0] == together[:1]


def test_rows_that_are_added_are_coded_alone(tmp_path, monkeypatch):
    more = [*TEXTS, *(f"more {number}" for number in range(300))]
    opened(tmp_path)
    monkeypatch.setattr(near_rows, "_index_with_lists", lambda *given: pytest.fail("trained again"))
    grown = opened(tmp_path, more)
    exact = rankings(opened(tmp_path, more, "flat"))
    assert recall(rankings(grown), exact) > 0.95
    assert faiss.read_index(str(tmp_path / "ivf/lists.faiss")).ntotal == 2300
    monkeypatch.undo()
    # Rows in another order, or four times as many, are other lists.
    trained = []
    train = near_rows._index_with_lists
    monkeypatch.setattr(near_rows, "FEWEST_ROWS", 100)
    monkeypatch.setattr(near_rows, "_index_with_lists", lambda *given: trained.append(given[1]) or train(*given))
    opened(tmp_path, more[::-1])
    opened(tmp_path, [*more[::-1], *(f"many {number}" for number in range(10000))])
    assert trained == [23, 55]


def test_a_killed_build_continues_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(near_rows, "_BLOCK", 256)
    monkeypatch.setattr(near_rows, "_SAVED", 512)
    vectors = clustered(TEXTS).astype(np.float16)
    whole = ListRows(tmp_path / "whole", {}, vectors)
    starts = []

    class Killed(np.ndarray):
        def __getitem__(self, key):
            if isinstance(key, slice) and key.start is not None:
                starts.append(key.start)
                if key.start == 1280 and len(starts) == 6:
                    raise KeyboardInterrupt
            return super().__getitem__(key)

    with pytest.raises(KeyboardInterrupt):
        ListRows(tmp_path / "killed", {}, vectors.view(Killed))
    starts.clear()
    resumed = ListRows(tmp_path / "killed", {}, vectors.view(Killed))
    assert starts[0] == 1024
    names = [tmp_path / folder / "lists.faiss" for folder in ("whole", "killed")]
    assert names[0].read_bytes() == names[1].read_bytes()
    queries = clustered(QUERIES).astype(np.float32)
    for own, expected in zip(resumed.near(queries, 5), whole.near(queries, 5), strict=True):
        assert own.tolist() == expected.tolist()


def test_few_rows_are_compared_with_all(tmp_path, monkeypatch):
    monkeypatch.setattr(near_rows, "FEWEST_ROWS", 2001)
    assert rankings(opened(tmp_path)) == rankings(opened(tmp_path, search="flat"))
    assert not (tmp_path / "ivf").exists()


def test_all_rows_on_a_device_rank_as_those_in_the_file(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="vectors=gpu needs a GPU that torch can use"):
        opened(tmp_path, search="gpu")
    monkeypatch.setattr(near_rows, "_GPU", "cpu")
    monkeypatch.setattr(near_rows, "_BLOCK", 300)
    on_device = opened(tmp_path, search="gpu")
    exact = opened(tmp_path, search="flat")
    for k in (1, 10, 3000):
        for own, expected in zip(rankings(on_device, k), rankings(exact, k), strict=True):
            assert len(own) == min(k, 2000)
            assert [score for _, score in own] == pytest.approx([score for _, score in expected], abs=1e-5, rel=1e-6)
            assert dict(own) == pytest.approx(dict(expected), abs=1e-5, rel=1e-6)


def test_lists_are_divided_in_proportion_to_rows():
    # The exact shares of 4 lists are 2, 1.2 and 0.8: the list that is left goes to the largest remainder.
    assert _divide_in_proportion(np.array([5, 3, 2]), 4) == [2, 1, 1]
    assert _divide_in_proportion(np.array([0, 3]), 3) == [0, 3]


def test_centroids_are_as_many_as_lists_and_near_the_rows():
    vectors = clustered(TEXTS).astype(np.float16)
    assert [number_of_lists(rows) for rows in (1, 2000, 10**6, 21 * 10**6)] == [1, 22, 500, 2291]
    centroids, sample = train_lists(vectors, 22)
    assert centroids.shape == (22, 32)
    assert len(sample) == 1408
    kmeans = faiss.Kmeans(32, 22, niter=10, seed=1)
    kmeans.train(sample)
    ours, theirs = (
        ((sample[:, None] - some[None]) ** 2).sum(-1).min(1).mean() for some in (centroids, kmeans.centroids)
    )
    assert ours < 1.1 * theirs
