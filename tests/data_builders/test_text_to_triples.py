import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli import run, write_lines
from tripletune.core.data.pairs import ExtractionPair, read_pairs
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets.split import PAPER_ROWS, CountedSplit
from tripletune.data_builders.readers.triples import MALFORMED_TRIPLES, PairRow
from tripletune.data_builders.text_to_triples import (
    CASE_CHANGED,
    ONLY_A_NAME,
    PREDICATE_CHANGED,
    REPEATED_TRIPLES,
    TEXT_CHANGED,
    TRIPLE_CHANGED,
    PairOptions,
    clean_row,
    clean_text,
)
from tripletune.data_builders.world.build import WorldOptions, write_world


def rows(count, prefix="Text"):
    return [{"text": f"{prefix} {n} says b.", "triples": [[f"{prefix} {n}", "says", "b"]]} for n in range(count)]


def make(tmp_path, lines, *arguments, name="triples"):
    """Builds pairs of these lines; gives the folder and its statistics."""
    folder, file = tmp_path / "out", write_lines(tmp_path / "a.jsonl", lines)
    assert run("build pairs", "--source", f"{name}=triples:{file}", *arguments, "--output", folder).code == 0
    return folder, json.loads((folder / "statistics.json").read_text())


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_pairs_come_back_with_their_split(tmp_path, format):
    options = ("--validation-rows", 7, "--format", format, "--set", "shard_size=10")
    folder, numbers = make(tmp_path, rows(40), *options)
    train, validation = list(read_pairs(folder, "train")), list(read_pairs(folder, "validation"))
    assert (len(train), len(validation)) == (33, 7)
    assert {pair.text for pair in train + validation} == {row["text"] for row in rows(40)}
    assert all(pair.id.startswith("triples:") and pair.source == "triples" for pair in train)
    assert numbers["statistics"]["splits"] == {"train": 33, "validation": 7}
    assert len(list(folder.glob(f"train-*.{format}"))) == 4
    card = (folder / "README.md").read_text()
    assert "the 7 of 40 pairs" in card
    assert "(S> Text" in card


def test_triples_get_the_predicates_of_a_vocabulary(tmp_path):
    vocabulary = tmp_path / "vocabulary.tsv"
    lines = ["predicate\tspelling\tobjects\tdirection", "director\tdirected\tname\treversed", "director\tdirected by"]
    vocabulary.write_text("\n".join(lines))
    texts = [
        {
            "text": "One.",
            "triples": [["Ada", "directed", "Kelm"], ["Kelm", "directedBy", "Ada"], ["Ada", "likes", "x"]],
        },
        {"text": "Two.", "triples": [["Ada", "likes", "Bo"]]},
        {"text": "Oslo.", "title": "Oslo", "triples": []},
    ]
    options = ("--validation-rows", 0, "--vocabulary", vocabulary)
    folder, _ = make(tmp_path, texts, *options)
    kept = [pair.triples for pair in read_pairs(folder, "train")]
    assert kept[0] == (Triple("Kelm", "director", "Ada"), Triple("Ada", "likes", "x"))
    assert kept[1:] == [(Triple("Ada", "likes", "Bo"),), (Triple("Oslo", "is", "Oslo"),)]
    card = (folder / "README.md").read_text()
    for line in (
        "triples with another spelling of their predicate | 2 |",
        "triples turned around with their predicate | 1 |",
        "triples whose predicate is not in the vocabulary | 2 |",
    ):
        assert line in card
    folder, _ = make(tmp_path, texts, *options, "--outside", "drop", "--overwrite")
    assert [pair.text for pair in read_pairs(folder, "train")] == ["One.", "Oslo."]
    assert "no triple has a predicate of the vocabulary | 1 |" in (folder / "README.md").read_text()


