import re
import sqlite3

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import tripletune.rag.extractor as extractor_options
from tests.cli import read_lines, write_lines
from tests.fakes import Client
from tripletune.core.calls import RepliesPending
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.llm.ledger_client import RetriesExhausted
from tripletune.rag.__main__ import main
from tripletune.rag.search import embedding
from tripletune.rag.triple_store import TripleStore, open_triples

ROWS = [
    {"title": "Ada", "text": "Ada was born in London."},
    {"title": "Oslo", "text": "Oslo"},
    {"text": "No title."},
    {"title": "", "text": "  "},
    {"title": "Bad", "text": "Bad \ud800."},
]


def reply(asked):
    errors = {"Down": RetriesExhausted("the server stays away"), "Later": RepliesPending("waits")}
    return errors.get(asked.text.split(":")[0], f"(S> {asked.text}| P> says| O> {asked.text})")


@pytest.fixture
def clients(monkeypatch):
    """The clients that a command opens, each with its options."""
    opened = []

    def open_client(options):
        opened.append(Client(answer=reply))
        opened[-1].options = options
        return opened[-1]

    monkeypatch.setattr(extractor_options, "open_client", open_client)
    return opened


def corpus(tmp_path, rows=ROWS):
    return write_lines(tmp_path / "corpus.jsonl", rows)


def extract(tmp_path, path, *more, store="s.sqlite"):
    teacher = () if "--model" in more else ("--teacher", "openai", "--teacher-model", "m")
    return main(["extract", "--corpus", path, "--output", str(tmp_path / store), *teacher, *more])


def export(tmp_path, path, *more, stores=("s.sqlite",), output="triples.jsonl"):
    given = [str(tmp_path / store) for store in stores]
    return main(["export", "--corpus", path, "--store", *given, "--output", str(tmp_path / output), *more])


def test_a_corpus_becomes_the_file_the_loops_read(tmp_path, clients):
    path = corpus(tmp_path)
    assert extract(tmp_path, path) == 0
    asked = [asked.text for asked in clients[0].asked]
    assert asked == ["Ada: Ada was born in London.", "No title.", "Bad: Bad \ufffd."]
    assert "S> subject" in clients[0].asked[0].messages[0]["content"]
    assert clients[0].options.ledger == f"{tmp_path / 's.sqlite'}.ledger.sqlite"
    assert export(tmp_path, path) == 0
    rows = read_lines(tmp_path / "triples.jsonl")
    assert [row["title"] for row in rows] == ["Ada", "Oslo", "", "Bad"]
    assert rows[1]["triples"] == [["Oslo", "is", "Oslo"]]
    store = open_triples(tmp_path / "triples.jsonl", tmp_path / "look-up.sqlite")
    assert store.get(Passage("", "No title.")) == (Triple("No title.", "says", "No title."),)
    assert extract(tmp_path, path) == 0
    assert clients[1].asked == []


def test_a_corpus_is_read_with_the_prompts_of_a_system(tmp_path, clients, capsys):
    path = corpus(tmp_path)
    extract(tmp_path, path, "--prompts-of", "gear")
    assert clients[0].asked[0].text == "Title: Ada\nText: Ada was born in London."
    for other in (("--prompt", path), ("--model", "x")):
        assert extract(tmp_path, path, "--prompts-of", "cirag", *other) == 2
        assert "--prompts-of" in capsys.readouterr().err


def test_passages_of_several_stores(tmp_path, clients, capsys):
    rows = [{"text": f"passage {n}"} for n in range(4)]
    for number in range(2):
        extract(tmp_path, corpus(tmp_path, rows[number::2]), store=f"{number}.sqlite")
    path = corpus(tmp_path, rows)
    assert export(tmp_path, path, stores=["0.sqlite"]) == 2
    assert "2 of 4 passages" in capsys.readouterr().err
    assert not list(tmp_path.glob("triples.jsonl*"))
    # The option may name several stores, or stand before each of them.
    option_again = ["--store", str(tmp_path / "1.sqlite")]
    for more, stores, count in (
        (["--allow-missing"], ["0.sqlite"], 2),
        ([], ["0.sqlite", "1.sqlite"], 4),
        (option_again, ["0.sqlite"], 4),
    ):
        assert export(tmp_path, path, *more, stores=stores) == 0
        assert len((tmp_path / "triples.jsonl").read_text().splitlines()) == count


