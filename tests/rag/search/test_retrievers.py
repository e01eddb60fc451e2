import asyncio
import json
import logging
import threading
import time

import pytest

from tests.cli import write_lines
from tripletune.core.data.triples import Triple
from tripletune.core.data.words import detect
from tripletune.core.files import file_digest
from tripletune.rag.search.index import MANIFEST, PassageStore, ensure_index
from tripletune.rag.search.retrievers import highest_scored, open_retriever, verbalise

PASSAGES = [
    ("Oslo", "Oslo is the capital of Norway."),
    ("Kyiv", "Київ — столиця України, a city on the Dnieper."),
    ("Copy", "The harbour was rebuilt."),
    ("Copy", "The harbour was not rebuilt."),
    ("Empty", "the of and"),
    ("Bergen", "Bergen is a city in Norway with a harbour."),
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [json.dumps({"title": title, "text": text}, ensure_ascii=False) for title, text in PASSAGES]
    path.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
    return path


def positions(retriever, query, k=5):
    return [hit.position for hit in asyncio.run(retriever.retrieve(query, k))]


def test_passages_are_read_by_position(corpus, tmp_path):
    store = PassageStore(corpus, tmp_path / "index")
    assert [(store[i].title, store[i].text) for i in range(len(store))] == PASSAGES
    assert store[1] == list(store)[1]


@pytest.mark.parametrize(
    ("query", "k", "found"),
    [
        ("capitals?", 1, [0]),
        ("столиця", 5, [1]),
        # Ties keep their order, and what shares no word is left out.
        ("harbours rebuilt", 2, [2, 3]),
        ("harbours rebuilt", 5, [2, 3, 5]),
        *((query, 3, []) for query in ("", "?!", "the of", "zebra")),
    ],
)
def test_bm25_finds_by_stem_and_in_any_script(corpus, tmp_path, query, k, found):
    assert positions(open_retriever("bm25", corpus, tmp_path / "index"), query, k) == found


def test_index_is_used_again_and_follows_a_corpus_that_changes(corpus, tmp_path, caplog):
    index = tmp_path / "index"
    caplog.set_level(logging.INFO)
    open_retriever("bm25", corpus, index)
    stamp = (index / "bm25" / MANIFEST).stat().st_mtime_ns
    open_retriever("bm25", corpus, index)
    assert (index / "bm25" / MANIFEST).stat().st_mtime_ns == stamp
    rows = [json.loads(line) for line in corpus.read_text().splitlines() if line]
    zebras = [{"title": "Zoo", "text": f"A zebra, number {number}."} for number in range(5)]
    write_lines(corpus, [*rows[1:], zebras[0]])
    assert positions(open_retriever("bm25", corpus, index), "zebra harbour", 9) == [5, 1, 2, 4]
    assert "index/passages was built with another corpus: 1 rows added, 1 dropped" in caplog.text
    caplog.clear()
    assert positions(open_retriever("bm25", corpus, index), "zebra") == [5]
    assert "built" not in caplog.text


@pytest.mark.parametrize("kept", [0, 2])
def test_another_corpus_is_told_from_one_that_has_changed(corpus, tmp_path, kept):
    """It may share a passage or two, as the sets of one benchmark do."""
    open_retriever("bm25", corpus, tmp_path / "index")
    digest, lines = file_digest(corpus), [line for line in corpus.read_text().splitlines() if line][:kept]
    zebras = [json.dumps({"title": "Zoo", "text": f"A zebra, number {number}."}) for number in range(9)]
    corpus.write_text("\n".join([*lines, *zebras]))
    with pytest.raises(FileExistsError, match=rf"with corpus_sha256 {digest} of {corpus}, not with \w+ of {corpus}: "):
        open_retriever("bm25", corpus, tmp_path / "index")
    assert not list((tmp_path / "index").glob("*.tripletune-new")), "nothing is left of the refused index"
    assert positions(open_retriever("bm25", corpus, tmp_path / "index", overwrite=True), "zebra", 1) == [kept]


def test_index_folder_of_somebody_else_is_not_touched(corpus, tmp_path):
    (tmp_path / "index" / "bm25").mkdir(parents=True)
    precious = tmp_path / "index" / "bm25" / "thesis.txt"
    precious.write_text("mine")
    with pytest.raises(FileExistsError, match=r"did not make \(thesis"):
        open_retriever("bm25", corpus, tmp_path / "index")
    assert precious.read_text() == "mine"


def test_failed_build_leaves_no_index(tmp_path):
    folder = tmp_path / "index"

    def fail(out):
        (out / "half").write_text("x")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        ensure_index(folder, {"a": 1}, fail)
    assert not folder.exists()
    seen: list[list[str]] = []
    ensure_index(folder, {"a": 1}, lambda out: seen.append([p.name for p in out.iterdir() if p.name == "half"]))
    assert seen == [["half"]]
    assert sorted(p.name for p in folder.iterdir()) == ["half", MANIFEST]


def test_passages_of_one_id_are_refused_and_copies_are_not(tmp_path):
    """Defect 9: such a corpus was taken silently, and the loop saw one passage."""
    path = tmp_path / "corpus.jsonl"
    write_lines(path, [{"text": text, "id": name} for text, name in ("ax", "bs", "bs", "cx")])
    with pytest.raises(ValueError, match="1 passages have the id of another passage, for example on lines 1 and 4"):
        open_retriever("bm25", path, tmp_path / "index")


def test_passages_that_a_corpus_repeats_are_told(tmp_path, caplog):
    path = tmp_path / "corpus.jsonl"
    rows = [("a", "x y"), ("b", "z"), ("c", "x y"), ("d", "x y z"), ("e", "z"), ("f", "x y")]
    write_lines(path, [{"title": "T", "text": text, "id": name} for name, text in rows])
    for _ in range(2):
        open_retriever("bm25", path, tmp_path / "index")
        assert "3 passages are copies" in caplog.text
        caplog.clear()


def test_programs_may_share_indexes(tmp_path):
    built: list[str] = []

    def build(out):
        time.sleep(0.2)
        (out / "offsets.npy").write_text("x")
        built.append("once")

    threads = [threading.Thread(target=ensure_index, args=(tmp_path / "i" / "bm25", {"a": 1}, build)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == ["once"]


def test_a_damaged_index_file_is_named(corpus, tmp_path):
    open_retriever("bm25", corpus, tmp_path / "index")
    damaged = tmp_path / "index" / "bm25" / "vocab.index.json"
    damaged.write_text(damaged.read_text()[:20])
    with pytest.raises(ValueError, match=r"vocab\.index\.json is damaged: remove the folder"):
        open_retriever("bm25", corpus, tmp_path / "index")


def test_the_best_come_first_and_equals_keep_their_order():
    assert highest_scored(["x", "y", "z"], [1.0, 2.0, 1.0], 2) == ["y", "x"]
    assert highest_scored([], [], 3) == []
    assert verbalise(Triple("a", "b", "c")) == "a b c"


def test_bm25_takes_the_language_of_most_text_and_reports_the_others(tmp_path, caplog):
    # Together, these texts look German to the detector.
    english = ["The mill was built by Tora Lind in 1904.", "The bridge is painted in red.", "Tides turn at noon."]
    german = ["Die Häuser von Ahrensee wurden aus Holz und Steinen gebaut."]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in english + german))
    assert detect("\n".join(english + german)) == "de"
    caplog.set_level(logging.INFO)
    for _ in range(2):  # the second time from the index
        assert PassageStore(tmp_path / "c.jsonl", tmp_path / "index").language == "en"
        assert "BM25 stems by en, the language of most text: en 60%, de 40% (--set language=NAME" in caplog.text
        caplog.clear()
