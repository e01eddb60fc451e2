"""Trajectories of one or several teachers become what a trainer reads: rows, prompts, and decisions to score.

No question is in both splits: one that has a validation trajectory, of whichever teacher, is not trained on.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tripletune.eval.suites.decisions import Case, decision_cases, means, score_reply
from tripletune.models.data.trajectories import Trajectory, read_trajectories
from tripletune.models.local.decoding import end_tokens
from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE
from tripletune.train.distill_config import DistillConfig, folder_and_share
from tripletune.train.text_evaluation import generate_replies
from tripletune.train.text_rows import cached_rows, files_digest, pack_rows, rows_meta
from tripletune.train.trajectory_rows import RowOptions, TrajectoryEncoder

_HASHES = 1 << 64


@dataclass(frozen=True, slots=True)
class TrajectorySource:
    """Trajectories of several places.

    Attributes:
        places: Folders or files, each with the share of its questions that is taken.
        split: Shards of folders.
        limit: Most trajectories of a place; None takes all.
        without: Ids of questions that are passed over.
    """

    places: tuple[tuple[str, float], ...]
    split: str
    limit: int | None = None
    without: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Trajectory]:
        for path, share in self.places:
            taken = (
                one
                for one in read_trajectories(path, self._split(path))
                if one.question_id not in self.without and _is_in_share(one.question_id, share)
            )
            yield from islice(taken, self.limit)

    def digest(self) -> str:
        """Fingerprint of the content and the selection."""
        files = [files_digest(path, self._split(path), share) for path, share in self.places]
        selection = (self.limit, sorted(self.without))
        return hashlib.sha256(repr((files, selection)).encode()).hexdigest()

    def _split(self, path: str) -> str | None:
        return self.split if Path(path).is_dir() else None


@dataclass
class TrajectoryData:
    """What the trainer reads.

    Attributes:
        train: Rows, packs of them, or prompts for on-policy distillation.
        validation: Likewise, or None.
        scorer: Scores generated decisions; None when switched off or without validation trajectories.
        digests: Paths and content digest of each split.
        counts: What tokenising counted, of each split.
    """

    train: Any
    validation: Any
    scorer: DecisionScorer | None
    digests: dict[str, dict[str, Any] | None]
    counts: dict[str, dict[str, int]]


class DecisionScorer:
    """Scores a model's decisions with the teacher's history; see `train.text_evaluation.Scorer`.

    Args:
        cases: The decisions; at least one.
        encoder: Makes the prompts.
        tokenizer: The model's.
        batch_size: Prompts in a batch.
        max_new_tokens: Longest reply.
    """

    def __init__(
        self, cases: Sequence[Case], encoder: TrajectoryEncoder, tokenizer: Any, batch_size: int, max_new_tokens: int
    ) -> None:
        self.cases, self.tokenizer = list(cases), tokenizer
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.prompts = [encoder.prompt(case.messages) for case in self.cases]

    def __call__(self, model: Any, process_index: int = 0, num_processes: int = 1) -> dict[str, float]:
        """Means of `eval.decisions.SCORES`, by name."""
        replies = generate_replies(
            model, self.tokenizer, self.prompts, self.batch_size, self.max_new_tokens, process_index, num_processes
        )
        return means(score_reply(case, reply) for case, reply in zip(self.cases, replies))


def trajectory_sources(config: DistillConfig) -> tuple[TrajectorySource, TrajectorySource | None]:
    """Training and validation trajectories; validation is optional where no such shards exist.

    Raises:
        FileNotFoundError: validation trajectories are named and not there.
        ValueError: a validation trajectory can't be read.
    """
    data = config.data
    train = [folder_and_share(place) for place in data.train]
    named = [folder_and_share(place) for place in data.validation]
    places = named or [(path, share) for path, share in train if _has_split(path, data.validation_split)]
    if not places:
        return TrajectorySource(tuple(train), data.train_split, data.max_train_records), None
    validation = TrajectorySource(tuple(places), data.validation_split, data.max_validation_records)
    # All of them, not only those that are evaluated on.
    held_out = frozenset(one.question_id for one in TrajectorySource(tuple(places), data.validation_split))
    return TrajectorySource(tuple(train), data.train_split, data.max_train_records, held_out), validation


def check_trajectories(config: DistillConfig) -> str:
    """Fail now, not after the model is loaded: there must be trajectories, and the first ones must be readable.

    Returns:
        Fingerprint of the training trajectories.

    Raises:
        FileNotFoundError: a file or folder is not there.
        ValueError: there are no trajectories, or a row is none.
    """
    train, validation = trajectory_sources(config)
    for source in (train, validation):
        if source is not None and next(iter(source), None) is None:
            paths = ", ".join(path for path, _ in source.places)
            but = " but those of validation questions" if source.without else ""
            raise ValueError(f"{paths} (split {source.split!r}) holds no trajectories{but}")
    return train.digest()


def shared_prompt(config: DistillConfig) -> str | None:
    """The system prompt of all training trajectories, which the student learns to follow; None where they differ."""
    train, _ = trajectory_sources(config)
    found: str | None = None
    for number, one in enumerate(train):
        prompt = "\n\n".join(turn["content"] for turn in one.messages if turn["role"] == "system")
        if number and prompt != found:
            return None
        found = prompt
    return found or None


def trajectory_encoder(config: DistillConfig, model: Any, tokenizer: Any) -> TrajectoryEncoder:
    """Makes the student's rows and prompts; a chat template of one's own is put into the tokenizer.

    Raises:
        ValueError: the student has no chat template.
    """
    data = config.data
    if data.chat_template is not None:
        tokenizer.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
    options = RowOptions(data.rounds, data.learn, data.max_tokens, data.prompt_limit)  # type: ignore[arg-type]
    return TrajectoryEncoder(tokenizer, end_tokens(model, tokenizer), options, config.model.base)


def load_trajectories(config: DistillConfig, model: Any, tokenizer: Any) -> TrajectoryData:
    """Tokenise the trajectories, or open what an earlier run left in the cache.

    Raises:
        ValueError: a row is no trajectory, nothing has room in the limits, or the chat template does not serve.
    """
    encoder = trajectory_encoder(config, model, tokenizer)
    cache = Path(config.output_dir) / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    digests: dict[str, dict[str, Any] | None] = {"train": None, "validation": None}
    counts, rows = {}, {}
    train, validation = trajectory_sources(config)
    for name, source in (("train", train), ("validation", validation)):
        if source is None:
            continue
        digest = source.digest()
        digests[name] = {"path": [path for path, _ in source.places], "sha256": digest}
        dataset = tokenize_trajectories(source, digest, encoder, cache, config.train.method == "on_policy")
        counts[name] = rows_meta(dataset)
        rows[name] = pack_rows(dataset, config.train.pack_tokens) if config.train.packing else dataset
    scorer = None
    if validation is not None and config.train.eval_generate_records:
        cases = choose_cases(validation, config.train.eval_generate_records)
        if cases:
            scorer = DecisionScorer(
                cases, encoder, tokenizer, config.train.eval_batch_size, config.train.eval_max_new_tokens
            )
    return TrajectoryData(rows["train"], rows.get("validation"), scorer, digests, counts)


def tokenize_trajectories(
    source: TrajectorySource, digest: str, encoder: TrajectoryEncoder, cache: Path, prompts: bool = False
) -> Any:
    """Rows of trajectories, streamed to a file once; see `train.text_rows.cached_rows`.

    Args:
        source: The trajectories.
        digest: Its fingerprint.
        encoder: Makes the rows.
        cache: Folder of such files.
        prompts: Make the prompts of all learned rounds in the place of the rows.
    """
    key = ["trajectories", digest, asdict(encoder.options), encoder.sample(), prompts]
    make = encoder.prompts if prompts else encoder.rows
    return cached_rows(key, cache, lambda counts: make(source, counts))


def choose_cases(trajectories: Iterable[Trajectory], count: int) -> list[Case]:
    """Decisions to score while training: those with the smallest hashes, so the same ones in any order of the data.

    Args:
        trajectories: Validation trajectories, streamed; those of other roles than the integrator's have none.
        count: How many.
    """
    cases = decision_cases(one for one in trajectories if one.role == INTEGRATE_ROLE)
    keyed = ((hashlib.sha256(case.id.encode()).digest(), case) for case in cases)
    return [case for _, case in heapq.nsmallest(count, keyed, key=lambda item: item[0])]


def teachers(counts: Counter[str] | dict[str, int]) -> dict[str, int]:
    """Trajectories of each teacher, out of what `TrajectoryEncoder.rows` counted."""
    return {name.removeprefix("of "): number for name, number in sorted(counts.items()) if name.startswith("of ")}


def _has_split(path: str, split: str) -> bool:
    return Path(path).is_dir() and any(next(Path(path).glob(f"{split}*.{end}"), None) for end in ("jsonl", "parquet"))


def _is_in_share(question_id: str, share: float) -> bool:
    # By question, so that all trajectories of one are taken or none, whatever the order of the file.
    drawn = int.from_bytes(hashlib.blake2b(question_id.encode(), digest_size=8).digest())
    return drawn < share * _HASHES
