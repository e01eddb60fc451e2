"""A question and its corpus as an environment: reset, search, answer, reward, for trainers that call tools.

TRL's `GRPOTrainer` takes a factory of it as `environment_factory`, and offers `search` and `answer` to the model as
tools; docs/reinforcement.md serves it with OpenEnv. `recipes/grpo.py` does not need it: there a loop of `rag.systems`
is the environment.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tripletune.eval.metrics import f1
from tripletune.eval.metrics.ranking import recall
from tripletune.models.data.questions import Question
from tripletune.models.data.triples import format_triples
from tripletune.rag.retrievers import Retriever
from tripletune.rag.triple_store import TripleSource

INSTRUCTION = "Search until you know the answer to the question, then give it with the tool `answer`, in few words."


def environment_rows(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """A row for each question, for TRL's `train_dataset`; the environment puts the question behind its prompt."""
    return [{"prompt": [{"role": "user", "content": INSTRUCTION}], "id": one.id} for one in questions]


class SearchEnvironment:
    """One episode after another; each is a question.

    Its public methods are the model's tools, so there are no others.

    Args:
        questions: Those that can be asked.
        retriever: Searches the corpus.
        triples: What a search shows of a passage; its text where this is None, or has none.
        top_k: Passages of a search.
        recall_reward: Weight of the share of supporting passages that were found.
        search_cost: What a search costs.

    Attributes:
        question: The question of the episode.
        searches: Searches so far.
        done: Whether it was answered.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        retriever: Retriever,
        triples: TripleSource | None = None,
        top_k: int = 5,
        recall_reward: float = 0.2,
        search_cost: float = 0.02,
    ) -> None:
        self._questions = {one.id: one for one in questions}
        self._retriever, self._triples, self._top_k = retriever, triples, top_k
        self._recall_reward, self._search_cost = recall_reward, search_cost
        self.reset(next(iter(self._questions)))

    def reset(self, id: str | None = None, seed: int | None = None, **row: Any) -> str:
        """Begin an episode.

        Args:
            id: The question's; None draws one.
            seed: Of the draw.
            **row: Other columns of a row, which are not used.

        Returns:
            The question, on a line of its own.

        Raises:
            KeyError: there is no such question.
        """
        self.question = self._questions[random.Random(seed).choice(list(self._questions)) if id is None else id]
        self.searches, self.done = 0, False
        self._found, self._answer = list[str](), ""
        return f"\n{self.question.question}"

    async def search(self, query: str) -> str:
        """Search the corpus for facts.

        Args:
            query: What to search for.

        Returns:
            The facts that were found, a passage per line.
        """
        if self.done:
            return "The question was answered."
        self.searches += 1
        passages = [hit.passage for hit in await self._retriever.retrieve(query, self._top_k)]
        self._found += [one.id for one in passages]
        known = await self._triples.read(passages) if self._triples else [None] * len(passages)
        shown = [format_triples(triples) if triples else one.content for one, triples in zip(passages, known)]
        return "\n".join(" ".join(text.split()) for text in shown)

    def answer(self, text: str) -> str:
        """Answer the question, which ends the search.

        Args:
            text: The answer.

        Returns:
            That there is one; the first one counts.
        """
        if not self.done:
            self._answer, self.done = text, True
        return "Done."

    def get_reward(self) -> float:
        """The answer's token F1, and the share of supporting passages found, less what the searches cost."""
        question = self.question
        wanted = frozenset(question.passages[place].id for place in question.supporting)
        found = recall(self._found, wanted) if wanted else 0.0
        return f1(self._answer, question.answers) + self._recall_reward * found - self._search_cost * self.searches
