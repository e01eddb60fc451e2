"""What a HotpotQA-SUBQ build writes: shards by split, the questions that were left out, and the facts of its card.

A question that a teacher LLM could not label is a line of `dropped.ndjson`: the stage and the reason, what was wrong,
and the beginning of the reply that stayed unusable after its repair turn, so that a reader can judge whether the
teacher or the checks are at fault. The whole reply is in the ledger.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tripletune.data_builders.datasets.card import DROPPED, BuildFacts
from tripletune.data_builders.datasets.writer import DatasetWriter
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, OpenSource
from tripletune.data_builders.hotpotqa_subq.questions import Question, UnlabelledQuestion
from tripletune.data_builders.hotpotqa_subq.teacher import TRIPLES_ROLE, LLMTeacher, prompt_digests
from tripletune.data_builders.text_to_triples.mixing import PARTS, shortages
from tripletune.models.data.records import Record, whole_characters
from tripletune.models.files import file_digest
from tripletune.models.llm.client import LLMClient, Sampling
from tripletune.models.llm.replies import repair_digest
from tripletune.rag.systems import PromptSet

logger = logging.getLogger(__name__)
LONGEST_REPLY = 200
EXAMPLES = 3


class SubqOutput:
    """Writes questions in the order of the input; a context manager.

    Args:
        dataset: Where the records go.
        options: Says the split of a question.

    Attributes:
        examples: By reason, some of the questions that were left out, picked by a hash of their ids.
    """

    def __init__(self, dataset: DatasetWriter[Record], options: BuildOptions) -> None:
        self.examples: dict[str, list[dict[str, Any]]] = {}
        self._dataset, self._options = dataset, options
        self._dropped: IO[str] | None = None

    def __enter__(self) -> SubqOutput:
        return self

    def __exit__(self, *_: object) -> None:
        if self._dropped is not None:
            self._dropped.close()

    def write(self, question: Question, records: list[Record]) -> None:
        """Write the records of one question."""
        split = self._options.split_of(question.question)
        for record in records:
            self._dataset.write(record, split)

    def drop(self, source: str, position: int, question: Question, error: UnlabelledQuestion) -> None:
        """Write down that a teacher could not label a question.

        Args:
            source: The name of its source.
            position: Its place there, from 0.
            question: The question.
            error: Why.
        """
        line = {
            "source": source,
            "row": position,
            "question_id": question.id,
            "question": question.question,
            "stage": error.stage,
            "reason": error.reason.value,
            "detail": whole_characters(error.detail),
            "reply": whole_characters(error.reply[:LONGEST_REPLY]),
        }
        if self._dropped is None:
            self._dropped = (self._dataset.folder / DROPPED).open("w", encoding="utf-8")
        self._dropped.write(json.dumps(line, ensure_ascii=False) + "\n")
        kept = [*self.examples.get(error.reason.value, []), line]
        self.examples[error.reason.value] = heapq.nsmallest(EXAMPLES, kept, key=_digest)


def _digest(line: dict[str, Any]) -> bytes:
    return hashlib.blake2b(f"{line['source']}\n{line['question_id']}".encode(), digest_size=8).digest()


def build_facts(
    opened: list[OpenSource],
    options: BuildOptions,
    inputs: list[str],
    client: LLMClient | None,
    prompts: PromptSet,
    sampling: Sampling,
    examples: dict[str, list[dict[str, Any]]],
) -> BuildFacts:
    """The facts of a build whose records are written.

    Args:
        opened: The sources with what was counted.
        options: Options of the build.
        inputs: The files that were read.
        client: The teacher LLM.
        prompts: Its prompts.
        sampling: How its replies were drawn.
        examples: Questions that were left out, by reason.
    """
    parts = [one for one in opened if one.source.reader in PARTS]
    notes = shortages(
        {one.source.name: (one.source.reader, one.count or 0, one.labelled, one.drops.total()) for one in parts}
    )
    for note in notes:
        logger.warning("%s", note)
    if options.direct_answer_model is None and options.direct_answers is None:
        notes.append(
            "The direct-answer test was not run (no `--direct-answer-model`): only questions that their annotation "
            "marks as direct are labelled [NO_RETRIEVAL]."
        )
    models = {}
    if client is not None:
        models["teacher"] = f"{client.model}{_drawn(client, sampling)}"
    if options.direct_answer_model is not None:
        models["direct answers"] = options.direct_answer_model
    llm = {one.source.name: one.teacher for one in opened if isinstance(one.teacher, LLMTeacher)}
    return BuildFacts(
        title="HotpotQA-SUBQ records",
        summary="Planning and answering records for triple-based iterative retrieval, labelled as in RAS, appendix C.",
        teachers={one.source.name: one.teacher.name for one in opened},
        drops={one.source.name: one.ordered_drops() for one in opened if one.drops},
        questions={one.source.name: one.labelled for one in opened},
        repairs=_by_source(llm, "repairs"),
        refused=_by_source(llm, "refused"),
        recovered=_by_source(llm, "recovered"),
        examples=dict(sorted(examples.items())),
        issues={f"{one.source.name}: {what}": n for one in opened for what, n in one.issues.items() if n},
        files={path: file_digest(path) for path in inputs if Path(path).is_file()},
        options={"sources": [one.source.text for one in opened], **asdict(options)},
        prompts=prompt_digests(prompts) | repair_digest() if llm else {},
        models=models,
        calls=_calls(list(llm.values())),
        notes=notes,
    )


def _drawn(client: LLMClient, sampling: Sampling) -> str:
    if not getattr(getattr(client, "backend", None), "send_temperature", True):
        return " (temperature and top_p are the provider's own: none was sent)"
    return f" (temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, seed {sampling.seed})"


def _by_source(teachers: dict[str, LLMTeacher], name: str) -> dict[str, dict[str, int]]:
    """A counter of every teacher that counted something in it, in alphabetical order: the same in every build."""
    counters: dict[str, Counter[str]] = {source: getattr(teacher, name) for source, teacher in teachers.items()}
    return {source: dict(sorted(counter.items())) for source, counter in counters.items() if counter}


def _calls(teachers: list[LLMTeacher]) -> dict[str, dict[str, float]]:
    calls: Counter[str] = sum((teacher.calls for teacher in teachers), Counter())
    found: dict[str, dict[str, float]] = {stage: {"calls": count} for stage, count in sorted(calls.items())}
    if TRIPLES_ROLE in found:
        found[TRIPLES_ROLE]["malformed_triples"] = sum(teacher.malformed for teacher in teachers)
    return found
