"""The stages of the text-to-triples recipe that are its own: pairs become rows, and a model knows its prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tripletune.models.data.pairs import ExtractionPair, load_instruction, read_pairs
from tripletune.train.extraction_config import ExtractionConfig
from tripletune.train.extraction_evaluation import ExtractionScorer, choose_pairs
from tripletune.train.extraction_rows import PairEncoder, RowLimits
from tripletune.train.text_rows import cached_rows, files_digest, pack_rows, rows_meta

# In every checkpoint: the instruction of a decoder, and what the model was made for.
PROMPT_FILE, TASK_FILE = "prompt.md", "extractor.json"


@dataclass(frozen=True, slots=True)
class PairSource:
    """Pairs of a file or of one split of a folder, the first `limit` of them."""

    path: str
    split: str | None = None
    limit: int | None = None

    def __iter__(self) -> Iterator[ExtractionPair]:
        return islice(read_pairs(self.path, self.split), self.limit)

    def digest(self) -> str:
        """Fingerprint of the content and the selection."""
        return files_digest(self.path, self.split, self.limit)


@dataclass
class PairData:
    """What the trainer reads.

    Attributes:
        train: Rows or packs.
        validation: Likewise, or None.
        scorer: Scores generated triples; None when switched off or without validation pairs.
        digests: Path and content digest of each split.
        counts: What tokenising counted, of each split.
    """

    train: Any
    validation: Any
    scorer: ExtractionScorer | None
    digests: dict[str, dict[str, str] | None]
    counts: dict[str, dict[str, int]]


def pair_sources(config: ExtractionConfig) -> tuple[PairSource, PairSource | None]:
    """Training and validation pairs; validation is optional where no such shards exist."""
    data = config.data
    is_folder = Path(data.train).is_dir()
    train = PairSource(data.train, data.train_split if is_folder else None, data.max_train_records)
    place = data.validation or (data.train if is_folder else None)
    if place is None:
        return train, None
    split = data.validation_split if Path(place).is_dir() else None
    validation = PairSource(place, split, data.max_validation_records)
    if data.validation is None:
        try:
            next(iter(validation), None)
        except FileNotFoundError:
            return train, None
    return train, validation


def check_pairs(config: ExtractionConfig) -> str:
    """Fail now, not after the model is loaded: there must be pairs, and the first ones must be readable.

    Returns:
        Fingerprint of the training pairs.
    """
    train, validation = pair_sources(config)
    for source in (train, validation):
        if source is not None and next(iter(source), None) is None:
            raise ValueError(f"{source.path} (split {source.split!r}) holds no text-to-triples pairs")
    return train.digest()


def pair_encoder(config: ExtractionConfig, model: Any, tokenizer: Any) -> PairEncoder:
    """Makes the model's rows and prompts."""
    seq2seq = bool(model.config.is_encoder_decoder)
    return PairEncoder(
        tokenizer,
        None if seq2seq else load_instruction(config.data.prompt),
        RowLimits(config.data.max_source_tokens, config.data.max_target_tokens),
        model.generation_config,
        config.model.base,
    )


def load_pairs(config: ExtractionConfig, model: Any, tokenizer: Any) -> PairData:
    """Tokenise the pairs, or open what an earlier run left in the cache.

    Raises:
        ValueError: a row is not a pair, no pair has room in the limits, or packing is asked of an encoder-decoder.
    """
    seq2seq = bool(model.config.is_encoder_decoder)
    if seq2seq and config.train.packing:
        raise ValueError(f"train.packing: {config.model.base} is an encoder-decoder, which reads one source a row")
    encoder = pair_encoder(config, model, tokenizer)
    train, validation = pair_sources(config)
    digests: dict[str, dict[str, str] | None] = {"train": None, "validation": None}
    counts, rows = {}, {}
    for name, source in (("train", train), ("validation", validation)):
        if source is None:
            continue
        digest = source.digest()
        digests[name] = {"path": source.path, "sha256": digest}
        dataset = tokenize_pairs(source, digest, encoder, Path(config.output_dir) / "cache")
        counts[name] = rows_meta(dataset)
        rows[name] = pack_rows(dataset, config.train.pack_tokens) if config.train.packing else dataset
    scorer = None
    if validation is not None and config.train.eval_generate_records:
        chosen = choose_pairs(validation, config.train.eval_generate_records)
        scorer = ExtractionScorer(
            chosen,
            encoder,
            config.train.eval_batch_size,
            config.train.eval_max_new_tokens,
            config.train.eval_embedder,
        )
    return PairData(rows["train"], rows.get("validation"), scorer, digests, counts)


def tokenize_pairs(source: PairSource, digest: str, encoder: PairEncoder, cache: Path) -> Any:
    """Rows of pairs, streamed to a file once; see `train.text_rows.cached_rows`."""
    limits = encoder.limits
    key = ["pairs", digest, encoder.sample(), len(encoder.tokenizer), limits.source, limits.target]
    cache.mkdir(parents=True, exist_ok=True)
    return cached_rows(key, cache, lambda counts: encoder.rows(source, counts))


def model_files(config: ExtractionConfig, model: Any) -> dict[str, str]:
    """Files that lie beside the weights: the instruction (decoders), and what the model was made for."""
    about = {
        "task": "text_to_triples",
        "base_model": config.model.base,
        "base_revision": config.model.revision,
        "encoder_decoder": bool(model.config.is_encoder_decoder),
        "max_source_tokens": config.data.max_source_tokens,
        "max_target_tokens": config.data.max_target_tokens,
    }
    files = {TASK_FILE: json.dumps(about, indent=2) + "\n"}
    if not model.config.is_encoder_decoder:
        files[PROMPT_FILE] = load_instruction(config.data.prompt) + "\n"
    return files
