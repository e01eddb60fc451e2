from collections import Counter

import pytest

from tripletune.core.data.triples import Triple
from tripletune.rag.triples.kept import TripleRules
from tripletune.rag.triples.vocabulary import Objects, VocabularyCount, objects_of, read_vocabulary

HEAD = "predicate\tspelling\tobjects\tdirection\n"
LINES = (
    "director\tdirected by\tname\tsame",
    "director\tdirected\tname\treversed",
    "birth place\tborn in\tname\tsame",
    "birth year\tborn in\tyear\tsame",
)


def file(tmp_path, *lines, head=HEAD):
    path = tmp_path / "vocabulary.tsv"
    path.write_text(head + "".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1903", Objects.YEAR), ("c. 1066", Objects.YEAR), ("300 BC", Objects.YEAR),
        ("May 4, 1903", Objects.DATE), ("29 October 1909", Objects.DATE), ("1903-05-04", Objects.DATE),
        ("4,500", Objects.NUMBER), ("12.5 square km", Objects.NUMBER), ("$3 million", Objects.NUMBER),
        ("7 %", Objects.NUMBER), ("Boeing 747", Objects.NAME), ("Oslo", Objects.NAME), ("May", Objects.NAME),
        ("2nd Battalion of the Guards", Objects.NAME),
    ],
)  # fmt: skip
def test_kinds_of_objects(name, kind):
    assert objects_of(name) is kind


def test_triples_get_the_predicates_and_directions_of_the_file(tmp_path):
    vocabulary = read_vocabulary(file(tmp_path, *LINES))
    assert vocabulary.predicates == ("director", "birth place", "birth year")
    triples = [
        Triple("Kelm", "was directedBy", "Ada"),
        Triple("Ada", "Directed", "Kelm"),
        Triple("Ada", "born in", "Osk"),
        Triple("Ada", "born in", "1903"),
        Triple("Ada", "born in", "4 May 1903"),
        Triple("Ada", "birth place", "Osk"),
    ]
    counts = Counter()
    assert vocabulary.of(triples, counts) == (
        Triple("Kelm", "director", "Ada"),
        Triple("Ada", "birth place", "Osk"),
        Triple("Ada", "birth year", "1903"),
        Triple("Ada", "born in", "4 May 1903"),
    )
    assert counts == {VocabularyCount.RENAMED: 4, VocabularyCount.REVERSED: 1, VocabularyCount.OUTSIDE: 1}
    assert len(vocabulary.of(triples, drop_outside=True)) == 3


def test_what_is_outside_is_dropped_before_the_check_against_the_passage(tmp_path):
    rules = TripleRules(read_vocabulary(file(tmp_path, *LINES)), drop_outside=True, drop_unsupported=True)
    triples = [Triple("Ada", "born in", "Osk"), Triple("Ada", "born in", "Rome"), Triple("Ada", "likes", "Rome")]
    counts = Counter()
    assert rules.kept(triples, "Ada was born in Osk.", counts=counts) == (Triple("Ada", "birth place", "Osk"),)
    assert +counts == {VocabularyCount.RENAMED: 2, VocabularyCount.OUTSIDE: 1, "name": 1}


def test_counts_and_examples_do_not_change_the_digest(tmp_path):
    wide = HEAD.replace("\n", "\ttriples\n")
    digest = read_vocabulary(file(tmp_path, *LINES)).digest
    assert read_vocabulary(file(tmp_path, *(f"{line}\t7" for line in LINES), head=wide)).digest == digest
    assert read_vocabulary(file(tmp_path, *LINES[:3])).digest != digest


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a\tb", "c\tB"], r"vocabulary.tsv:3: 'B' is 'a' in one line and 'c' in another"),
        (["a\tb\t\tsame", "a\tb\tany\treversed"], "or has two directions"),
        (["a\t "], "the columns predicate and spelling must both be filled"),
        (["a\tb\tplace"], "must be one of any, year, date, number, name, found 'place'"),
        (["a\tb\tany\tback"], "must be same or reversed, found 'back'"),
        ([], "has no lines"),
    ],
)
def test_lines_that_can_not_be_read(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_vocabulary(file(tmp_path, *lines))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="spelling is missing"):
        read_vocabulary(file(tmp_path, head="predicate\tname\n"))
    with pytest.raises(FileNotFoundError, match="`tripletune rag vocabulary` writes one"):
        read_vocabulary(tmp_path / "none.tsv")
