"""Build a fictional world: articles with gold triples and multi-hop questions that only retrieval can answer.

No language model knows the coined names, so a right answer shows that retrieval, triples and planning worked (the loop
of RAS, section 3 and Algorithm 1). Questions have HotpotQA's official layout, and gold decisions have the layout of
recorded teacher replies. The articles are written as a corpus and as triples. The same options give the same bytes.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.triples import Triple
from tripletune.core.files import json_line, new_folder, write_json, write_text
from tripletune.core.options import CheckedOptions, not_one_of, setting
from tripletune.core.program import run_program
from tripletune.data_builders.questions import COMPARISON
from tripletune.data_builders.world import (
    MINIMUM_ARTICLES,
    RELATION_OF,
    RELATIONS,
    SPLITS,
    Entity,
    EntityBuilder,
    Namer,
    Relation,
)
from tripletune.data_builders.world.questions import COMMON, KINDS, QuestionMaker, WorldQuestion, common_questions

logger = logging.getLogger(__name__)

MANIFEST = "world.json"
_LEVELS = {"1-hop": "easy", "3-hop": "hard", "4-hop": "hard", COMMON: "easy"}
_NOUN_OPENING, _KIND_OPENING, _SHARED_SENTENCE, _FULL_STATEMENT = 0.7, 0.6, 0.4, 0.3
_WEIGHTS = ("one_hop", "two_hop", "three_hop", "four_hop", "comparison", "intersection")
_PREDICATES = sorted({relation.predicate for relation in RELATIONS})


@dataclass(frozen=True, slots=True)
class WorldOptions(CheckedOptions):
    """Options of a world; the weights of the six retrieval kinds are relative to each other."""

    seed: int = setting(7, "seed of all random choices")
    train: int = setting(600, "questions in the train split (0: no split)", at_least=0)
    validation: int = setting(60, "questions in the validation split (0: no split)", at_least=0)
    test: int = setting(100, "questions in the test split (0: no split)", at_least=0)
    common_knowledge: float = setting(0.12, "share of all questions that need no retrieval", at_least=0, at_most=1)
    one_hop: float = setting(0.25, "weight of one-hop questions among those that need retrieval", at_least=0)
    two_hop: float = setting(0.40, "weight of two-hop questions", at_least=0)
    three_hop: float = setting(0.12, "weight of three-hop questions", at_least=0)
    four_hop: float = setting(0.05, "weight of four-hop questions", at_least=0)
    comparison: float = setting(0.10, "weight of comparisons", at_least=0)
    intersection: float = setting(0.08, "weight of intersections", at_least=0)
    noise: float = setting(0.03, "share of names with punctuation, accents or another script", at_least=0, at_most=1)
    articles_per_question: float = setting(
        1.0, f"articles per question (a split has at least {MINIMUM_ARTICLES})", at_least=0, at_most=1000
    )
    # A context has room for the documents of a four-hop question, and fits into the smallest world.
    context_paragraphs: int = setting(
        10, "paragraphs in the context of each question, distractors included", at_least=4, at_most=MINIMUM_ARTICLES
    )
    about: str = setting("", "predicates that questions are about, separated by commas (empty: all)")
    wordings: int = setting(0, "wordings per relation in questions: the first N, all but the last N (-N), or all (0)")
    other_wordings: bool = setting(False, "use the wordings that --wordings leaves out, for a test")

    def check(self) -> list[str]:
        """Problems of numbers, wordings and predicates."""
        found = []
        if not any(self.questions(split) for split in SPLITS):
            found.append(f"{', '.join(SPLITS)} are all 0: set at least one split to a number of questions")
        if not any(getattr(self, name) for name in _WEIGHTS):
            found.append(f"{', '.join(_WEIGHTS)} are all 0: give one kind of question a weight")
        if self.other_wordings and not self.wordings:
            found.append("other_wordings: wordings 0 leaves no wording out; set wordings too")
        if abs(self.wordings) > (most := max(len(relation.ask) for relation in RELATIONS)):
            found.append(f"wordings: {self.wordings}: a relation has at most {most} wordings; 0 takes all")
        unknown = sorted(self._predicates() - set(_PREDICATES))
        return found + [not_one_of("about", name, _PREDICATES) for name in unknown]

    def _predicates(self) -> set[str]:
        return {name.strip() for name in self.about.split(",") if name.strip()}

    def relations(self) -> tuple[Relation, ...]:
        """The relations of questions."""
        chosen = self._predicates()
        return tuple(relation for relation in RELATIONS if not chosen or relation.predicate in chosen)

    def questions(self, split: str) -> int:
        """Number of questions in a split."""
        return int(getattr(self, split))

    def counts(self, split: str) -> dict[str, int]:
        """Questions of each kind in a split, rounded by the largest remainder, so that they add up exactly."""
        total = self.questions(split)
        weights = [getattr(self, name) for name in _WEIGHTS]
        retrieval = 1 - self.common_knowledge
        exact = [total * retrieval * weight / sum(weights) for weight in weights] + [total * self.common_knowledge]
        counts = [int(value) for value in exact]
        by_remainder = sorted(range(len(KINDS)), key=lambda i: counts[i] - exact[i])
        for i in by_remainder[: total - sum(counts)]:
            counts[i] += 1
        return dict(zip(KINDS, counts))


@dataclass(frozen=True, slots=True)
class Article:
    """An article, its triples, and the sentence that states each predicate."""

    title: str
    sentences: tuple[str, ...]
    triples: tuple[Triple, ...]
    sentence_of: Mapping[str, int]

    @property
    def text(self) -> str:
        """The sentences, joined as in HotpotQA's reader."""
        return " ".join(self.sentences)

    @property
    def rows(self) -> list[list[str]]:
        """The triples as lists for JSON."""
        return [triple.as_list() for triple in self.triples]


