"""A solver of its own reads each question's text, follows every reading through the triples, and finds one answer."""

import random
import re
from functools import cache

import pytest

from tripletune.data_builders.world import RELATIONS, SPLITS, WH_WORDS, Entity
from tripletune.data_builders.world.build import WorldOptions, generate_world
from tripletune.data_builders.world.common import common_questions
from tripletune.data_builders.world.questions import (
    CHAIN_KINDS,
    COMPARISON,
    INTERSECTION,
    QuestionMaker,
    number_in,
)


@cache
def pattern(template):
    text = re.escape(template)
    for name in "xab":
        text = text.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>.+)")
    # The first letter of a question is a capital one.
    return re.compile(f"(?i:{text[0]}){text[1:]}" if text[0].isalpha() else text)


class Solver:
    """Knows the triples and the kinds of the articles, and nothing of how questions were made."""

    def __init__(self, world):
        self.kinds = {title: entity.kind for title, entity in world.entities.items()}
        self.facts: dict[tuple[str, str], set[str]] = {}
        for article in world.articles.values():
            for triple in article.triples:
                self.facts.setdefault((triple.subject, triple.predicate), set()).add(triple.object)
        self.names: dict[str, str] = {}
        for title, kind in self.kinds.items():
            self.names.update({title: title, f"the {title}": title, f"the {kind} {title}": title})

    def follow(self, title, relation):
        if self.kinds.get(title) != relation.kind:
            return set()
        return self.facts.get((title, relation.predicate), set())

    def things(self, phrase):
        """Everything that a noun phrase can mean."""
        if phrase[:4] == "The ":
            return self.things(f"the {phrase[4:]}") | ({self.names[phrase]} if phrase in self.names else set())
        found = {self.names[phrase]} if phrase in self.names else set()
        for relation in RELATIONS:
            for template in relation.refer:
                match = pattern(template).fullmatch(phrase)
                if match:
                    found |= {o for thing in self.things(match["x"]) for o in self.follow(thing, relation)}
        return found

    def answers(self, question):
        return {*self.chains(question), *self.intersections(question), *self.comparisons(question)}

    def chains(self, question):
        for relation in RELATIONS:
            for template in relation.ask:
                match = pattern(template).fullmatch(question)
                for thing in self.things(match["x"]) if match else ():
                    yield from self.follow(thing, relation)

    def intersections(self, question):
        for kind, word in WH_WORDS.items():
            if question.startswith(f"{word} "):
                body = question[len(word) + 1 : -1]
                for halves in self.halves(body):
                    first, second = (self.doers(half, kind) for half in halves)
                    yield from first & second

    def halves(self, body):
        for link in (" and also ", " and "):
            for match in re.finditer(link, body):
                yield body[: match.start()], body[match.end() :]
        for template in {relation.act for relation in RELATIONS if relation.act}:
            match = pattern(template).fullmatch(body)
            both = match and re.fullmatch("both (.+) and (.+)|(.+) as well as (.+)", match["x"])
            if both:
                one, other = (part for part in both.groups() if part)
                yield template.format(x=one), template.format(x=other)

    def doers(self, phrase, kind):
        found = set()
        for relation in RELATIONS:
            match = relation.act and relation.target == kind and pattern(relation.act).fullmatch(phrase)
            if match:
                found |= {o for thing in self.things(match["x"]) for o in self.follow(thing, relation)}
        return found

    def comparisons(self, question):
        for relation in RELATIONS:
            for test in ("less", "more", "same"):
                for template in getattr(relation, test):
                    # "Is the star of {a} also the star of {b}?" is lengthy but plain: names are greedy and distinct.
                    match = pattern(template).fullmatch(question)
                    if match:
                        pairs = [(a, b) for a in self.things(match["a"]) for b in self.things(match["b"])]
                        yield from (self.compare(relation, test, a, b) for a, b in pairs if self.both(relation, a, b))

    def both(self, relation, a, b):
        return bool(self.follow(a, relation) and self.follow(b, relation))

    def compare(self, relation, test, a, b):
        (one,), (other,) = self.follow(a, relation), self.follow(b, relation)
        if test == "same":
            return "yes" if one == other else "no"
        choose = min if test == "less" else max
        assert number_in(one) != number_in(other)
        return choose((number_in(one), a), (number_in(other), b))[1]


@pytest.fixture(scope="module")
def world():
    options = WorldOptions(seed=3, train=400, noise=0.1, comparison=0.2, intersection=0.2, three_hop=0.2, four_hop=0.2)
    return generate_world(options, "train")


@pytest.fixture(scope="module")
def solver(world):
    return Solver(world)


def retrieval(world):
    return [question for question in world.questions if question.helpful]


