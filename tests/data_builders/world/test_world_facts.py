import random

import pytest

from tripletune.data_builders.world.facts import MINIMUM_ARTICLES, build_entities
from tripletune.data_builders.world.names import Namer
from tripletune.data_builders.world.relations import RELATION_OF, RELATIONS_OF_KIND


def build(articles: int, seed: int = 3):
    return build_entities(random.Random(seed), Namer(random.Random(seed), "train", 0.03), articles)


@pytest.fixture(scope="module")
def world():
    return build(900)


def test_every_fact_has_its_relation_and_every_object_its_article(world):
    for entity in world.values():
        assert 3 <= len(entity.facts) <= 7
        for predicate, object_ in entity.facts.items():
            target = RELATION_OF[entity.kind, predicate].target
            assert not target or world[object_].kind == target


def test_every_kind_and_every_relation_occurs(world):
    stated = {(entity.kind, predicate) for entity in world.values() for predicate in entity.facts}
    assert stated == {(r.kind, r.predicate) for relations in RELATIONS_OF_KIND.values() for r in relations}


def test_nobody_works_before_growing_up(world):
    years = {"film": "Release year", "novel": "Publication year", "album": "Release year", "company": "Founded in"}
    checked = 0
    for entity in world.values():
        year = entity.facts.get(years.get(entity.kind, ""))
        people = [world[o] for p, o in entity.facts.items() if RELATION_OF[entity.kind, p].target == "person"]
        for person in people if year else ():
            checked += 1
            assert int(person.facts["Birth year"]) + 20 <= int(year)
    assert checked > 100


def test_geography_agrees(world):
    capitals = [e for e in world.values() if e.kind == "country" and "Capital" in e.facts]
    assert capitals
    assert all(world[e.facts["Capital"]].facts["Country"] == e.title for e in capitals)
    bridges = [e for e in world.values() if e.kind == "bridge"]
    assert bridges
    assert all(world[e.facts["Location"]].facts["River"] == e.facts["Crosses"] for e in bridges)


def test_works_follow_what_they_are_made_from(world):
    films = [e.facts for e in world.values() if {"Based on", "Release year"} <= e.facts.keys()]
    films = [f for f in films if "Publication year" in world[f["Based on"]].facts]
    assert films
    assert all(int(world[f["Based on"]].facts["Publication year"]) < int(f["Release year"]) for f in films)
    albums = [e.facts for e in world.values() if e.kind == "album" and "Release year" in e.facts]
    albums = [f for f in albums if "Founded in" in world[f["Performer"]].facts]
    assert albums
    assert all(int(world[f["Performer"]].facts["Founded in"]) < int(f["Release year"]) for f in albums)


def test_marriage_is_mutual_where_both_articles_state_it(world):
    married = [e for e in world.values() if "Spouse" in e.facts]
    assert married
    for person in married:
        spouse = world[person.facts["Spouse"]]
        assert spouse.facts.get("Spouse", person.title) == person.title
        assert spouse.pronoun != person.pronoun


def test_a_small_world_is_as_large_as_the_smallest():
    assert abs(len(build(1)) - MINIMUM_ARTICLES) < 5
