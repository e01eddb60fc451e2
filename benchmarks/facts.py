"""Measure which facts that answers need are among the triples of the supporting passages (proxy facts).

Distill-SynthKG tests extractors so: a multi-hop question with its gold answer says which facts its passages must give.
We take them from the benchmarks themselves, without a model: MuSiQue's hops, 2WikiMultiHopQA's evidences and
HotpotQA's answer.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks import Options, Result, hide_progress_of_libraries
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Question
from tripletune.core.data.triples import Triple
from tripletune.core.data.words import analyzer
from tripletune.core.options import setting
from tripletune.data_builders.readers import get_reader
from tripletune.eval.statistics import bootstrap_ratio
from tripletune.eval.suites import interval_cells
from tripletune.eval.triple_matching import normalize_entity
from tripletune.rag.triple_store import StoredTriples, open_triples
from tripletune.rag.triples.kept import TripleRules
from tripletune.rag.triples.vocabulary import read_vocabulary

_TERMS = analyzer("english")
_EARLIER_HOP = re.compile(r"#(\d+)")


@dataclass(frozen=True)
class FactsOptions(Options):
    """Options of `facts`."""

    reader: str = setting("musique", "reader of the questions: musique, two_wiki or hotpotqa")
    data: str = setting("", "question file")
    triples: tuple[str, ...] = setting((), "stores or files of triples of the supporting passages, a row each")
    questions: int = setting(1000, "maximum number of questions", at_least=1)
    vocabulary: str | None = setting(None, "vocabulary whose predicates the triples get; others are dropped")


class Fact(NamedTuple):
    """A fact that a passage must give.

    Attributes:
        passages: Where it stands.
        name: An end of its triple.
        about: Words of which the other end has at least one.
    """

    passages: tuple[Passage, ...]
    name: str
    about: frozenset[str]


def facts(options: FactsOptions) -> Result:
    """Measure which facts that answers need are among the triples of the supporting passages.

    A fact is there if a triple has its name in one end, as whole words, and a word of what it is about in the other.
    """
    hide_progress_of_libraries()
    read = get_reader(options.reader)
    questions = [row for row in read(options.data) if isinstance(row, Question)]
    rows = []
    for path in options.triples:
        with tempfile.TemporaryDirectory() as scratch:
            source = open_triples(path, Path(scratch) / "triples.sqlite")
            with closing(source):
                for rules in _rules_to_compare(options):
                    rows.append({"triples": path, **_recall_of_facts(questions[: options.questions], source, rules)})
    notes = [
        "Percent of the facts, with 95 % bootstrap intervals that draw questions.",
        "Facts of passages without triples in the file are left out.",
    ]
    return Result(
        f"facts that answers need, among the triples of the supporting passages ({options.reader})",
        "triples vocabulary questions facts recall interval triples_per_passage",
        rows,
        notes,
    )


def _rules_to_compare(options: FactsOptions) -> Iterator[TripleRules]:
    """All triples, and those of the vocabulary."""
    yield TripleRules()
    if options.vocabulary:
        yield TripleRules(read_vocabulary(options.vocabulary), drop_outside=True)


def _recall_of_facts(questions: Sequence[Question], source: StoredTriples, rules: TripleRules) -> dict[str, object]:
    """The recall of the questions' facts, and how many triples a passage has."""
    covered, needed = [], []
    passages: dict[Passage, int] = {}
    for question in questions:
        known = []
        for fact in facts_of(question):
            triples: list[Triple] = []
            stored = [(passage, source.get(passage)) for passage in fact.passages]
            for passage, found in stored:
                kept = rules.kept(found or (), passage.content)
                triples += kept
                if found is not None:
                    passages[passage] = len(kept)
            if all(found is not None for _, found in stored):
                known.append(is_given(fact, triples))
        if known:
            covered.append(sum(known))
            needed.append(len(known))
    recall, interval = interval_cells(bootstrap_ratio(covered, needed))
    return {
        "vocabulary": "no" if rules.vocabulary is None else "yes",
        "questions": len(needed),
        "facts": sum(needed),
        "recall": recall,
        "interval": interval,
        "triples_per_passage": round(sum(passages.values()) / max(len(passages), 1), 1),
    }


def facts_of(question: Question) -> Iterator[Fact]:
    """The facts that the answer needs.

    MuSiQue: per hop its answer, about the hop's question with the answers of earlier hops in it. 2WikiMultiHopQA: each
    gold triple. HotpotQA: the answer, if it is a name, about the question and the titles of its passages.
    """
    supporting = tuple(question.passages[index] for index in question.supporting)
    for hop in question.hops:
        asked = _EARLIER_HOP.sub(lambda match: question.hops[int(match[1]) - 1].answer, hop.question)
        yield Fact((question.passages[hop.passage_index],), hop.answer, frozenset(_TERMS(asked)))
    for triple in question.evidences:
        yield Fact(supporting, triple.object, frozenset(_TERMS(triple.subject)))
    if not question.hops and not question.evidences and normalize_entity(question.answers[0]) not in ("yes", "no"):
        titles = " ".join(passage.title for passage in supporting)
        yield Fact(supporting, question.answers[0], frozenset(_TERMS(f"{question.question} {titles}")))


def is_given(fact: Fact, triples: Sequence[Triple]) -> bool:
    """Whether one of the triples states a fact, in either direction."""
    name = f" {normalize_entity(fact.name)} "
    for triple in triples:
        for end, other in ((triple.subject, triple.object), (triple.object, triple.subject)):
            if name in f" {normalize_entity(end)} " and fact.about & set(_TERMS(other)):
                return True
    return False