def test_what_is_left_out_is_counted(tmp_path):
    first = [
        {"text": "A  text.", "triples": [["a", "b", "c"], ["a", "b", "c"]]},
        {"text": "a TEXT.", "triples": [["a", "b", "c"]]},
        {"text": "A text.", "triples": [["other", "b", "c"]]},
        {"text": "A text.", "title": "T", "triples": [["a", "b", "c"]]},
        {"text": "Nothing.", "triples": []},
        {"text": "Held out.", "triples": [["a", "b", "c"]]},
        {"text": "Held out with bad triples.", "triples": [["a", "b", "c"]]},
        {"text": "Bad.", "triples": [["a", "b"]]},
        {"text": " ", "triples": []},
    ]
    held = [("held OUT.", []), ("Other", []), ("Held out with bad triples.", [["a"]])]
    held_out = write_lines(tmp_path / "held.jsonl", [{"text": text, "triples": triples} for text, triples in held])
    options = ("--exclude", f"triples:{held_out}", "--no-facts", "drop", "--split-name", "train")
    folder, numbers = make(tmp_path, first, *options, name="x")
    assert [(pair.title, pair.text) for pair in read_pairs(folder)] == [("", "A text."), ("T", "A text.")]
    build = numbers["build"]
    assert build["drops"]["x"] == {
        "the text is empty": 1,
        "the text has no facts (--no-facts drop)": 1,
        "text and triples seen before": 1,
        "text seen before, with other triples": 1,
        "every triple is malformed": 1,
        "the text is excluded (--exclude)": 2,
    }
    assert build["issues"] == {
        "x: texts with Unicode composed, spaces folded or control characters removed": 1,
        "x: triples that a row has twice, left out": 1,
    }
    assert any("3 texts of triples=triples:" in note for note in build["notes"])
    card = (folder / "README.md").read_text()
    assert "| x: the text is excluded (--exclude) | 2 |" in card


def test_names_by_the_papers_rule(tmp_path):
    lines = [*rows(5), {"text": "x", "title": "Unsaid", "triples": [["y", "p", "o"]]}]
    folder, numbers = make(tmp_path, lines, "--entity-share", 1, "--split-name", "train")
    named = [pair for pair in read_pairs(folder) if pair.source == "names"]
    assert [pair.text for pair in named] == [*(f"Text {n}" for n in range(5)), "Unsaid"]
    assert all(pair.triples == (Triple(pair.text, "is", pair.text),) for pair in named)
    assert numbers["statistics"]["sources"]["names"]["only a name"] == 6


def test_the_world_and_a_teacher_mix(tmp_path):
    write_world(WorldOptions(train=20, validation=0, test=0), tmp_path / "world")
    world = f"world=triples:{tmp_path / 'world/train.triples.jsonl'}"
    folder, numbers = make(tmp_path, rows(30), "--source", world, "--limit", 12)
    counted = {name: counts["pairs"] for name, counts in numbers["statistics"]["sources"].items()}
    assert counted == {"world": 12, "triples": 12}
    world = [pair for pair in read_pairs(folder, "train") if pair.source == "world"]
    assert all(pair.source_text.startswith(f"{pair.title}: ") for pair in world)


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path):
    file, output = write_lines(tmp_path / "a.jsonl", rows(4)), tmp_path / "out"
    bare = write_lines(tmp_path / "b.jsonl", [{"text": "x", "triples": None}])
    for source, more, message in (
        ("triples", ("--validation-rows", 9), "there are only 4 pairs"),
        ("triples", ("--source", f"triples:{file}"), "two sources are called"),
        ("triples", ("--split-name", "test", "--validation-rows", 3), "validation_rows and split_name: a single split"),
    ):
        assert message in run("build pairs", "--source", f"{source}:{file}", "--output", output, *more).error
    error = run("build pairs", "--source", f"triples:{bare}", "--output", output).error
    assert "no pair could be made (triples: there is no list of triples 1)" in error
    empty = write_lines(tmp_path / "c.jsonl", [])
    sources = ("--source", f"triples:{file}", "--source", f"genwiki:{empty}")
    for words in (sources, (*sources[:2], "--exclude", f"triples:{empty}")):
        error = run("build pairs", *words, "--output", output).error
        assert f"{empty}: the file is empty, or has no row for this reader" in error
    Path(empty).unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def pairs(count):
    return [ExtractionPair(f"id{number}", f"text {number}") for number in range(count)]


def sides(split, rows):
    found = {"train": [], "validation": []}
    for pair, side in split.split(rows):
        found[side].append(pair)
    return found


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(0, 100), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_count_is_exact_and_the_rows_do_not_depend_on_the_order(total, wanted, seed, chance):
    wanted %= total
    rows = pairs(total)
    first = sides(CountedSplit(wanted, seed), rows)
    shuffled = rows[:]
    chance.shuffle(shuffled)
    second = sides(CountedSplit(wanted, seed), shuffled)
    assert len(first["validation"]) == wanted
    assert {pair.id for pair in first["validation"]} == {pair.id for pair in second["validation"]}
    assert sorted(pair.id for side in first.values() for pair in side) == sorted(pair.id for pair in rows)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=60), st.integers(1, 20))
