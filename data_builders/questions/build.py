"""Build questions over a custom corpus, split by document: drafts, a teacher's wording, files and card.

`train.jsonl` and `test.jsonl` are in the plain format, with steps. Calls are kept in a ledger, so a build can be killed
and run again.

Tested in `tests/data_builders/questions/test_build.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict, replace
from itertools import islice
from typing import NamedTuple

from tripletune.core.calls import CallError, LLMClient, RepliesPending, Sampling, SetupError, UnusableReply
from tripletune.core.concurrency import in_order
from tripletune.core.data.passages import corpus_file
from tripletune.core.files import json_line, write_text
from tripletune.core.program import progress
from tripletune.core.rows import Row
from tripletune.data_builders.datasets.writer import DROPPED, BuildFacts, DatasetWriter, FolderOptions, new_dataset
from tripletune.data_builders.questions.facts import Draft
from tripletune.data_builders.questions.material import Material
from tripletune.data_builders.questions.names import name_key
from tripletune.data_builders.questions.options import QuestionBuildOptions
from tripletune.data_builders.questions.rows import QUESTIONS, QuestionRow
from tripletune.data_builders.questions.teacher import (
    MAX_TOKENS,
    Rejection,
    Wording,
    load_question_prompts,
    make_question,
)
from tripletune.llm.ledger_client import LedgerClient, RetriesExhausted

logger = logging.getLogger(__name__)

# Maximum drafts in progress; the client limits the concurrent calls.
_DRAFTS_AT_ONCE = 256


class SplitDraft(NamedTuple):
    """A draft of a split."""

    split: str
    draft: Draft


class RejectedDraft(NamedTuple):
    """A draft that gave no question.

    Attributes:
        reason: Why, as the card counts it.
        detail: The message to the teacher, or of the error.
        reply: The teacher's reply, if it was the wording that was rejected.
    """

    split: str
    draft: Draft
    reason: Rejection
    detail: str
    reply: str = ""

    def to_json(self) -> Row:
        """The row of `DROPPED`, with what a user needs to see why a draft gave no question."""
        return {
            "split": self.split,
            "question_id": self.draft.id,
            "kind": self.draft.kind,
            "facts": [fact.triple.as_list() for fact in self.draft.facts],
            "answer": self.draft.answer,
            "reason": str(self.reason),
            "detail": self.detail,
            "reply": self.reply,
        }


class QuestionBuild:
    """Makes the questions of both splits from drafts, and keeps the reasons of rejections.

    Args:
        material: Facts and passages, and the drafts made of them.
        client: The client of the teacher.
        sampling: How the teacher's replies are drawn.

    Attributes:
        kept: The finished questions of each split.
        rejected: The drafts that gave none.
    """

    def __init__(self, material: Material, client: LLMClient, sampling: Sampling) -> None:
        self._material = material
        self._options = material.options
        self._client = client
        self._prompts = load_question_prompts(self._options.prompts)
        self._sampling: dict[str, Sampling] = {}
        for role, max_tokens in MAX_TOKENS.items():
            self._sampling[role] = replace(sampling, max_tokens=max_tokens)
        self.kept: dict[str, list[QuestionRow]] = {}
        # The drafts of each split that were not tried yet.
        self._remaining: dict[str, Iterator[Draft]] = {}
        for split in self._options.wanted():
            self.kept[split] = []
            self._remaining[split] = material.drafts(split)
        self.rejected: list[RejectedDraft] = []
        # The keys of the questions so far.
        self._asked: set[str] = set()

    async def run(self) -> None:
        """Make the questions of both splits; the next draft replaces a rejected draft.

        A batch asks for as many drafts as questions are missing, so few calls are paid for questions that nobody needs.
        """
        while True:
            batch = self._next_drafts()
            if not batch:
                return
            await self._run_batch(batch)
            made = []
            for split, number in self._options.wanted().items():
                made.append(f"{split} {len(self.kept[split]):,} of {number:,}")
            logger.info("%s questions; %s", ", ".join(made), self.rejections())

    def _next_drafts(self) -> list[SplitDraft]:
        """As many drafts of each split as questions are missing; fewer if the drafts run out."""
        batch: list[SplitDraft] = []
        for split, number in self._options.wanted().items():
            missing = number - len(self.kept[split])
            for draft in islice(self._remaining[split], missing):
                batch.append(SplitDraft(split, draft))
        return batch

    async def _run_batch(self, batch: list[SplitDraft]) -> None:
        """Keep or reject each draft of a batch, in order, so that two runs of a build are equal.

        Raises:
            RepliesPending: Some calls wait in a batch file; all drafts of the batch were asked before.
        """
        pending: RepliesPending | None = None
        waiting = 0
        bar = progress(batch, "drafts", unit="draft")
        async with aclosing(in_order(iter(bar), self._word_draft, _DRAFTS_AT_ONCE)) as results:
            async for split_draft, result in results:
                if isinstance(result, RepliesPending):
                    pending = result
                    waiting += 1
                elif isinstance(result, Wording):
                    self._keep_question(split_draft, result)
                else:
                    self._note_rejection(split_draft, result)
                # A first batch takes hours, and a user wants to see in its first minutes whether the teacher fits.
                bar.set_postfix_str(self.rejections(), refresh=False)
        # The whole batch has been asked, so that one batch file holds all its calls.
        if pending is not None:
            message = self._client.pending_message() or pending
            raise RepliesPending(f"{len(batch) - waiting:,} of {len(batch):,} drafts are done. {message}")

    async def _word_draft(self, split_draft: SplitDraft) -> Wording | UnusableReply | CallError | RepliesPending:
        """The checked wording of a draft, or why it has none; an error that fails every call ends the build."""
        draft = split_draft.draft
        passages = self._material.passages_of(draft)
        try:
            return await make_question(
                self._client, self._prompts, self._sampling, draft, passages, self._options.copied
            )
        except (RetriesExhausted, SetupError):
            raise
        except (UnusableReply, CallError, RepliesPending) as error:
            # A traceback would keep the passages of the call in memory.
            return error.with_traceback(None)

    def _keep_question(self, split_draft: SplitDraft, wording: Wording) -> None:
        """Add a question to `kept`, or its draft to `rejected` if another draft gave the same words."""
        split, draft = split_draft
        question_key = name_key(wording.question)
        if question_key in self._asked:
            self.rejected.append(RejectedDraft(split, draft, Rejection.REPEATED, wording.question))
            return
        self._asked.add(question_key)
        self.kept[split].append(self._material.row(split, draft, wording))

    def _note_rejection(self, split_draft: SplitDraft, error: UnusableReply | CallError) -> None:
        """Add a draft to `rejected` with the reason why it gave no question.

        A call that was refused, for example by a content filter, has no reply.
        """
        split, draft = split_draft
        if isinstance(error, CallError):
            rejected = RejectedDraft(split, draft, Rejection.CALL_REFUSED, str(error))
        else:
            rejected = RejectedDraft(split, draft, Rejection.of(error.reason), error.explanation, error.reply)
        self.rejected.append(rejected)

    def rejections(self) -> str:
        """How many drafts were rejected so far, for each reason; the most frequent reason comes first."""
        counts = Counter(str(rejected.reason) for rejected in self.rejected)
        reasons = ", ".join(f"{number:,} x {reason}" for reason, number in counts.most_common())
        total = f"rejected drafts: {len(self.rejected):,}"
        return f"{total} ({reasons})" if reasons else total

    def write(self, dataset: DatasetWriter[QuestionRow]) -> None:
        """Write questions, rejected drafts, statistics and card; called once, when all drafts were tried."""
        for split, rows in self.kept.items():
            for row in rows:
                dataset.write(row, split)
        write_text(dataset.folder / DROPPED, "".join(json_line(draft.to_json()) for draft in self.rejected))
        dataset.finish(self._card_facts())

    def _card_facts(self) -> BuildFacts:
        """What the card says beside the numbers of the questions: options, prompts, models, rejections and warnings."""
        options = asdict(self._options)
        options["held out"] = ", ".join(sorted(self._material.held_out))
        prompts = {}
        for name, digest in self._prompts.digests().items():
            prompts[self._prompts.files[name]] = digest
        return BuildFacts(
            title="Questions over a corpus",
            summary="Questions over the facts of a corpus, with answers, supporting passages, sub-queries and triples. "
            "A teacher worded them; a program and the teacher checked them. Questions of `test` are about documents "
            f"of which `train` has no passage. `{DROPPED}` has the rejected drafts.",
            drops=self._rejections_by_split(),
            # Only counts above zero.
            issues=dict(+self._material.counts),
            options=options,
            prompts=prompts,
            models={"teacher": self._client.model},
            notes=self._card_notes(),
        )

    def _rejections_by_split(self) -> dict[str, dict[str, int]]:
        """Number of rejected drafts by split and reason, in the order of `Rejection`."""
        counts = Counter((rejected.split, rejected.reason) for rejected in self.rejected)
        by_split: dict[str, dict[str, int]] = {}
        for split in self.kept:
            by_split[split] = {}
            for reason in Rejection:
                if counts[split, reason]:
                    by_split[split][str(reason)] = counts[split, reason]
        return by_split

    def _card_notes(self) -> list[str]:
        """The card's notes: the number of documents of each split, and which split lacks questions.

        The latter are also logged, since a user who waits for the build may not read the card.
        """
        notes = []
        for split, number in self._material.documents.items():
            if number:
                notes.append(f"The part {split} is about {number:,} documents.")
        for split, number in self._options.wanted().items():
            made = len(self.kept[split])
            if made < number:
                rejected = sum(draft.split == split for draft in self.rejected)
                if made + rejected < self._material.most_drafts(split):
                    advice = "its triples give no further draft: add documents"
                else:
                    advice = "see why drafts were rejected, raise --tries, or add documents"
                note = (
                    f"The part {split} has {made:,} of the {number:,} requested questions, after "
                    f"{made + rejected:,} drafts: {advice}."
                )
                notes.append(note)
                logger.warning("%s", note)
        return notes

    @property
    def made(self) -> dict[str, int]:
        """Number of finished questions per split, also of splits without any."""
        return {split: len(rows) for split, rows in self.kept.items()}

    def check_unusable(self, output: str) -> None:
        """Raise `CallError` if more than a tenth of the drafts failed for unusable replies: the teacher is too weak.

        Drafts that a check rejected do not count, since rejections are part of the method.
        """
        unusable = 0
        for rejected in self.rejected:
            if rejected.reason in (Rejection.UNREADABLE, Rejection.CALL_REFUSED):
                unusable += 1
        if 10 * unusable > unusable + sum(self.made.values()):
            raise CallError(
                f"{output} is written, but {unusable:,} drafts failed for unusable replies: see its {DROPPED}"
            )


def build_questions(
    options: QuestionBuildOptions,
    output: str,
    overwrite: bool,
    open_client: Callable[[], LedgerClient],
    sampling: Sampling,
) -> dict[str, int]:
    """Build the folder and return the number of questions per split.

    The folder is written before an unusable teacher is reported, since its questions are checked and may be used.

    Args:
        open_client: Opens the teacher's client, after the passages and triples were read.
        sampling: The teacher's sampling; the length of replies is `MAX_TOKENS`.
    """
    folder = FolderOptions(output, overwrite=overwrite)
    with new_dataset(folder, QUESTIONS, [corpus_file(options.corpus), options.triples]) as dataset:
        build = asyncio.run(_make_questions(options, open_client, sampling))
        if not any(build.kept.values()):
            raise ValueError(f"no question could be made ({_why_none(build)})")
        build.write(dataset)
    build.check_unusable(output)
    return build.made


async def _make_questions(
    options: QuestionBuildOptions, open_client: Callable[[], LedgerClient], sampling: Sampling
) -> QuestionBuild:
    """Make the questions; the client is opened last, and closed also after an error."""
    material = Material(options)
    async with open_client() as client:
        build = QuestionBuild(material, client, sampling)
        await build.run()
    return build


def _why_none(build: QuestionBuild) -> str:
    """Why a build made no question: the reasons of the rejected drafts, or that no draft was found."""
    if not build.rejected:
        return "the triples give no path of these kinds"
    return build.rejections()
