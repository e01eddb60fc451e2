import pytest

from tests.cli import read_lines
from tests.data_builders.rows import shared
from tripletune.core.data.stated import Unsupported, unsupported_reason
from tripletune.core.data.triples import Triple, triple_of

TEXT = (
    "Orlen Mill\nThe Chinese engineer Zoë Marl rebuilt the third mill of New Town in 1940. It cost 1.5 million crowns, "
    "1,234 of them for a non-profit fund, and closed on 4 May 1988 after the republic's flood."
)


@pytest.mark.parametrize(
    ("subject", "object"),
    [
        ("Orlen Mill", "1940"),
        ("Zoe Marl", "China"),  # another accent, another ending
        ("The mill of Orlen", "NewTown"),
        ("nonprofit fund", "1234 crowns"),
        ("mill", "1500000"),
        ("mill", "1,500,000 crowns"),
        ("mill", "3"),  # "third"
        ("mill", "1988-05-04"),
        ("mill", "closed because of the flood"),  # half of the letters are the extractor's own
        ("mill", "-"),
    ],
)
def test_what_stands_in_the_text_in_other_words(subject, object):
    assert unsupported_reason(Triple(subject, "says", object), TEXT) is None


@pytest.mark.parametrize(
    ("subject", "object", "reason"),
    [
        ("Orlen Mill", "1941", Unsupported.NUMBER),
        ("Orlen Mill in 1989", "closed", Unsupported.NUMBER),
        ("mill", "12,345 crowns", Unsupported.NUMBER),
        ("mill", "2500000", Unsupported.NUMBER),
        ("Orlen Mill", "Norway", Unsupported.NAME),
        ("Kelm", "mill", Unsupported.NAME),
        ("Union of the Congo", "mill", Unsupported.NAME),  # "of" and "the" are in the text
        ("mill", "Us", Unsupported.NAME),  # not the "us" of another word
    ],
)
def test_what_an_extractor_added(subject, object, reason):
    assert unsupported_reason(Triple(subject, "says", object), TEXT) is reason


def test_a_copy_of_the_prompt_is_called_so():
    prompt = "Example: Anna Halde (1871-1940) was born in Kelm."
    assert unsupported_reason(Triple("Anna Halde", "born in", "Kelm"), TEXT, prompt) is Unsupported.EXAMPLE
    assert unsupported_reason(Triple("Anna Halde", "born in", "Norway"), TEXT, prompt) is Unsupported.NAME
    assert unsupported_reason(Triple("Zoë Marl", "born in", "1940"), TEXT, prompt) is None


def test_scripts_without_spaces():
    text = "東京は日本の首都である。"
    assert unsupported_reason(Triple("東京", "首都", "日本"), text) is None
    assert unsupported_reason(Triple("東京", "首都", "中国"), text) is Unsupported.NAME


@pytest.mark.parametrize(
    ("name", "most_dropped"),
    [
        ("teacher/paragraph_triples.jsonl", 0),  # of 4,031 triples of a strong model
        ("teacher/musique_dev_triples.jsonl", 1),  # of 1,994; the year is in another paragraph
        ("genwiki_test.jsonl", 1),  # of 1,892 written by annotators; the year is not in the text
        ("openie_musique_silver.jsonl", 55),  # of 17,234 of an older model
    ],
)
def test_true_triples_are_kept_and_those_of_another_text_are_not(name, most_dropped):
    """The other text is another row, never a neighbour, which is often about the same subject."""
    rows = list(read_lines(shared(name)))
    dropped, seen, foreign = 0, 0, 0
    for number, row in enumerate(rows):
        other = rows[(7 * number + 3) % len(rows)]
        text, other_text = (f"{source.get('title') or ''}\n{source['text']}" for source in (row, other))
        for fields in row["triples"]:
            triple = triple_of(fields)
            if triple is None:
                continue
            seen += 1
            dropped += unsupported_reason(triple, text) is not None
            foreign += unsupported_reason(triple, other_text) is not None
    assert dropped <= most_dropped
    assert foreign / seen > 0.99