def test_one_text_is_never_on_both_sides(numbers, wanted):
    rows = [ExtractionPair(f"id{place}", f"Text  {n}" if place % 2 else f"text {n}") for place, n in enumerate(numbers)]
    wanted = min(wanted, len(rows) - 1)
    split = CountedSplit(wanted)
    found = sides(split, rows)
    texts = {side: {pair.text.lower().replace(" ", "") for pair in found[side]} for side in found}
    assert not texts["train"] & texts["validation"]
    assert len(found["validation"]) == split.kept <= wanted


def test_by_default_the_papers_number_and_at_most_a_tenth():
    for count, kept in ((57, 5), (60_000, PAPER_ROWS)):
        split = CountedSplit()
        assert len(sides(split, pairs(count))["validation"]) == kept
        assert ("so a tenth is kept" in split.sentence()) is (kept < PAPER_ROWS)


def test_few_pairs_wait_in_memory():
    waiting, written = 0, 0
    split = CountedSplit(10)

    def source():
        nonlocal waiting
        for pair in pairs(500):
            waiting = max(waiting, split.total - written)
            yield pair

    for _, side in split.split(source()):
        written += 1
        assert side in ("train", "validation")
    assert waiting <= 11


# Cleaning


def row(text, triples=(), title=""):
    return PairRow("", title, text, tuple(Triple(*fields) for fields in triples))


def cleaned(given_row, **options):
    issues = Counter()
    clean = clean_row(given_row, PairOptions(**options), issues)
    return clean, {name: count for name, count in issues.items() if count}


def test_every_change_is_counted():
    same = row("Oslo is in Norway.", [("Oslo", "located in", "Norway")], "Oslo")
    clean, issues = cleaned(same)
    assert (clean.title, clean.text, clean.triples, issues) == (same.title, same.text, same.triples, {})
    clean, issues = cleaned(
        row("Cafe\u0301  Oslo\x00\n", [("Cafe\u0301", "is", "x"), ("Café", "is", "x"), ("\u200b", "b", "c")])
    )
    assert clean.text == "Café Oslo"
    assert clean.triples == (Triple("Café", "is", "x"),)
    assert issues == {TEXT_CHANGED: 1, TRIPLE_CHANGED: 1, REPEATED_TRIPLES: 1, MALFORMED_TRIPLES: 1}


def test_entities_get_the_spelling_of_the_text():
    text = '"Moanin\'" is a composition by Bobby Timmons, a pianist.'
    triples = [("Moanin'", "Composer", "Bobby timmons"), ("Bobby timmons", "Occupation", "Pianist"), ("X", "Y", "Pian")]
    clean, issues = cleaned(row(text, triples), entity_case="text")
    assert [tuple(triple.as_list()) for triple in clean.triples] == [
        ("Moanin'", "Composer", "Bobby Timmons"),
        ("Bobby Timmons", "Occupation", "pianist"),
        ("X", "Y", "Pian"),
    ]
    assert issues == {CASE_CHANGED: 2}


def test_a_part_of_a_word_is_not_the_name():
    for name, text, spelt in (
        ("Gha", "Ghana was abbreviated GHA.", "GHA"),
        ("Oslo", "OSLO, or Oslo, is a town.", "Oslo"),
        ("Oslo", "Osloer and oslos", "Oslo"),
    ):
        clean, _ = cleaned(row(text, [(name, "p", "o")]), entity_case="text")
        assert clean.triples[0].subject == spelt


def test_only_a_name_follows_the_papers_rule():
    clean, issues = cleaned(row("Oslo", title="Oslo"))
    assert clean.triples == (Triple("Oslo", "is", "Oslo"),)
    assert issues == {ONLY_A_NAME: 1}
    assert cleaned(row("Oslo", [("Oslo", "a", "b")], "Oslo"))[0].triples == (Triple("Oslo", "a", "b"),)


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_cleaning_twice_changes_nothing(text):
    once = clean_text(text)
    assert clean_text(once) == once


@settings(deadline=None)
@given(st.text(alphabet="aAbB ıİß.,"), st.text(alphabet="aAbBıİß", min_size=1, max_size=4))
def test_the_spelling_of_the_text_differs_in_case_alone(text, name):
    clean, _ = cleaned(row(f"x {text}", [(name, "p", "o")]), entity_case="text")
    assert clean.triples[0].subject.lower() == name.lower()


def test_predicates_as_words():
    clean, issues = cleaned(row("text", [("a", "birthPlace", "b"), ("a", "born in", "b")]), predicates="words")
    assert [triple.predicate for triple in clean.triples] == ["birth place", "born in"]
    assert issues == {PREDICATE_CHANGED: 1}
