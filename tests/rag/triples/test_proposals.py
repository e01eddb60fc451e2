import numpy as np
import pytest

from tripletune.core.data.triples import Triple
from tripletune.rag.triples.proposals import DOUBTFUL, propose, related_pairs, uses_of


def proposed(*names, encode=None, threshold=0.9):
    """Why each pair of names is proposed; the first name is the most used one."""
    passages = [[Triple(name, "is", "42")] for name in names] + [[Triple(names[0], "is", "42")]]
    rows = propose(uses_of(passages), encode, threshold)
    return {(row.name.name, row.into.name): row.why for row in rows}


@pytest.mark.parametrize(
    ("into", "name", "why"),
    [
        ("Stockholm Arlanda Airport", "Stockholm-Arlanda Airport", "signs"),
        ("US Congress", "U.S. Congress", "signs"),
        ("United States", "the United States", "signs"),
        ("Outkast", "OutKast", "signs"),
        ("O'Neill", "O’Neill", "signs"),
        ("Harrow & Sons", "Harrow and Sons", "signs"),
        ("South", "south", "case"),
        ("Democratic Party", "Democratic party", "case"),
        ("The Terror", "Terror", "article"),
        ("song", "the song", "article"),
        ("Québec City", "Quebec City", "accents"),
        ("J. R. R. Tolkien", "JRR Tolkien", "initials"),
        ("J. R. R. Tolkien", "Tolkien, J. R. R.", "order"),
        ("J. A. Smith", "J.A. Smith", "initials"),
        ("Johann Strauss II", "J. Strauss II", "written out"),
        ("Arthur Penhale", "A. Penhale", "written out"),
        ("European Union", "European Union (EU)", "abbreviation"),
        ("Bank of England", "Bank of England (BE)", "abbreviation"),
        ("Iron Maiden", "Iron Maiden (album)", "brackets"),
        ("Denver", "Denver, Colorado", "comma"),
    ],
)
def test_names_that_are_alike(into, name, why):
    assert proposed(into, name) == {(name, into): why}


@pytest.mark.parametrize(
    "names",
    [
        ("1,5 km", "15 km"),
        ("1999", "1998"),
        ("Super Bowl XX", "Super Bowl xxi"),
        ("Mercury", "Mercury (planet)", "Mercury (element)"),
        ("Salisbury", "Salisbury, England", "Salisbury, Maryland"),
        ("John Smith", "J. Smith", "Jane Smith"),
        ("Penhale", "A. Penhale"),
        ("C++", "C"),
        ("United Kingdom", "United Kingdom, Chile, Peru"),
    ],
)
def test_names_that_may_mean_different_things_are_not_proposed(names):
    assert proposed(*names) == {}


def test_each_line_stands_by_itself():
    rows = proposed("Quebec City", "Québec City", "quebec city")
    assert rows == {("Québec City", "Quebec City"): "accents", ("quebec city", "Quebec City"): "case"}
    assert "case" in DOUBTFUL


def test_close_vectors_of_capital_names_that_exchange_no_word():
    places = {"Summer Olympics": 0, "Summer Olympic Games": 10, "Winter Olympics": 100, "lower case": 11, "Ida": 200}

    def encode(names):
        angles = np.radians([places[name] for name in names])
        return 3 * np.stack([np.cos(angles), np.sin(angles)], axis=1)

    assert proposed(*places, encode=encode) == {("Summer Olympic Games", "Summer Olympics"): "vectors"}
    assert proposed(*places, encode=encode, threshold=0.999) == {}
    places["Winter Olympics"] = 1
    assert proposed(*places, encode=encode) == {}, "Winter and Summer are different words"


def test_what_a_triple_relates_is_not_one_entity():
    passages = [
        [Triple("Portland", "part of", "Portland, Oregon"), Triple("Ida Morn", "also known as", "Ida, Morn")],
        [Triple("Ida Morn", "wrote", "x")],
    ]
    rows = propose(uses_of(passages), None, 0.9)
    assert {(row.name.name, row.into.name) for row in rows} >= {("Portland", "Portland, Oregon")}
    assert related_pairs(rows, passages) == {("Portland", "Portland, Oregon")}
