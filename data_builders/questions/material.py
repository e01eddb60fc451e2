"""What questions are made of: the passages of a corpus with their triples, split by document."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice

from tripletune.core.data.passages import Passage, read_corpus
from tripletune.core.program import progress
from tripletune.data_builders.questions.drafts import draft_questions
from tripletune.data_builders.questions.facts import Draft, FactGraph
from tripletune.data_builders.questions.holdout import hold_out
from tripletune.data_builders.questions.names import name_key
from tripletune.data_builders.questions.options import TEST, TRAIN, QuestionBuildOptions
from tripletune.data_builders.questions.rows import QuestionRow, StepRow
from tripletune.data_builders.questions.teacher import Wording
from tripletune.data_builders.subq.annotations import TripleLookup

# A distractor is drawn at random, maybe several times; this many draws per wanted passage give enough distinct ones.
_DRAWS = 20


class Material:
    """Passages with their triples, split by document; makes drafts, and rows from worded drafts.

    Attributes:
        counts: Warnings for the card, with how often.
        passages: The corpus; facts name a passage by its number in this list.
        held_out: The documents of the test questions.
        numbers: The numbers of each split's passages.
        documents: Number of documents per split.
    """

    def __init__(self, options: QuestionBuildOptions) -> None:
        self.options = options
        self.counts = Counter[str]()
        self.passages = list(read_corpus(options.corpus, blank_texts=True))
        lookup = TripleLookup(options.triples, self.counts)
        self._triples = [lookup(passage) for passage in progress(self.passages, "passages")]
        lookup.refuse_useless_file()
        self._graph = FactGraph(self.passages, self._triples)

        documents = [_document_of(passage) for passage in self.passages]
        self.held_out = self._choose_documents(documents)
        self.numbers: dict[str, list[int]] = {TRAIN: [], TEST: []}
        for number, document in enumerate(documents):
            split = TEST if document in self.held_out else TRAIN
            self.numbers[split].append(number)
        distinct = set(documents)
        self.documents = {TRAIN: len(distinct - self.held_out), TEST: len(distinct & self.held_out)}

        # The numbers of the passages with a fact on an entity.
        self._passages_on: dict[str, set[int]] = defaultdict(set)
        for fact in self._graph.facts:
            self._passages_on[fact.subject].add(fact.passage)
            self._passages_on[fact.object].add(fact.passage)

    def _choose_documents(self, documents: list[str]) -> set[str]:
        """The documents to hold out, given the document of each passage."""
        facts_per_document = Counter(documents[fact.passage] for fact in self._graph.facts)
        if self.options.holdout and len(facts_per_document) < 2:
            raise ValueError(
                f"{self.options.corpus}: {len(facts_per_document)} document(s) have facts for questions, but a split "
                "by document needs two: add documents, extract more triples, or set --holdout 0"
            )
        links = self._graph.links(documents)
        return hold_out(facts_per_document, links, self.options.holdout, self.options.seed)

    def drafts(self, split: str) -> Iterator[Draft]:
        """The drafts of a split, at most `tries` times the wanted questions; the same options give the same drafts."""
        passages = set(self.numbers[split])
        drafts = draft_questions(self._graph, passages, self.options.weights(), self.options.seed, self.counts)
        return islice(drafts, self.most_drafts(split))

    def most_drafts(self, split: str) -> int:
        """How many drafts of a split may be tried."""
        return round(self.options.tries * self.options.wanted()[split])

    def passages_of(self, draft: Draft) -> list[Passage]:
        """The passage of each fact."""
        return [self.passages[fact.passage] for fact in draft.facts]

    def row(self, split: str, draft: Draft, wording: Wording) -> QuestionRow:
        """The finished question of a draft, whose steps are in the order of its facts."""
        steps = []
        for fact, subquery, sought in zip(draft.facts, wording.subqueries, draft.sought, strict=True):
            steps.append(StepRow(subquery, self.passages[fact.passage], sought, self._triples[fact.passage]))
        return QuestionRow(
            draft.id, wording.question, draft.answer, draft.kind, steps, self._draw_context(split, draft)
        )

    def _draw_context(self, split: str, draft: Draft) -> list[Passage]:
        """A question's passages and distractors of the split, half of them on the same entities, in random order.

        Passages on the same entities are what a retriever would confuse with the supporting ones. Only passages of the
        split are drawn, since a test passage in a training context would be seen in training.
        """
        rng = random.Random(draft.id)
        size = self.options.context
        split_numbers = self.numbers[split]
        needed = [fact.passage for fact in draft.facts]
        on_same_entities: set[int] = set()
        for name in (*draft.given, *draft.sought):
            on_same_entities |= self._passages_on[name_key(name)]
        near = sorted(on_same_entities.intersection(split_numbers).difference(needed))
        near = rng.sample(near, min(len(near), (size - len(needed)) // 2))
        far = [rng.choice(split_numbers) for _ in range(_DRAWS * size)]
        numbers = list(dict.fromkeys([*needed, *near, *far]))[:size]
        return [self.passages[number] for number in rng.sample(numbers, len(numbers))]


def _document_of(passage: Passage) -> str:
    """The document of a passage; a corpus without documents has one per title."""
    return str(passage.source.get("document") or passage.title or passage.id)
