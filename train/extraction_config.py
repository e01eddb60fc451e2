"""Configuration of the text-to-triples recipe (RAS, section D.1).

Defaults are the paper's: source 512 and target 256 tokens, AdamW with linear warm-up and decay, weight decay 0.01, an
evaluation every 5,000 steps. Nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tripletune.train.config import setting
from tripletune.train.text_config import TextRunConfig, TextTrainSection, above_zero, missing_files


@dataclass
class ExtractionDataSection:
    """Pairs of text and triples, and how they become tokens."""

    train: str = setting("data/t2t", "folder or file of training pairs (tripletune build pairs)")
    validation: str | None = setting(None, "folder or file of validation pairs; the train folder unless set")
    train_split: str = setting("train", "shards to train on, where a folder is given")
    validation_split: str = setting("validation", "shards to evaluate on, where a folder is given")
    prompt: str | None = setting(None, "file that replaces the instruction of decoders; saved with the model")
    max_source_tokens: int = setting(512, "longest source; a longer one is cut on the right, at a word")
    max_target_tokens: int = setting(256, "longest target, its end included; a longer one loses its last triples")
    max_train_records: int | None = setting(None, "train on the first so many pairs")
    max_validation_records: int | None = setting(None, "evaluate on the first so many pairs")

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems = []
        if self.max_source_tokens < 16 or self.max_target_tokens < 16:
            problems.append(
                f"data.max_source_tokens {self.max_source_tokens} and data.max_target_tokens {self.max_target_tokens} "
                "must be at least 16"
            )
        counts = {
            "data.max_train_records": self.max_train_records,
            "data.max_validation_records": self.max_validation_records,
        }
        problems += above_zero({name: value for name, value in counts.items() if value is not None})
        return problems + missing_files({"data.prompt": self.prompt})


@dataclass
class ExtractionTrainSection(TextTrainSection):
    """Optimisation."""

    eval_steps: int | None = setting(5000, "optimiser steps between evaluations; at the end only with null")
    eval_max_new_tokens: int = setting(512, "longest reply while evaluating, as in rag extract")
    eval_embedder: str | None = setting(None, "sentence encoder for the soft triple scores, which are left out without")


@dataclass
class ExtractionConfig(TextRunConfig):
    """A whole run."""

    output_dir: str = setting("runs/extractor", "folder of checkpoints, logs and the result")
    data: ExtractionDataSection = field(default_factory=ExtractionDataSection)
    train: ExtractionTrainSection = field(default_factory=ExtractionTrainSection)

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        return super().check() + self.data.check()
