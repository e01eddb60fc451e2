"""A world to learn in: fictional articles with gold triples and multi-hop questions that only retrieval can answer.

No language model knows the coined names, so an answer shows that retrieval, triples and planning worked (the loop of
RAS, section 3 and Algorithm 1). Questions come in HotpotQA's official layout, gold decisions in the layout of recorded
teacher replies, and the articles as a corpus and as pre-extracted triples. The same options give the same bytes.

    tripletune build world --output runs/world --seed 7 --train 600 --validation 60 --test 100
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tripletune.data_builders.world.articles import Article, write_article
from tripletune.data_builders.world.common import common_questions
from tripletune.data_builders.world.facts import MINIMUM_ARTICLES, Entity, build_entities
from tripletune.data_builders.world.names import SPLITS, Namer
from tripletune.data_builders.world.questions import COMMON, KINDS, Program, Question, QuestionMaker, pick_context
from tripletune.data_builders.world.relations import RELATIONS, Relation

logger = logging.getLogger(__name__)

MANIFEST = "world.json"
FILES = (".jsonl", ".teacher.jsonl", ".corpus.jsonl", ".triples.jsonl")
_SHARE_FIELDS = ("one_hop", "two_hop", "three_hop", "four_hop", "comparison", "intersection")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """What world to generate; the shares of the six retrieval kinds are relative to each other.

    Raises:
        ValueError: a value makes no sense; the message lists all of them.
    """

    seed: int = _option(7, "seed of everything that is drawn")
    train: int = _option(600, "questions in the train split (0: no such split)")
    validation: int = _option(60, "questions in the validation split (0: no such split)")
    test: int = _option(100, "questions in the test split (0: no such split)")
    common_knowledge: float = _option(0.12, "share of questions that need no retrieval, of all questions")
    one_hop: float = _option(0.25, "weight of one-hop questions among those that need retrieval")
    two_hop: float = _option(0.40, "weight of two-hop questions")
    three_hop: float = _option(0.12, "weight of three-hop questions")
    four_hop: float = _option(0.05, "weight of four-hop questions")
    comparison: float = _option(0.10, "weight of comparisons")
    intersection: float = _option(0.08, "weight of intersections")
    noise: float = _option(0.03, "share of names with commas, brackets, quotes, accents or another script")
    articles_per_question: float = _option(1.0, f"articles for each question (a split has at least {MINIMUM_ARTICLES})")
    context_paragraphs: int = _option(10, "paragraphs in the context of each question, distractors included")
    about: str = _option("", "predicates that questions are about, separated by commas (empty: all)")
    wordings: int = _option(0, "wordings of each relation in questions (0: all); few need few examples")

    def __post_init__(self) -> None:
        problems = [f"{split} = {self.questions(split)} is negative" for split in SPLITS if self.questions(split) < 0]
        if not any(self.questions(split) > 0 for split in SPLITS):
            problems.append(f"{', '.join(SPLITS)} are all 0: ask for questions in one split at least")
        for name in ("common_knowledge", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name} = {getattr(self, name)} must lie between 0 and 1")
        weights = [getattr(self, name) for name in _SHARE_FIELDS]
        if min(weights) < 0 or sum(weights) <= 0:
            problems.append(
                f"the weights {', '.join(_SHARE_FIELDS)} = {weights} must be 0 or more, one of them above 0"
            )
        if self.articles_per_question < 0:
            problems.append(f"articles_per_question = {self.articles_per_question} is negative")
        if not 4 <= self.context_paragraphs <= MINIMUM_ARTICLES:
            problems.append(
                f"context_paragraphs = {self.context_paragraphs} must lie between 4 (a four-hop question's documents) "
                f"and {MINIMUM_ARTICLES} (the smallest world)"
            )
        unknown = sorted(self._predicates() - {relation.predicate for relation in RELATIONS})
        if unknown:
            known = ", ".join(sorted({relation.predicate for relation in RELATIONS}))
            problems.append(f"about names {', '.join(unknown)}, which no relation is called: choose among {known}")
        if self.wordings < 0:
            problems.append(f"wordings = {self.wordings} is negative")
        if problems:
            raise ValueError("world options: " + "; ".join(problems))

    def _predicates(self) -> set[str]:
        return {name.strip() for name in self.about.split(",") if name.strip()}

    def relations(self) -> tuple[Relation, ...]:
        """The relations that questions are about."""
        chosen = self._predicates()
        return tuple(relation for relation in RELATIONS if not chosen or relation.predicate in chosen)

    def questions(self, split: str) -> int:
        """How many questions a split has."""
        return int(getattr(self, split))

    def counts(self, split: str) -> dict[str, int]:
        """Questions of each kind in a split; they add up exactly, rounded by the largest remainder."""
        total = self.questions(split)
        weights = [getattr(self, name) for name in _SHARE_FIELDS]
        retrieval = 1 - self.common_knowledge
        exact = [total * retrieval * weight / sum(weights) for weight in weights] + [total * self.common_knowledge]
        counts = [int(value) for value in exact]
        by_remainder = sorted(range(len(KINDS)), key=lambda i: counts[i] - exact[i])
        for i in by_remainder[: total - sum(counts)]:
            counts[i] += 1
        return dict(zip(KINDS, counts))


@dataclass(frozen=True, slots=True)
class World:
    """One split: its articles, its questions, and the titles of each question's context.

    Attributes:
        split: A member of `SPLITS`.
        seed: The seed it was made with.
        entities: Entities by title.
        articles: Articles by title, in the order of `entities`.
        questions: The questions, kinds mixed.
        contexts: For every question the titles of its paragraphs.
    """

    split: str
    seed: int
    entities: dict[str, Entity]
    articles: dict[str, Article]
    questions: list[Question]
    contexts: list[list[str]]

    def question_rows(self) -> Iterator[dict[str, Any]]:
        """The questions in HotpotQA's official layout."""
        for number, (question, context) in enumerate(zip(self.questions, self.contexts)):
            yield {
                "_id": self._id(number),
                "question": question.text,
                "answer": question.answer,
                "type": question.official_type,
                "level": question.level,
                "supporting_facts": [
                    [title, self.articles[title].sentence_of[predicate]]
                    for title, predicate in zip(question.helpful, question.predicates)
                ],
                "context": [[title, list(self.articles[title].sentences)] for title in context],
            }

    def teacher_rows(self) -> Iterator[dict[str, Any]]:
        """The gold decisions in the layout of recorded teacher replies, with the kind of question added."""
        for number, question in enumerate(self.questions):
            row: dict[str, Any] = {
                "_id": self._id(number),
                "helpful": list(question.helpful),
                "subqueries": [
                    {"title": title, "question": text} for title, text in zip(question.helpful, question.subqueries)
                ],
                "triples": {
                    title: [triple.as_list() for triple in self.articles[title].triples] for title in question.helpful
                },
                "closed_book": "",
                "note": "",
                "kind": question.kind,
            }
            if question.kind == COMMON:
                row["direct"] = True
            yield row

    def corpus_rows(self) -> Iterator[dict[str, Any]]:
        """Every article as `{"title", "text"}`."""
        for article in self.articles.values():
            yield {"title": article.title, "text": article.text}

    def triple_rows(self) -> Iterator[dict[str, Any]]:
        """Every article as `{"title", "text", "triples"}`."""
        for article in self.articles.values():
            triples = [triple.as_list() for triple in article.triples]
            yield {"title": article.title, "text": article.text, "triples": triples}

    def _id(self, number: int) -> str:
        return f"world{self.seed}-{self.split}-{number:05d}"


