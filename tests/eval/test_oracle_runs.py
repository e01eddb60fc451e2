"""What a run with an oracle warns of, and what says nothing about a model."""

import pytest

from tests.cli import read_lines, run, write_lines


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Two folders of worlds with other questions."""
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("world")
        words = ("--seed", seed, "--train", 0, "--validation", 0, "--test", 12)
        assert run("build world", "--output", folder, *words).code == 0
        folders.append(folder)
    return folders


def words_of(data, world, output):
    return ("--data", data, "--corpus", world / "test.corpus.jsonl", "--oracle", world / "test", "--output", output)


def test_questions_of_another_world_fail_with_one_warning_and_a_count(worlds, tmp_path):
    own, other = worlds
    rows = read_lines(own / "test.jsonl") + read_lines(other / "test.jsonl")
    for number, row in enumerate(rows):
        row["_id"] = f"q{number}"
    write_lines(tmp_path / "both.jsonl", rows)
    words = words_of(tmp_path / "both.jsonl", own, tmp_path / "out")
    done = run("eval", "run", "--system", "standard", "--task", "hotpotqa", *words)
    failed = [row for row in read_lines(tmp_path / "out/results.jsonl") if row["error"]]
    assert len(failed) > 8
    assert done.err.count("the world has no question") == 1
    assert f"{len(failed) - 1} more question(s) failed for the same reason as question q" in done.err


def test_clues_that_an_oracle_lacks_are_no_warning(worlds, tmp_path):
    own = worlds[0]
    triples = ("--triples", own / "test.triples.jsonl")
    words = (*words_of(own / "test.jsonl", own, tmp_path / "out"), *triples, "--retriever", "bm25")
    done = run("eval", "run", "--system", "t2rag", "--task", "hotpotqa", *words)
    assert done.code == 0, done.err
    rows = read_lines(tmp_path / "out/results.jsonl")
    assert any("unreadable" in row["trace"]["details"] for row in rows), "the case that this test is about"
    assert "could not be read" not in done.err
    reported = run("eval", "report", tmp_path / "out", "--output", tmp_path / "report")
    assert "could not be read" not in reported.err
