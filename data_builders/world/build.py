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
from tripletune.core.files import json_line, new_folder, write_json, write_text
from tripletune.core.options import CheckedOptions, not_one_of, setting
from tripletune.core.program import run_program
from tripletune.core.rows import Row
from tripletune.data_builders.questions import COMPARISON
from tripletune.data_builders.world import RELATIONS, SPLITS, Entity, Relation, Split
from tripletune.data_builders.world.articles import Article, ArticleWriter
from tripletune.data_builders.world.common import common_questions
from tripletune.data_builders.world.entities import MINIMUM_ARTICLES, EntityBuilder
from tripletune.data_builders.world.names import Namer
from tripletune.data_builders.world.questions import COMMON, KINDS, QuestionMaker, WorldKind, WorldQuestion

logger = logging.getLogger(__name__)

MANIFEST = "world.json"
_LEVELS = {"1-hop": "easy", "3-hop": "hard", "4-hop": "hard", COMMON: "easy"}
# The options with the weights of `KINDS`, without common knowledge, which has a share of its own.
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
        """Problems of numbers, wordings and predicates, all at once, each with the option that it is about."""
        problems = []
        if not any(map(self.questions, SPLITS)):
            problems.append(f"{', '.join(SPLITS)} are all 0: set at least one split to a number of questions")
        if not any(self._kind_weights()):
            problems.append(f"{', '.join(_WEIGHTS)} are all 0: give one kind of question a weight")
        if self.other_wordings and not self.wordings:
            problems.append("other_wordings: wordings 0 leaves no wording out; set wordings too")
        most_wordings = max(len(relation.ask) for relation in RELATIONS)
        if abs(self.wordings) > most_wordings:
            problems.append(f"wordings: {self.wordings}: a relation has at most {most_wordings} wordings; 0 takes all")
        for name in sorted(self._predicates_asked_about() - set(_PREDICATES)):
            problems.append(not_one_of("about", name, _PREDICATES))
        return problems

    def _kind_weights(self) -> list[float]:
        """The weights of the kinds that need retrieval, in the order of `KINDS`."""
        return [getattr(self, name) for name in _WEIGHTS]

    def _predicates_asked_about(self) -> set[str]:
        """The predicates that `about` names."""
        names = [name.strip() for name in self.about.split(",")]
        return {name for name in names if name}

    def relations(self) -> tuple[Relation, ...]:
        """The relations of questions."""
        predicates = self._predicates_asked_about()
        if not predicates:
            return RELATIONS
        return tuple(relation for relation in RELATIONS if relation.predicate in predicates)

    def questions(self, split: Split) -> int:
        """Number of questions in a split."""
        return int(getattr(self, split))

    def counts(self, split: Split) -> dict[WorldKind, int]:
        """Questions of each kind in a split, rounded by the largest remainder, so that they add up exactly."""
        total = self.questions(split)
        weights = self._kind_weights()
        with_retrieval = total * (1 - self.common_knowledge)
        exact = [with_retrieval * weight / sum(weights) for weight in weights]
        exact.append(total * self.common_knowledge)
        counts = [int(value) for value in exact]
        largest_remainder_first = sorted(range(len(KINDS)), key=lambda kind: counts[kind] - exact[kind])
        for kind in largest_remainder_first[: total - sum(counts)]:
            counts[kind] += 1
        return dict(zip(KINDS, counts, strict=True))


@dataclass(frozen=True, slots=True)
class World:
    """One split of a world.

    Attributes:
        entities, articles: By title.
        questions: Of mixed kinds.
        contexts: The titles of each question's context.
    """

    split: Split
    seed: int
    entities: dict[str, Entity]
    articles: dict[str, Article]
    questions: list[WorldQuestion]
    contexts: list[list[str]]

    def question_rows(self) -> Iterator[Row]:
        """The questions in HotpotQA's official layout, so that the reader of HotpotQA reads them, too.

        `supporting_facts` has the sentence of each fact by title and number, from 0, in the order of reasoning.
        """
        for number, (question, context) in enumerate(zip(self.questions, self.contexts, strict=True)):
            facts = []
            for title, predicate in zip(question.helpful, question.predicates, strict=True):
                facts.append([title, self.articles[title].sentence_of[predicate]])
            yield {
                "_id": self._question_id(number),
                "question": question.text,
                "answer": question.answer,
                "type": COMPARISON if question.kind == COMPARISON else "bridge",
                "level": _LEVELS.get(question.kind, "medium"),
                "supporting_facts": facts,
                "context": [[title, list(self.articles[title].sentences)] for title in context],
            }

    def teacher_rows(self) -> Iterator[Row]:
        """The gold decisions in the layout of recorded teacher replies, with the kind of question added.

        "closed_book" and "note" are fields of recorded replies that a perfect teacher leaves empty.
        """
        for number, question in enumerate(self.questions):
            subqueries = []
            for title, text in zip(question.helpful, question.subqueries, strict=True):
                subqueries.append({"title": title, "question": text})
            row: Row = {
                "_id": self._question_id(number),
                "helpful": list(question.helpful),
                "subqueries": subqueries,
                "triples": {title: self.articles[title].rows for title in question.helpful},
                "closed_book": "",
                "note": "",
                "kind": question.kind,
            }
            if question.kind == COMMON:
                row["direct"] = True
            yield row

    def article_rows(self, triples: bool) -> Iterator[Row]:
        """Every article as `{"title", "text"}`, with or without its `"triples"`, which a loop extracts itself."""
        for article in self.articles.values():
            row: Row = {"title": article.title, "text": article.text}
            if triples:
                row["triples"] = article.rows
            yield row

    def _question_id(self, number: int) -> str:
        """The id of a question, which tells worlds and splits apart; results and recorded replies refer to it."""
        return f"world{self.seed}-{self.split}-{number:05d}"