def test_a_prompt_of_ones_own(tmp_path, clients):
    prompt = tmp_path / "mine.md"
    prompt.write_text("Do it.\n")
    assert extract(tmp_path, corpus(tmp_path), "--prompt", str(prompt), "--limit", "1") == 0
    assert [asked.messages[0]["content"] for asked in clients[0].asked] == ["Do it."]


@pytest.mark.parametrize(("title", "code"), [("Down", 1), ("Later", 3)])
def test_exit_codes(tmp_path, clients, title, code):
    path = corpus(tmp_path, [*ROWS, {"title": title, "text": "x is y."}])
    assert extract(tmp_path, path, "--teacher-concurrency", "1") == code
    store = TripleStore(tmp_path / "s.sqlite", create=False)
    assert store.choose().passages == 4
    store.close()


def test_bad_options_are_one_line(tmp_path, clients, capsys):
    path, model = corpus(tmp_path), tmp_path / "model"
    model.mkdir()
    (tmp_path / "text.sqlite").write_text("not a database" * 100)
    two_beams = ("--beams", "2", "--vocabulary", "v.tsv")
    for words in (
        (),
        ("--teacher-seed", "3"),
        ("--beams", "2", "--set", "grammar=yes"),
        two_beams,
        ("--batch-size", "0"),
    ):
        assert extract(tmp_path, path, "--model", str(model), *words) == 2
    assert extract(tmp_path, path, "--beams", "2") == 2
    assert extract(tmp_path, "gone.jsonl") == 2
    assert export(tmp_path, path, stores=["none.sqlite"]) == 2
    assert extract(tmp_path, path, store="text.sqlite") == 2
    found = capsys.readouterr().err
    assert [line[:7] for line in found.splitlines()] == ["error: "] * 9
    for message in (
        "--beams 2 needs --model",
        "--teacher-seed has no effect with --model",
        "vocabulary and beams: the grammar needs",
    ):
        assert message in found