class ArticleWriter:
    """Writes the facts of one entity, in random order, as two to five varied sentences that state each fact once."""

    def __init__(self, rng: random.Random, entity: Entity, world: Mapping[str, Entity]) -> None:
        self._rng, self._entity, self._world = rng, entity, world
        self._left = [RELATION_OF[entity.kind, predicate] for predicate in entity.facts]
        rng.shuffle(self._left)
        self._stated: dict[str, int] = {}
        self._sentences: list[str] = []

    def write(self) -> Article:
        """The article, with its triples in the order of the text."""
        self._opening()
        while self._left:
            self._next_sentence()
        title, facts = self._entity.title, self._entity.facts
        triples = tuple(Triple(title, predicate, facts[predicate]) for predicate in self._stated)
        return Article(title, tuple(self._sentences), triples, self._stated)

    def _opening(self) -> None:
        """A sentence of the form "X is a hockey club based in Y", or any other sentence."""
        noun = next((r for r in self._left if r.noun), None)
        if noun is not None and self._rng.random() < _NOUN_OPENING:
            kind = noun.noun.format(o=self._entity.facts[noun.predicate])
            self._take(noun)
        elif self._entity.kind != "person" and self._rng.random() < _KIND_OPENING:
            kind = self._entity.alias.removeprefix("the ")
        else:
            return self._next_sentence()
        sentence = f"{self._entity.mention} is {_with_article(kind)}"
        detail = next((r for r in self._left if r.after), None)
        if detail is not None:
            sentence += f" {detail.after.format(o=self._object(detail))}"
            self._take(detail)
        self._finish(sentence)

    def _next_sentence(self) -> None:
        first = self._left[0]
        self._take(first)
        if not first.verb or (first.full and self._rng.random() < _FULL_STATEMENT):
            return self._finish(self._fill(self._rng.choice(first.full), first, pronoun=False))
        sentence = self._fill(f"{{s}} {self._rng.choice(first.verb)}", first, pronoun=True)
        partner = next((r for r in self._left if r.verb), None)
        if partner is not None and self._rng.random() < _SHARED_SENTENCE:
            verb = self._rng.choice(partner.verb)
            # "was born in Y and was born in 1950" reads better as two sentences.
            if f"{verb.split()[0]} " not in f"{sentence} ":
                self._take(partner)
                sentence += f" and {self._fill(verb, partner, pronoun=True)}"
        self._finish(sentence)

    def _take(self, relation: Relation) -> None:
        self._left.remove(relation)
        self._stated[relation.predicate] = len(self._sentences)

    def _fill(self, template: str, relation: Relation, pronoun: bool) -> str:
        object_ = self._object(relation)
        if "@ {o}" in template:
            template, object_ = template.replace("@ {o}", "{o}"), _with_article(object_)
        return template.format(s=self._subject(pronoun), o=object_)

    def _object(self, relation: Relation) -> str:
        text = self._entity.facts[relation.predicate]
        return self._world[text].mention if relation.target else text

    def _subject(self, pronoun: bool) -> str:
        if not self._sentences:
            return self._entity.mention
        names = [self._entity.mention, self._entity.mention, self._entity.alias]
        return self._rng.choice([*names, self._entity.pronoun] if pronoun else names)

    def _finish(self, sentence: str) -> None:
        self._sentences.append(sentence[0].upper() + sentence[1:] + ("" if sentence.endswith(".") else "."))


