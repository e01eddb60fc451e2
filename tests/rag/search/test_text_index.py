import asyncio
from functools import partial
from zlib import crc32

import numpy as np
import pytest

from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.imported_vectors import import_vectors
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


def test_names_of_stop_words_are_found_by_these_words(tmp_path):
    texts = [
        "It\nA film about a clown in the city.",
        "To Be or Not to Be (1942 film)\nActors in Warsaw.",
        "Arn\nIt is to be a river, or not.",
        "The Who\nA band of four.",
        "of the",
    ]
    index = opened("bm25", tmp_path, texts=texts)
    for query, row in (("It", 0), ("to be or not to be", 1), ("The Who", 3), ("Of the", 4)):
        assert rows(index, query, 1) == [row], query
    assert rows(index, "Who is in the film with a clown?")[0] == 0


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
    halved = Embedder("letters bfloat16", hashed)
    with pytest.raises(FileExistsError, match="not with letters bfloat16: set encoder_dtype, query_prompt and text_p"):
        opened("dense", tmp_path, halved)
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


def saved(path, vectors):
    np.save(path, vectors)
    return path


def imported(file, folder, embedder, texts=OLD, **options):
    import_vectors(file, folder, {"rows": texts}, lambda: iter(texts), len(texts), embedder, **options)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_imported_vectors_are_as_if_embedded_here(tmp_path, monkeypatch, dtype, similarity):
    monkeypatch.setattr("tripletune.rag.search.imported_vectors.CHUNK", 16)
    theirs = saved(tmp_path / "theirs.npy", hashed(OLD, "text").astype(dtype))
    encode = Counting()
    embedder = Embedder("e", encode, similarity=similarity)
    imported(theirs, tmp_path / "index", embedder)
    # Only the rows that are compared were embedded.
    assert (len(encode.texts), {OLD[0], OLD[-1]} < set(encode.texts)) == (33, True)
    encode.texts.clear()
    index, own = (opened("dense", tmp_path / name, embedder, OLD) for name in ("index", "own"))
    assert encode.texts == OLD
    for query in ("row 3", "row x of 5"):
        scores = dict(ranked(own, query, 60))
        found = ranked(index, query, 60)
        assert [score for _, score in found] == pytest.approx([scores[row] for row, _ in found], abs=5e-3)
    # A second import of the same file does nothing; a corpus that grows needs the new rows alone.
    before = (tmp_path / "index/dense/manifest.json").stat().st_mtime_ns
    imported(theirs, tmp_path / "index", embedder)
    assert (tmp_path / "index/dense/manifest.json").stat().st_mtime_ns == before
    encode.texts.clear()
    assert rows(opened("dense", tmp_path / "index", embedder, [*OLD, "new"]), "new", 1) == [60]
    assert encode.texts == ["new"]


def test_other_vectors_replace_an_index_and_its_graph_only_with_overwrite(tmp_path):
    embedder = Embedder("e", hashed)

    def nearest():
        how = (lambda: iter(OLD), len(OLD), embedder, "hnsw")
        return ranked(open_text_index("dense", tmp_path / "index", {"rows": OLD}, *how), OLD[7], 1)

    first = nearest()
    # Nearly the same vectors: nearest to their own texts, but with other scores.
    noise = 0.3 * np.random.default_rng(1).normal(size=(60, 16))
    files = [saved(tmp_path / f"{n}.npy", (hashed(OLD, "text") + n * noise).astype(np.float32)) for n in (1, 2)]
    scores = [first[0][1]]
    for file in files:
        with pytest.raises(FileExistsError, match=r"holds other vectors of encoder e: .* --overwrite"):
            imported(file, tmp_path / "index", embedder)
        imported(file, tmp_path / "index", embedder, overwrite=True)
        assert nearest()[0][0] == 7
        scores.append(nearest()[0][1])
    assert scores == sorted(set(scores), reverse=True)
    with pytest.raises(FileExistsError, match="was built with encoder e, not with other"):
        imported(files[0], tmp_path / "index", Embedder("other", hashed))


def test_a_killed_build_is_not_continued_with_imported_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr("tripletune.rag.search.text_index.embed_rows", partial(embed_rows, chunk=16))
    with pytest.raises(RuntimeError, match="killed"):
        opened("dense", tmp_path / "index", Embedder("e", Counting(bad=OLD[40])), OLD)
    theirs = saved(tmp_path / "theirs.npy", hashed(OLD, "text").astype(np.float32))
    imported(theirs, tmp_path / "index", Embedder("e", hashed))
    stored = np.fromfile(tmp_path / "index/dense/vectors.f16", np.float16).reshape(60, 16)
    expected = hashed(OLD, "text") / np.linalg.norm(hashed(OLD, "text"), axis=1, keepdims=True)
    assert stored == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[1:], r"has 59 rows, but the corpus has 60 passages"),
        (lambda rows: rows[:, 1:], r"has 15 numbers in a row, but vectors of encoder e have 16"),
        (lambda rows: rows[::-1], r"3\d of 32 rows .* nearer to another passage's text .* in the order of the corpus"),
        (lambda rows: rows.astype(np.float64), r"holds float64 \(60, 16\): write one array of float16 or float32"),
        (lambda rows: (100 * rows).astype(np.int8), r"holds int8"),
        (lambda rows: rows[None], r"holds float32 \(1, 60, 16\)"),
        (lambda rows: np.where(rows == rows[40, 3], np.nan, rows), r"row 41 has numbers that are NaN"),
        (lambda rows: np.where(rows == rows[41, 3], np.inf, rows), r"row 42 has numbers that are NaN"),
        (lambda rows: rows.astype(object), r"can't be read \(.*\): write it with numpy\.save"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(tmp_path, change, words):
    file = saved(tmp_path / "theirs.npy", change(hashed(OLD, "text").astype(np.float32)))
    with pytest.raises(ValueError, match=words):
        imported(file, tmp_path / "index", Embedder("e", hashed))
    assert not (tmp_path / "index" / "dense" / "manifest.json").exists()


def test_files_that_are_no_vectors_are_refused(tmp_path):
    embedder, file = Embedder("e", hashed, similarity="dot"), tmp_path / "theirs.npy"
    with pytest.raises(FileNotFoundError, match=r"theirs\.npy: no such file"):
        imported(file, tmp_path / "index", embedder)
    whole = saved(file, hashed(OLD, "text").astype(np.float32)).read_bytes()
    for content in (whole[:-8], whole[:40], b"", b"text"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"can't be read"):
            imported(file, tmp_path / "index", embedder)
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="holds several arrays"):
        imported(tmp_path / "several.npz", tmp_path / "index", embedder)
    # A dot product does not scale rows, so that float16 must hold them.
    saved(file, 1e5 * hashed(OLD, "text").astype(np.float32))
    with pytest.raises(ValueError, match=r"row 1 has numbers that are NaN or too large for float16"):
        imported(file, tmp_path / "index", embedder)


def test_vectors_made_in_another_way_are_noticed(tmp_path, caplog):
    noise = np.random.default_rng(1).normal(size=(60, 16))
    file = saved(tmp_path / "theirs.npy", (hashed(OLD, "text") + 0.5 * noise).astype(np.float16))
    imported(file, tmp_path / "index", Embedder("e", hashed))
    assert "vectors differ from those of encoder e (smallest cosine 0." in caplog.text
    caplog.clear()
    file = saved(tmp_path / "own.npy", hashed(OLD, "text").astype(np.float16))
    imported(file, tmp_path / "own", Embedder("e", hashed))
    assert "differ" not in caplog.text


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
