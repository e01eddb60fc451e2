import random
import re

import pytest

from tripletune.data_builders.world import (
    RELATION_OF,
    RELATIONS,
    RELATIONS_OF_KIND,
    SPLITS,
    WH_WORDS,
)
from tripletune.data_builders.world.entities import MINIMUM_ARTICLES, EntityBuilder
from tripletune.data_builders.world.names import Namer


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


def test_a_small_world_is_as_large_as_the_smallest():
    assert abs(len(build(1)) - MINIMUM_ARTICLES) < 5


KINDS = ("person", "town", "country", "river", "film", "company", "band", "lake")


def titles(split, seed, noise, each=60):
    namer = Namer(random.Random(seed), split, noise)
    return [namer.entity(kind).title for kind in KINDS for _ in range(each)]


def test_no_split_shares_a_name_or_a_coined_word_for_any_seed():
    names = [{t for seed in range(20) for t in titles(split, seed, 0.2, each=20)} for split in SPLITS]
    assert len(set.union(*names)) == sum(map(len, names))


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