def test_a_chat_models_predicates_are_those_of_a_vocabulary(tmp_path, clients, capsys):
    path, vocabulary = corpus(tmp_path), tmp_path / "vocabulary.tsv"
    vocabulary.write_text("predicate\tspelling\nstates\tsays\n")
    assert extract(tmp_path, path, "--vocabulary", str(vocabulary)) == 0
    assert "renamed predicates 3" in capsys.readouterr().err
    assert export(tmp_path, path) == 0
    assert read_lines(tmp_path / "triples.jsonl")[2]["triples"] == [["No title.", "states", "No title."]]
    # Another vocabulary is another extractor in the store.
    vocabulary.write_text("predicate\tspelling\nmeans\tmeant\n")
    assert extract(tmp_path, path, "--vocabulary", str(vocabulary), "--outside", "drop") == 0
    assert "outside vocabulary 3" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_a_later_run_goes_on(tmp_path, clients, monkeypatch, capsys):
    def full(self, *_):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    path = corpus(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(TripleStore, "_insert_extractions", full)
        assert extract(tmp_path, path) == 1
    assert "no space left on the disk" in capsys.readouterr().err
    assert extract(tmp_path, path) == 0


def test_a_dry_run_counts_what_this_model_and_prompt_have_not_read(tmp_path, clients, capsys):
    path = corpus(tmp_path)
    assert extract(tmp_path, path) == 0
    capsys.readouterr()
    prompt = tmp_path / "prompt.md"
    prompt.write_text("Other words.")

    def counted_calls(*more):
        assert main(["extract", "--corpus", path, "--output", str(tmp_path / "s.sqlite"), "--dry-run", *more]) == 0
        return re.search(r"([\d,]+) calls?", capsys.readouterr().out)[1]

    own = ("--teacher", "openai", "--teacher-model", "m")
    assert counted_calls(*own) == "0"
    others = {counted_calls("--llm", "openai:other"), counted_calls(*own, "--prompt", str(prompt))}
    (all_calls,) = others
    assert int(all_calls) > 0


def test_an_export_never_writes_over_what_it_reads(tmp_path, clients, capsys):
    path = corpus(tmp_path)
    assert extract(tmp_path, path) == 0
    for source in (tmp_path / "corpus.jsonl", tmp_path / "s.sqlite"):
        before = source.read_bytes()
        assert export(tmp_path, path, output=source.name) == 2
        assert "in the input" in capsys.readouterr().err
        assert source.read_bytes() == before


def test_indexes_are_built_beforehand(two_pages, tmp_path, tiny_encoder, capsys):
    files = [*two_pages[:4], "--index", str(tmp_path / "index")]
    how = ["--retriever", "hybrid", "--encoder", str(tiny_encoder), "--set", "vectors=hnsw"]
    assert main(["index", *files, *how]) == 0
    built = sorted(path.parent.relative_to(tmp_path / "index") for path in tmp_path.glob("index/**/manifest.json"))
    assert [str(path) for path in built] == [
        "bm25", "dense", "hnsw", "passages", "triples/bm25", "triples/dense", "triples/hnsw", "triples/rows"
    ]  # fmt: skip
    # It warns once per process: another test may have met the same limit.
    embedding._warn_once.cache_clear()
    other = write_lines(tmp_path / "other.jsonl", [{"text": "word " * 600}])
    assert main(["index", "--corpus", other, *files[4:], *how]) == 2
    refusal = capsys.readouterr().err
    assert all(text in refusal for text in (f" of {two_pages[1]}, not with ", f" of {other}: ", "--overwrite"))
    assert main(["index", "--corpus", other, *files[4:], *how, "--overwrite"]) == 0
    assert "some texts are longer" in capsys.readouterr().err
    assert main(["index", "--corpus", other, *files[4:], "--set", "language=elvish"]) == 2
    assert "error: language: 'elvish' is not one of auto, none" in capsys.readouterr().err


def test_vectors_of_others_are_imported(two_pages, tmp_path, tiny_encoder, capsys):
    rows = [f"{row['title']}\n{row['text']}" if row["title"] else row["text"] for row in read_lines(two_pages[1])]
    np.save(tmp_path / "theirs.npy", SentenceTransformer(str(tiny_encoder)).encode(rows))
    how = [*two_pages[:4], "--retriever", "dense", "--index"]
    vectors, encoder = ["--vectors", str(tmp_path / "theirs.npy")], ["--encoder", str(tiny_encoder)]
    assert main(["index", *how, str(tmp_path / "theirs"), *vectors]) == 2
    assert "queries need the encoder that made the vectors: give --encoder" in capsys.readouterr().err
    assert main(["index", *how, str(tmp_path / "theirs"), *vectors, *encoder]) == 0
    assert main(["index", *how, str(tmp_path / "own"), *encoder]) == 0
    stored = [np.fromfile(tmp_path / name / "dense/vectors.f16", np.float16) for name in ("theirs", "own")]
    assert stored[0] == pytest.approx(stored[1], abs=2e-3)
    # The triples were embedded here; later runs take the index as it is.
    assert (tmp_path / "theirs/triples/dense/vectors.f16").is_file()
    before = (tmp_path / "theirs/dense/manifest.json").stat().st_mtime_ns
    assert main(["index", *how, str(tmp_path / "theirs"), *encoder]) == 0
    assert (tmp_path / "theirs/dense/manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--extractor", "nope"], "--extractor nope has no effect"),
        (["--encoder", "pypi:none"], "--encoder pypi:none has no effect"),
        (["--vectors", "v.npy"], "--vectors v.npy has no effect, since BM25 has no vectors"),
        ([], "did not make (mine.txt)"),
    ],
)
def test_an_index_takes_no_option_without_effect_and_no_folder_of_others(two_pages, tmp_path, capsys, words, said):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("precious")
    assert main(["index", *two_pages[:4], "--index", str(tmp_path / "mine"), *words]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["mine.txt"]
