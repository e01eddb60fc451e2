import multiprocessing
import os
import shutil
from collections import Counter

import pytest

from tests.cli import write_lines
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.rag.triple_store import Extraction, TripleStore, gold_links_in_file, open_triples

OSLO = Passage("Oslo", "Oslo is in Norway.")
TRIPLES = (Triple("Oslo", "located in", "Norway"), Triple("日本, (x)", "|", '"'))


@pytest.fixture
def store(tmp_path):
    opened = TripleStore(tmp_path / "deep" / "triples.sqlite")
    yield opened
    opened.close()


def test_what_is_put_is_found_by_model_and_prompt_and_stays(store):
    one, two = store.extractor("m", "p"), store.extractor("m", "q")
    assert one == store.extractor("m", "p") != two
    store.put(one, [Extraction(OSLO.key, TRIPLES), Extraction("nothing", ())])
    store.put(one, [Extraction(OSLO.key, ())])
    assert store.get(one, OSLO.key) == TRIPLES
    assert store.get(one, "nothing") == ()
    assert store.get(two, OSLO.key) is None
    assert store.stored_among(one, [OSLO.key, "nothing", "unknown"]) == {OSLO.key, "nothing"}
    assert store.stored_among(one, [str(n) for n in range(2000)]) == set()
    assert [(e.model, e.prompt, e.passages) for e in store.extractors()] == [("m", "p", 2), ("m", "q", 0)]


def test_a_store_is_read_by_the_loops_also_where_nothing_can_be_written(store, tmp_path, monkeypatch):
    number = store.extractor("m", "p")
    store.put(number, [Extraction(OSLO.key, TRIPLES)])
    source = open_triples(store.path, tmp_path / "unused.sqlite")
    assert source.get(OSLO) == TRIPLES
    source.close()
    store.close()
    before = sorted(path.name for path in store.path.parent.iterdir())
    # Also root, who may write everything, is told so by a read-only medium.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    source = open_triples(store.path, tmp_path / "unused.sqlite")
    assert source.get(Passage("Oslo", "Oslo  is in\u00a0Norway. ", id="wiki-17")) == TRIPLES
    assert source.get(Passage("", "Unknown.")) is None
    assert not (tmp_path / "unused.sqlite").exists()
    assert sorted(path.name for path in store.path.parent.iterdir()) == before
    with pytest.raises(OSError, match="readonly"):
        source.store.put(number, [Extraction("a", ())])
    source.close()


def test_several_extractors_must_be_told_apart(store):
    for _ in range(2):
        # The second time with the extractor of an extraction that failed at its first passage.
        with pytest.raises(
            ValueError, match=r"holds no triples of any passage, .*: run `tripletune rag extract --corpus CORPUS"
        ):
            store.choose()
        store.extractor("m", "p")
    for model in ("m", "n"):
        store.put(store.extractor(model, "p"), [Extraction(OSLO.key, ())])
    with pytest.raises(ValueError, match=r"holds triples of several extractors: .*1: m, prompt p, 1 passages; 2: n"):
        store.choose()
    assert store.choose("n").id == 2
    assert store.choose("1").model == "m"
    with pytest.raises(ValueError, match="holds no triples of x"):
        store.choose("x")


def test_triples_are_known_by_their_content_and_not_by_their_file(store, tmp_path):
    rows = [Extraction("a", TRIPLES), Extraction("b", ())]

    def identity(name, extractions):
        other = TripleStore(tmp_path / name)
        other.put(other.extractor("m", "p"), extractions)
        other.close()
        return open_triples(tmp_path / name, tmp_path / "unused.sqlite").identity

    first = identity("first", rows)
    assert identity("other", rows[::-1]) == first
    assert identity("better", [Extraction("a", TRIPLES[:1]), rows[1]]) != first
    assert identity("first", [Extraction("c", ())]) != first


def fill(path, first):
    store = TripleStore(path)
    number = store.extractor("m", "p")
    for place in range(20):
        store.put(number, [Extraction(f"{first}-{place}", TRIPLES)])
    store.close()


