import random
import re

import pytest

from tripletune.data_builders.world import (
    MINIMUM_ARTICLES,
    RELATION_OF,
    RELATIONS,
    RELATIONS_OF_KIND,
    SPLITS,
    WH_WORDS,
    EntityBuilder,
    Namer,
)


def build(articles):
    return EntityBuilder(random.Random(3), Namer(random.Random(3), "train", 0.03), articles).build()


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


@pytest.mark.parametrize(("source", "year"), [("Based on", "Publication year"), ("Performer", "Founded in")])
def test_works_follow_what_they_are_made_from(world, source, year):
    works = [e.facts for e in world.values() if {source, "Release year"} <= e.facts.keys()]
    works = [facts for facts in works if year in world[facts[source]].facts]
    assert works
    assert all(int(world[facts[source]].facts[year]) < int(facts["Release year"]) for facts in works)


def test_marriage_is_mutual_where_both_articles_state_it(world):
    married = [e for e in world.values() if "Spouse" in e.facts]
    assert married
    for person in married:
        spouse = world[person.facts["Spouse"]]
        assert spouse.facts.get("Spouse", person.title) == person.title
        assert spouse.pronoun != person.pronoun


def test_a_small_world_is_as_large_as_the_smallest():
    assert abs(len(build(1)) - MINIMUM_ARTICLES) < 5


KINDS = ("person", "town", "country", "river", "film", "company", "band", "lake")


def titles(split, seed, noise, each=60):
    namer = Namer(random.Random(seed), split, noise)
    return [namer.entity(kind).title for kind in KINDS for _ in range(each)]


def test_no_split_shares_a_name_or_a_coined_word_for_any_seed():
    names = [{t for seed in range(20) for t in titles(split, seed, 0.2, each=20)} for split in SPLITS]
    assert len(set.union(*names)) == sum(map(len, names))


def test_noise_brings_commas_brackets_quotes_and_other_scripts():
    text = "\n".join(titles("train", 5, 1.0))
    assert all(mark in text for mark in (",", "(", '"'))
    assert any("а" <= letter <= "я" for letter in text)
    assert any("ア" <= letter <= "ン" for letter in text)
    assert any(letter in "áéíóú" for letter in text)
    odd = [t for t in titles("train", 5, 0.03, each=500) if not t.isascii() or set(t) & set(',("')]
    assert 0.01 < len(odd) / (500 * len(KINDS)) < 0.06


FIELDS = {"ask": "x", "refer": "x", "verb": "o", "full": "os", "less": "ab", "more": "ab", "same": "ab"}


def test_every_wording_has_its_places():
    for relation in RELATIONS:
        for name, wanted in FIELDS.items():
            wordings = getattr(relation, name)
            assert len(set(wordings)) == len(wordings), relation
            assert all({*re.findall("{(.)}", wording)} == {*wanted} for wording in wordings), (relation, name)
        assert relation.verb or relation.full
        questions = (*relation.ask, *relation.less, *relation.more, *relation.same)
        assert all(question.endswith("?") for question in questions)


def test_relations_that_are_followed_can_be_named_at_any_depth():
    for relation in RELATIONS:
        assert any(phrase.endswith("{x}") for phrase in relation.refer) == bool(relation.target)
        assert not relation.target or relation.target in RELATIONS_OF_KIND


def test_each_kind_has_enough_to_say_and_no_predicate_twice():
    assert len(RELATION_OF) == len(RELATIONS)
    assert all(3 <= len(relations) <= 7 for relations in RELATIONS_OF_KIND.values())
    assert {r.target for r in RELATIONS if r.act} <= set(WH_WORDS)