def generate_world(options: WorldOptions, split: str) -> World:
    """Make one split; splits do not depend on each other.

    Args:
        options: What to make.
        split: A member of `SPLITS`.

    Returns:
        The world of this split.

    Raises:
        ValueError: there is no such split, or the world is too small for the questions asked for.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    # Each part has its own source of chance, so that asking for more questions of one kind leaves the articles alone.
    names, facts, words, draws, contexts = (
        random.Random(f"{options.seed}/{split}/{part}") for part in ("names", "facts", "words", "draws", "contexts")
    )
    size = round(options.articles_per_question * options.questions(split))
    entities = build_entities(facts, Namer(names, split, options.noise), size)
    articles = {title: write_article(words, entity, entities) for title, entity in entities.items()}
    maker = QuestionMaker(draws, entities, options.relations(), options.wordings)
    questions = []
    for kind, count in options.counts(split).items():
        if kind == COMMON:
            program = Program(COMMON, (), ())
            questions += [Question(program, text, answer) for text, answer in common_questions(draws, split, count)]
        else:
            questions += [maker.draw(kind) for _ in range(count)]
    draws.shuffle(questions)
    return World(
        split, options.seed, entities, articles, questions, _contexts(contexts, options, articles, entities, questions)
    )


def write_world(options: WorldOptions, output_dir: str | Path) -> dict[str, Any]:
    """Write every split that has questions, and a manifest when all of them are complete.

    The files are `<split>.jsonl`, `<split>.teacher.jsonl`, `<split>.corpus.jsonl`, `<split>.triples.jsonl` and
    `world.json`. Each is replaced as a whole, so a killed run leaves no half-written file, and running it again
    gives the same bytes.

    Args:
        options: What to make.
        output_dir: Folder for the files; made when it is missing.

    Returns:
        The manifest: the options, and counts of articles, triples and questions by kind.

    Raises:
        ValueError: a world is too small for the questions asked for.
        NotADirectoryError: `output_dir` is a file.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"the output folder {folder} is a file: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _splits_of(folder / MANIFEST)
    (folder / MANIFEST).unlink(missing_ok=True)
    manifest: dict[str, Any] = {"options": asdict(options), "splits": {}}
    for split in SPLITS:
        if not options.questions(split):
            for kind in FILES if split in earlier else ():
                # Of another world, perhaps one that shares its entities with a split of this one.
                (folder / f"{split}{kind}").unlink(missing_ok=True)
            continue
        world = generate_world(options, split)
        _write_lines(folder / f"{split}.jsonl", world.question_rows())
        _write_lines(folder / f"{split}.teacher.jsonl", world.teacher_rows())
        _write_lines(folder / f"{split}.corpus.jsonl", world.corpus_rows())
        _write_lines(folder / f"{split}.triples.jsonl", world.triple_rows())
        kinds = Counter(question.kind for question in world.questions)
        manifest["splits"][split] = {
            "questions": len(world.questions),
            "kinds": {kind: kinds[kind] for kind in KINDS},
            "articles": len(world.articles),
            "triples": sum(len(article.triples) for article in world.articles.values()),
        }
        logger.info("%s: %d questions, %d articles in %s", split, len(world.questions), len(world.articles), folder)
    _write_text(folder / MANIFEST, [json.dumps(manifest, indent=2) + "\n"])
    return manifest


