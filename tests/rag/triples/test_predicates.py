import csv

from tests.cli import write_lines
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.rag.__main__ import main
from tripletune.rag.triples.vocabulary import read_vocabulary

ROWS = [
    {"title": "", "text": "one", "triples": [["Kelm", "directed by", "Ada"], ["Ada", "directed", "Osk"]]},
    {"title": "", "text": "two", "triples": [["Tol", "directed by", "Bo"], ["Bo", "born in", "1903"]]},
    {"title": "", "text": "three", "triples": [["Bo", "likes", "Ada"], ["Bo", "born in", "1903"]]},
]


def run(tmp_path, *more, rows=ROWS):
    triples = write_lines(tmp_path / "triples.jsonl", rows)
    return main(["vocabulary", "--triples", str(triples), "--output", str(tmp_path / "vocabulary.tsv"), *more])


def test_the_file_holds_spellings_directions_counts_and_examples(tmp_path, capsys):
    assert run(tmp_path, "--size", "2") == 0
    with (tmp_path / "vocabulary.tsv").open(newline="") as file:
        rows = [list(row.values()) for row in csv.DictReader(file, delimiter="\t")]
    assert rows == [
        ["directed by", "directed by", "name", "same", "letters", "2", "Kelm | directed by | Ada"],
        ["directed by", "directed", "name", "reversed", "letters", "1", "Ada | directed | Osk"],
        ["born in", "born in", "year", "same", "letters", "2", "Bo | born in | 1903"],
    ]
    shown = capsys.readouterr().err
    assert "2 predicates" in shown
    assert "83.3 % of 6 triples have one of these predicates; 1 get another spelling, 1 are turned around" in shown
    assert "most used outside: likes 1" in shown


def test_a_file_that_a_person_changed_is_not_lost(tmp_path, capsys):
    assert (run(tmp_path), run(tmp_path), run(tmp_path, "--overwrite")) == (0, 2, 0)
    assert "may hold your changes" in capsys.readouterr().err


def test_the_vocabulary_of_a_world_covers_it_and_is_the_same_again(tmp_path):
    write_world(WorldOptions(seed=5, train=30, validation=0, test=0), tmp_path / "world")
    rows = tmp_path / "world" / "train.triples.jsonl"
    outputs = [tmp_path / name for name in ("a.tsv", "b.tsv")]
    for output in outputs:
        assert main(["vocabulary", "--triples", str(rows), "--output", str(output), "--size", "60"]) == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    vocabulary = read_vocabulary(outputs[0])
    assert 20 <= len(vocabulary.predicates) <= 60