def test_processes_write_into_one_store(tmp_path):
    path = tmp_path / "shared.sqlite"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=fill, args=(path, first)) for first in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    store = TripleStore(path, create=False)
    assert store.choose().passages == 40
    store.close()


ROWS = [
    {"title": "Oslo", "text": "Oslo is in Norway.", "triples": [["Oslo", "located in", "Norway"]]},
    {
        "title": "Smith, J. (actor)",
        "text": "é",
        "triples": [["A, b (c)", "|", "日本"], ["x", "", "y"], ["a"], "x"],
    },
    {"title": "Nothing", "text": "Said nothing.", "triples": []},
    {"title": "Bad", "text": None, "triples": []},
    {"title": "Bad", "triples": None, "text": "no list"},
    {
        "title": "Oslo",
        "text": "Oslo  is in\u00a0Norway.",
        "triples": [["Oslo", "has", "a fjord"], ["Oslo", "located in", "Norway"], ["Oslo"]],
    },
]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "triples.jsonl"
    write_lines(path, ROWS)
    return path


def test_a_file_of_triples_is_looked_up_whatever_its_spaces_unicode_form_and_ids(source, tmp_path):
    counts: Counter[str] = Counter()
    store = open_triples(source, tmp_path / "triples.sqlite", counts=counts)
    assert counts == {"passages": 3, "triples": 3, "malformed triples": 4, "malformed rows": 2}
    both = (Triple("Oslo", "located in", "Norway"), Triple("Oslo", "has", "a fjord"))
    for text in ("Oslo is in Norway.", "Oslo is  in Norway. "):
        assert store.get(Passage("Oslo", text, id="wiki-17")) == both
    for text in ("é", "e\u0301"):
        assert store.get(Passage("Smith, J. (actor)", text)) == (Triple("A, b (c)", "|", "日本"),)
    assert store.get(Passage("oslo", "Oslo is in Norway.")) is None
    assert store.get(Passage("Nothing", "Said nothing.")) == ()
    assert store.get(Passage("Nothing", "Said something.")) is None


def test_database_is_used_again_until_the_source_changes(source, tmp_path, monkeypatch):
    database = tmp_path / "deep" / "triples.sqlite"
    open_triples(source, database).close()
    with monkeypatch.context() as reading:  # another user's index
        reading.setattr("tripletune.rag.triple_store.lock_folder", None)
        reading.setattr(os, "access", lambda path, mode: False)
        open_triples(source, database).close()
    other = shutil.copy(source, tmp_path / "other.jsonl")
    stamp = database.stat().st_mtime_ns
    open_triples(source, database).close()
    assert database.stat().st_mtime_ns == stamp
    write_lines(source, [{"title": "T", "text": "t", "triples": [["a", "b", "c"]]}])
    before, store = open_triples(other, database), open_triples(source, database)
    assert store.get(Passage("T", "t")) == (Triple("a", "b", "c"),)
    assert before.get(Passage("T", "t")) is None, "another run still reads its own file"
    assert before.get(Passage("Oslo", "Oslo is in Norway."))
    assert store.get(Passage("Oslo", "Oslo is in Norway.")) is None
    write_lines(source, [{"title": "T", "text": "t"}])
    with pytest.raises(ValueError, match="no row is a passage with triples"):
        open_triples(source, database)


def test_gold_links_are_read_by_question_and_other_lines_named(tmp_path):
    path = tmp_path / "gold.jsonl"
    path.write_text('{"question_id": "q", "passages": ["a", "b"]}\n{"question_id": "p", "passages": []}\n')
    assert gold_links_in_file(path) == {"q": {"a", "b"}, "p": frozenset()}
    for line in ('{"question_id": "q"}', '{"passages": []}', '{"question_id": "q", "passages": "a"}'):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=r"gold\.jsonl:1: a gold link is"):
            gold_links_in_file(path)