def _splits_of(manifest: Path) -> set[str]:
    try:
        return set(json.loads(manifest.read_text(encoding="utf-8"))["splits"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: Arguments without the program's name; `None` takes those of the process.

    Returns:
        The exit status: 0; 2 for bad input and 130 when interrupted, after a message on standard error.
    """
    parser = argparse.ArgumentParser(prog="tripletune build world", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, help="folder for the files")
    for option in fields(WorldOptions):
        flag = "--" + option.name.replace("_", "-")
        text = f"{option.metadata['help']} (default {option.default})"
        parser.add_argument(flag, type=type(option.default), default=option.default, help=text)
    values = vars(parser.parse_args(arguments))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    output = values.pop("output")
    try:
        write_world(WorldOptions(**values), output)
    except (ValueError, OSError) as error:
        logger.error("error: %s", error)
        return 2
    except KeyboardInterrupt:
        logger.error("stopped; the same command makes the same world")
        return 130
    return 0


def _contexts(
    rng: random.Random,
    options: WorldOptions,
    articles: dict[str, Article],
    entities: dict[str, Entity],
    questions: Sequence[Question],
) -> list[list[str]]:
    neighbours: dict[str, list[str]] = {title: [] for title in articles}
    of_kind: dict[str, list[str]] = {}
    for title, entity in entities.items():
        of_kind.setdefault(entity.kind, []).append(title)
        for object_ in entity.facts.values():
            if object_ in neighbours:
                neighbours[title].append(object_)
                neighbours[object_].append(title)
    size = options.context_paragraphs
    return [pick_context(rng, question, articles, neighbours, of_kind, size) for question in questions]


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    _write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _write_text(path: Path, lines: Iterable[str]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