def _with_article(noun: str) -> str:
    # "university" starts with a vowel letter but takes "a".
    vowel = noun[0] in "aeiou" and not noun.startswith("uni")
    return f"{'an' if vowel else 'a'} {noun}"


@dataclass(frozen=True, slots=True)
class World:
    """One split: entities and articles by title, questions of mixed kinds, and titles of each question's context."""

    split: str
    seed: int
    entities: dict[str, Entity]
    articles: dict[str, Article]
    questions: list[WorldQuestion]
    contexts: list[list[str]]

    def question_rows(self) -> Iterator[dict[str, Any]]:
        """The questions in HotpotQA's official layout."""
        for number, (question, context) in enumerate(zip(self.questions, self.contexts)):
            yield {
                "_id": self._id(number),
                "question": question.text,
                "answer": question.answer,
                "type": COMPARISON if question.kind == COMPARISON else "bridge",
                "level": _LEVELS.get(question.kind, "medium"),
                "supporting_facts": [
                    [title, self.articles[title].sentence_of[predicate]]
                    for title, predicate in zip(question.helpful, question.predicates)
                ],
                "context": [[title, list(self.articles[title].sentences)] for title in context],
            }

    def teacher_rows(self) -> Iterator[dict[str, Any]]:
        """The gold decisions in the layout of recorded teacher replies, with the kind of question added."""
        for number, question in enumerate(self.questions):
            asked = zip(question.helpful, question.subqueries)
            yield {
                "_id": self._id(number),
                "helpful": list(question.helpful),
                "subqueries": [{"title": title, "question": text} for title, text in asked],
                "triples": {title: self.articles[title].rows for title in question.helpful},
                **{"closed_book": "", "note": "", "kind": question.kind},
                **({"direct": True} if question.kind == COMMON else {}),
            }

    def article_rows(self, triples: bool) -> Iterator[dict[str, Any]]:
        """Every article as `{"title", "text"}`, with or without its `"triples"`."""
        for article in self.articles.values():
            yield {"title": article.title, "text": article.text} | ({"triples": article.rows} if triples else {})

    def _id(self, number: int) -> str:
        return f"world{self.seed}-{self.split}-{number:05d}"