def test_every_reading_of_a_question_gives_the_gold_answer(world, solver):
    for question in retrieval(world):
        assert solver.answers(question.text) == {question.answer}, question.text


def test_each_subquery_asks_its_own_document_for_the_next_step(world, solver):
    for question in retrieval(world):
        for number, (title, subquery) in enumerate(zip(question.helpful, question.subqueries)):
            assert title in subquery
            (found,) = solver.answers(subquery)
            assert found in [triple.object for triple in world.articles[title].triples]
            if question.kind in CHAIN_KINDS:
                assert found == (*question.helpful, question.answer)[number + 1]
            elif question.kind == INTERSECTION:
                assert found == question.answer


def test_no_question_is_drawn_twice(world):
    assert len({question.text for question in world.questions}) == len(world.questions)
    asked = [(question.helpful, question.predicates, question.test) for question in retrieval(world)]
    assert len(set(asked)) == len(asked)


def maker_of(*entities):
    """A maker for a few entities; one without facts stands for every other kind."""
    empty = {relation.kind for relation in RELATIONS} - {entity.kind for entity in entities}
    fillers = [Entity(kind, kind, kind, "It") for kind in sorted(empty)]
    return QuestionMaker(random.Random(1), {entity.title: entity for entity in (*entities, *fillers)})


def test_no_chain_comes_back_to_where_it_was():
    town = Entity("Talaby", "town", "the town", "It", {"Mayor": "Anna Talovo", "Country": "Talordia"})
    mayor = Entity("Anna Talovo", "person", "Talovo", "She", {"Birthplace": "Talaby"})
    country = Entity("Talordia", "country", "the nation", "It", {"Currency": "mosesh"})
    assert maker_of(town, mayor, country).draw("3-hop").helpful == ("Anna Talovo", "Talaby", "Talordia")
    with pytest.raises(ValueError, match="no further 4-hop"):
        maker_of(town, mayor, country).draw("4-hop")


def test_wordings_of_an_examination_are_those_that_training_leaves_out():
    about = "Director,Birthplace,Birth year,Country,River"
    for other in (False, True):
        options = WorldOptions(train=80, about=about, wordings=-1, other_wordings=other, four_hop=0)
        world = generate_world(options, "train")
        lasts = [pattern(relation.ask[-1]) for relation in options.relations()]
        chains = [question.text for question in world.questions if question.kind in CHAIN_KINDS]
        assert chains
        assert all(any(last.fullmatch(text) for last in lasts) is other for text in chains)


@pytest.mark.parametrize("kind", [*CHAIN_KINDS[1:], COMPARISON, INTERSECTION])
def test_relations_that_make_no_such_question_are_named_as_the_cause(kind):
    weights = {name: 0.0 for name in ("one_hop", "two_hop", "three_hop", "four_hop", "comparison", "intersection")}
    weights[{"2-hop": "two_hop", "3-hop": "three_hop", "4-hop": "four_hop"}.get(kind, kind)] = 1.0
    with pytest.raises(ValueError, match="more relations in about"):
        generate_world(WorldOptions(train=5, about="Language", **weights), "train")


# Common knowledge


def draw(split, count, seed=1):
    return [(question.text, question.answer) for question in common_questions(random.Random(seed), split, count)]


def test_splits_share_no_question_text():
    assert len({question for split in SPLITS for question, _ in draw(split, 200)}) == 600


def test_arithmetic_is_right():
    operations = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    checked = 0
    for question, answer in draw("train", 2000):
        match = re.fullmatch(r"(?:What is|How much is) (\d+) (plus|minus|times) (\d+)\?", question)
        if match:
            checked += 1
            assert operations[match[2]](int(match[1]), int(match[3])) == int(answer)
    assert checked > 200


def test_training_meets_every_fact_of_a_smaller_test_split_in_other_words():
    for seed in range(5):
        learned = {answer for _, answer in draw("train", 72, seed)}
        asked = draw("test", 12, seed + 10)
        assert {answer for _, answer in asked} <= learned


def test_known_answers():
    everything = dict(pair for split in SPLITS for pair in draw(split, 1100 if split == "train" else 596))
    known = {
        "What is the capital of France?": "Paris",
        "Which is bigger, an elephant or a mouse?": "an elephant",
        "Which is smaller, an elephant or a mouse?": "a mouse",
        "What is the opposite of hot?": "cold",
        "How many days are in a week?": "7",
        "Tell me how many legs a spider has.": "8",
        "Which month comes after December?": "January",
        "Which number comes right after 86?": "87",
        "What letter follows M in the alphabet?": "N",
    }
    assert known.items() <= everything.items()


def test_larger_sums_fill_up():
    questions = draw("test", 3000)
    assert len({question for question, _ in questions}) == 3000