def generate_world(options: WorldOptions, split: Split) -> World:
    """Make one split; splits do not depend on each other.

    Names, facts, words, questions and contexts each have a random generator of their own, so that more questions of one
    kind do not change the articles. The same options give the same world: `WorldOracle.open` makes it again from
    `world.json`, so another draw would make the oracle of an existing folder wrong.
    """

    def generator(purpose: str) -> random.Random:
        """A random generator of its own for each purpose."""
        return random.Random(f"{options.seed}/{split}/{purpose}")

    namer = Namer(generator("names"), split, options.noise)
    size = round(options.articles_per_question * options.questions(split))
    entities = EntityBuilder(generator("facts"), namer, size).build()
    words = generator("words")
    articles = {}
    for title, entity in entities.items():
        articles[title] = ArticleWriter(words, entity, entities).write()
    draws = generator("draws")
    maker = QuestionMaker(draws, entities, options.relations(), options.wordings, options.other_wordings)
    questions: list[WorldQuestion] = []
    for kind, count in options.counts(split).items():
        if kind == COMMON:
            questions += common_questions(draws, split, count)
        else:
            questions += [maker.draw(kind) for _ in range(count)]
    draws.shuffle(questions)
    context_maker = _ContextMaker(generator("contexts"), entities, options.context_paragraphs)
    contexts = list(map(context_maker.draw, questions))
    return World(split, options.seed, entities, articles, questions, contexts)


def write_world(options: WorldOptions, output: str | Path, overwrite: bool = False) -> None:
    """Write each split with questions as `<split>{,.teacher,.corpus,.triples}.jsonl`; `world.json` has the counts.

    The folder appears complete or not at all. `world.json` also has the options, from which the oracle makes the world
    again.
    """
    # Without a manifest, a `train.jsonl` may be another program's file.
    names = [MANIFEST, *(f"{split}.*jsonl" for split in SPLITS)]
    manifest: dict[str, Any] = {"options": asdict(options), "splits": {}}
    with new_folder(output, names, overwrite) as folder:
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


class _ContextMaker:
    """Draws the context of each question: its supporting articles among distractors.

    Args:
        rng: Draws the distractors.
        entities: All entities by title, each with an article.
        size: The number of articles.
    """

    def __init__(self, rng: random.Random, entities: Mapping[str, Entity], size: int) -> None:
        self._rng = rng
        self._entities = entities
        self._size = size
        self._of_kind = defaultdict[str, list[str]](list)
        # The titles that an article mentions or is mentioned by.
        self._neighbours = defaultdict[str, list[str]](list)
        for title, entity in entities.items():
            self._of_kind[entity.kind].append(title)
            for object_ in entity.facts.values():
                if object_ in entities:
                    self._neighbours[title].append(object_)
                    self._neighbours[object_].append(title)

    def draw(self, question: WorldQuestion) -> list[str]:
        """The titles of the supporting articles, of some linked by mentions, and of others of the same kinds; shuffled.

        Half of the free places go to linked articles, which share names with the question, and the others to articles
        that share only their form. A title may be drawn several times, so there are more draws than places.
        """
        # A dictionary keeps the order of the draws, which a set would not.
        chosen = dict.fromkeys(question.helpful)
        neighbours = self._neighbours_of(question.helpful)
        near = self._rng.sample(neighbours, min(len(neighbours), (self._size - len(chosen)) // 2))
        chosen.update(dict.fromkeys(near))
        kinds = [self._entities[title].kind for title in question.helpful] or list(self._of_kind)
        for _ in range(10 * self._size):
            if len(chosen) >= self._size:
                break
            kind = self._rng.choice(kinds)
            chosen[self._rng.choice(self._of_kind[kind])] = None
        # A kind with few entities may run out.
        spare = (title for title in self._entities if title not in chosen)
        titles = [*chosen, *islice(spare, self._size - len(chosen))]
        self._rng.shuffle(titles)
        return titles

    def _neighbours_of(self, titles: Sequence[str]) -> list[str]:
        """The articles that mention one of these or are mentioned by one, each once and in order."""
        neighbours: dict[str, None] = {}
        for title in titles:
            for neighbour in self._neighbours[title]:
                if neighbour not in titles:
                    neighbours[neighbour] = None
        return list(neighbours)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build world",
        description=(__doc__ or "").split("\n")[0],
        example="tripletune build world --output runs/world --seed 7 --train 600 --validation 60 --test 100",
    )
    parser.add_argument("--output", required=True, help="folder for the files")
    parser.add_argument("--overwrite", action="store_true", help="replace a world in the output folder")
    add_arguments(parser, WorldOptions)
    parsed = parser.parse_args(arguments)
    return run_program(
        lambda: write_world(from_arguments(WorldOptions, parsed), parsed.output, parsed.overwrite),
        stopped="stopped; run the same command again to make the same world",
    )


if __name__ == "__main__":
    sys.exit(main())