def generate_world(options: WorldOptions, split: str) -> World:
    """Make one split; splits do not depend on each other."""
    # Each part has its own random generator, so that more questions of one kind do not change the articles.
    names, facts, words, draws, contexts = (
        random.Random(f"{options.seed}/{split}/{part}") for part in ("names", "facts", "words", "draws", "contexts")
    )
    size = round(options.articles_per_question * options.questions(split))
    entities = EntityBuilder(facts, Namer(names, split, options.noise), size).build()
    articles = {title: ArticleWriter(words, entity, entities).write() for title, entity in entities.items()}
    maker = QuestionMaker(draws, entities, options.relations(), options.wordings, options.other_wordings)
    questions: list[WorldQuestion] = []
    for kind, count in options.counts(split).items():
        if kind == COMMON:
            questions += common_questions(draws, split, count)
        else:
            questions += [maker.draw(kind) for _ in range(count)]
    draws.shuffle(questions)
    paragraphs = _contexts(contexts, entities, questions, options.context_paragraphs)
    return World(split, options.seed, entities, articles, questions, paragraphs)


def write_world(options: WorldOptions, output: str | Path, overwrite: bool = False) -> None:
    """Write each split with questions as `<split>{,.teacher,.corpus,.triples}.jsonl`; `world.json` has the counts."""
    # Without a manifest, a `train.jsonl` may be another program's file.
    made = [MANIFEST, *(f"{split}.*jsonl" for split in SPLITS)]
    manifest: dict[str, Any] = {"options": asdict(options), "splits": {}}
    with new_folder(output, made, overwrite) as folder:
        for split in filter(options.questions, SPLITS):
            world = generate_world(options, split)
            files = {
                split: world.question_rows(),
                f"{split}.teacher": world.teacher_rows(),
                f"{split}.corpus": world.article_rows(triples=False),
                f"{split}.triples": world.article_rows(triples=True),
            }
            for name, rows in files.items():
                write_text(folder / f"{name}.jsonl", "".join(map(json_line, rows)))
            kinds = Counter(question.kind for question in world.questions)
            manifest["splits"][split] = {
                "questions": len(world.questions),
                "kinds": {kind: kinds[kind] for kind in KINDS},
                "articles": len(world.articles),
                "triples": sum(len(article.triples) for article in world.articles.values()),
            }
            logger.info("%s: %d questions, %d articles in %s", split, len(world.questions), len(world.articles), output)
        write_json(folder / MANIFEST, manifest)


def _contexts(
    rng: random.Random, entities: Mapping[str, Entity], questions: Sequence[WorldQuestion], size: int
) -> list[list[str]]:
    neighbours, of_kind = (defaultdict[str, list[str]](list) for _ in range(2))
    for title, entity in entities.items():
        of_kind[entity.kind].append(title)
        for object_ in entity.facts.values():
            if object_ in entities:
                neighbours[title].append(object_)
                neighbours[object_].append(title)

    def context(question: WorldQuestion) -> list[str]:
        """The supporting paragraphs, some paragraphs linked by mentions, and others of the same kinds; shuffled."""
        chosen = dict.fromkeys(question.helpful)
        near = dict.fromkeys(near for title in question.helpful for near in neighbours[title] if near not in chosen)
        chosen.update(dict.fromkeys(rng.sample(list(near), min(len(near), (size - len(chosen)) // 2))))
        kinds = [entities[title].kind for title in question.helpful] or list(of_kind)
        for _ in range(10 * size):
            if len(chosen) < size:
                chosen[rng.choice(of_kind[rng.choice(kinds)])] = None
        # A kind with few entities may run out.
        spare = (title for title in entities if title not in chosen)
        titles = [*chosen, *islice(spare, size - len(chosen))]
        rng.shuffle(titles)
        return titles

    return [context(question) for question in questions]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = CommandParser(
        prog="tripletune build world",
        description=(__doc__ or "").split("\n")[0],
        example="tripletune build world --output runs/world --seed 7 --train 600 --validation 60 --test 100",
    )
    parser.add_argument("--output", required=True, help="folder for the files")
    parser.add_argument("--overwrite", action="store_true", help="replace a world in the output folder")
    add_arguments(parser, WorldOptions)
    given = parser.parse_args(arguments)
    return run_program(
        lambda: write_world(from_arguments(WorldOptions, given), given.output, given.overwrite),
        stopped="stopped; run the same command again to make the same world",
    )


if __name__ == "__main__":
    sys.exit(main())
