"""The calls of a build that are made on other machines (`recipes/ray_corpus.py`): which questions take them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from pydantic import TypeAdapter

from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.hotpotqa_subq import label_question
from tripletune.data_builders.hotpotqa_subq.annotations import TripleFile
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source, usable_questions
from tripletune.data_builders.hotpotqa_subq.teacher import LLMTeacher, load_subq_prompts
from tripletune.models.data.questions import Question, UnlabelledQuestion
from tripletune.models.llm import CallError, LLMClient, RepliesPending, Sampling, SetupError
from tripletune.models.llm.backends import LLMOptions, open_client
from tripletune.models.llm.ledger_client import RetriesExhausted
from tripletune.models.llm.noted_calls import NotedCalls


class Labeller:
    """Labels questions for the sake of the calls.

    Args:
        options: Those of the build.
        client: The teacher.
        sampling: Temperature, top_p and seed.
    """

    def __init__(self, options: BuildOptions, client: LLMClient, sampling: Sampling) -> None:
        stored = None if options.triples_from == "teacher" else TripleFile(options.triples_from)
        shown, first, prompts = options.show_documents, options.first_subquery, load_subq_prompts(options.prompts)
        self._teacher = LLMTeacher(client, prompts, stored, shown, first, sampling, options.json_schema)
        self._options, self._runner = options, asyncio.Runner()

    def label(self, questions: Iterable[Question]) -> list[BaseException]:
        """Label questions together; the errors of those that wait for replies.

        Raises:
            SetupError: no call can succeed.
            RetriesExhausted: the server stays away.
        """
        errors = self._runner.run(self._errors(questions))
        for error in errors:
            # These the build meets again, and does what --on-call-error says.
            of_one_question = isinstance(error, (CallError, RepliesPending, UnlabelledQuestion))
            if isinstance(error, (SetupError, RetriesExhausted)) or not of_one_question:
                raise error
        return [error for error in errors if isinstance(error, RepliesPending)]

    async def _errors(self, questions: Iterable[Question]) -> list[BaseException]:
        first = self._options.first_subquery
        labels = (label_question(question, self._teacher, first_subquery=first) for question in questions)
        found = await asyncio.gather(*labels, return_exceptions=True)
        return [one for one in found if isinstance(one, BaseException)]

    def waiting(self, sources: list[Source]) -> Iterator[str]:
        """The questions of the sources that wait for replies, as JSON."""
        with SeenTable() as seen:
            for source in (one for one in sources if one.needs_teacher):
                for question in usable_questions(source, self._options, seen, Counter()):
                    if self.label([question]):
                        yield json.dumps(asdict(question))


def subq_work(options: BuildOptions, llm: LLMOptions) -> Callable[[list[str]], list[str]]:
    """What labels the questions of `Labeller.waiting`, and gives back the calls that this took, for `store_calls`."""
    client, read = NotedCalls(open_client(llm)), TypeAdapter(Question).validate_json
    labeller = Labeller(options, client, llm.sampling(1))

    def work(rows: list[str]) -> list[str]:
        client.notes = []
        labeller.label(map(read, rows))
        return client.notes

    return work
