import random

import pytest

from tripletune.data_builders.world.articles import write_article
from tripletune.data_builders.world.facts import Entity, Namer, build_entities


@pytest.fixture(scope="module")
def world():
    return build_entities(random.Random(3), Namer(random.Random(3), "train", 0.2), 600)


@pytest.fixture(scope="module")
def articles(world):
    rng = random.Random(3)
    return {title: write_article(rng, entity, world) for title, entity in world.items()}


def test_each_fact_is_one_triple_and_stands_in_its_sentence(world, articles):
    for title, article in articles.items():
        facts = {triple.predicate: triple.object for triple in article.triples}
        assert facts == world[title].facts
        assert len(article.triples) == len(facts)
        assert {triple.subject for triple in article.triples} == {title}
        for predicate, object_ in facts.items():
            assert object_.lower() in article.sentences[article.sentence_of[predicate]].lower()


def test_triples_follow_the_text_and_no_sentence_is_idle(articles):
    for article in articles.values():
        order = [article.sentence_of[triple.predicate] for triple in article.triples]
        assert order == sorted(order)
        assert set(order) == set(range(len(article.sentences)))
        assert 1 <= len(article.sentences) <= 6


def test_the_first_sentence_names_the_subject_and_later_ones_vary(world, articles):
    assert all(title in article.sentences[0] for title, article in articles.items())
    later = [(world[title], s) for title, article in articles.items() for s in article.sentences[1:]]
    named = sum(entity.title in sentence for entity, sentence in later)
    pronouns = sum(sentence.startswith(f"{entity.pronoun} ") for entity, sentence in later)
    assert 0.3 < named / len(later) < 0.9
    assert pronouns / len(later) > 0.1


def test_sentences_are_clean(articles):
    for article in articles.values():
        assert article.text == " ".join(sentence.strip() for sentence in article.sentences)
        for sentence in article.sentences:
            assert sentence.endswith(".")
            assert not sentence.endswith("..")
            assert "{" not in sentence
            assert "@" not in sentence
            assert "  " not in sentence
            assert not sentence[0].islower()


def test_the_same_facts_are_worded_in_many_ways():
    entity = Entity("Anna Talovo", "person", "Talovo", "She", {"Birth year": "1950", "Occupation": "architect"})
    texts = {write_article(random.Random(seed), entity, {}).text for seed in range(40)}
    assert len(texts) > 8
    assert any("is an architect" in text for text in texts)
    assert all("1950" in text and "architect" in text for text in texts)
