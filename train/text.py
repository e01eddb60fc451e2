"""Common parts of tasks on plain text: decoders and encoder-decoders, packs, and replies to validation prompts."""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tripletune.core.files import read_prompt
from tripletune.core.options import nearest, rare, setting
from tripletune.models.loading import add_lora, is_encoder_decoder, load_tokenizer, load_weights, take_over
from tripletune.train.tasks import DataSection, Examples, TrainingTask, TrainSection, spread

Example = TypeVar("Example")


@dataclass
class TextSection(DataSection):
    """Data of a run on plain text."""

    chat_template: str | None = setting(None, "Jinja file that replaces the chat template; saved with the model")
    template_options: dict[str, Any] = rare(
        {}, "variables of the chat template, for example {enable_thinking: false}; saved in the template"
    )


@dataclass
class TextTrainSection(TrainSection):
    """Optimisation of a run on plain text."""

    packing: bool = setting(False, "pack several samples into a row, without attention between them (decoders only)")
    pack_tokens: int = setting(1024, "tokens per pack", at_least=32)


class TextTask(TrainingTask):
    """A task whose model reads and writes text; a subclass implements `tokenised`."""

    def load(self) -> tuple[Any, Any]:
        from transformers import set_seed

        from tripletune.models.attention import keeps_apart, set_attention
        from tripletune.models.losses import learn_labels_only

        set_seed(self.config.seed)
        section = self.config.model
        seq2seq = is_encoder_decoder(section.base, section.revision)
        if seq2seq and self.config.train.packing:
            raise ValueError(f"train.packing: {section.base} is an encoder-decoder, which reads one source per row")
        model = load_weights(section.base, **section.weights())
        # Before `set_attention`, because flash attention does not run on the CPU.
        if getattr(self.config.train, "packing", False) and not keeps_apart(model):
            raise ValueError(f"train.packing: {section.base} mixes the samples of a pack: set train.packing false")
        if section.attention != "auto":
            set_attention(model, section.attention)
        if not seq2seq:
            learn_labels_only(model)
        if section.tune == "lora":
            model = add_lora(model, base=section.base, revision=section.revision, **section.lora())
            if section.adapter is not None:
                take_over(model, section.adapter, (section.base, section.revision))
        tokenizer = load_tokenizer(section.adapter or section.base, section.revision)
        if template := getattr(self.config.data, "chat_template", None):
            tokenizer.chat_template = read_prompt(template)
        if options := getattr(self.config.data, "template_options", None):
            tokenizer.chat_template = with_options(tokenizer.chat_template, options, section.base)
        return model, tokenizer

    @property
    def seq2seq(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def tokenised(self, source: Examples, cache: Path) -> Any:
        """Return the rows of a source, one per sample; see `train.batches.cached_rows`."""
        raise NotImplementedError

    def rows(self, source: Examples, cache: Path) -> Any:
        from tripletune.train.batches import pack_rows

        rows = self.tokenised(source, cache)
        return pack_rows(rows, self.config.train.pack_tokens) if self.config.train.packing else rows

    def collator(self) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
        from transformers import DataCollatorForSeq2Seq

        from tripletune.train.batches import TextCollator

        if not self.seq2seq:
            return TextCollator(self.processor.pad_token_id, flatten="flash" in self.config.model.attention)
        pad = DataCollatorForSeq2Seq(self.processor, self.model, pad_to_multiple_of=8)
        return lambda rows: dict(pad([{name: row[name] for name in ("input_ids", "labels")} for row in rows]))

    @cached_property
    def files(self) -> dict[str, str]:
        """Texts of small files to save beside the weights, such as the prompt, by file name."""
        return {}

    def save(self, folder: Path) -> None:
        """Write `files`; the trainer has already saved the tokenizer."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")

    def example(self) -> tuple[list[int], list[int]]:
        """Tokens and labels of the first row, or of the first sample if the row is a pack."""
        ids, labels = super().example()
        first = self.train[0].get("seq_lengths", [len(ids)])[0]
        return (ids, labels) if self.seq2seq else (ids[:first], labels[:first])


def with_options(template: Any, options: Mapping[str, Any], model: str) -> str:
    """Return a chat template that sets these variables itself, so that training and use have the same values."""
    if not isinstance(template, str):
        raise ValueError(f"data.template_options: {model} has no chat template, so leave the options out")
    known = set(re.findall(r"[A-Za-z_]\w*", template))
    if other := next((name for name in options if name not in known), None):
        raise ValueError(f"data.template_options: the template has no {other}{nearest(other, sorted(known))}")
    values = ((name, json.dumps(value).replace("null", "none")) for name, value in options.items())
    return "".join(f"{{%- set {name} = {value} %}}" for name, value in values) + template


def generate_replies(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    train: TextTrainSection,
    criterion: Callable[[Any], bool] | None = None,
) -> list[str]:
    """Return greedy replies to prompts, without special tokens; each process generates a part and returns all."""
    from tripletune.models.local import Request, decode
    from tripletune.models.local.chat import eos_token_ids
    from tripletune.models.local.continuous_batch import make_decoder
    from tripletune.models.losses import evaluating

    def reply(mine: Sequence[list[int]]) -> list[str]:
        decoder = make_decoder(model, eos_ids, tokenizer.pad_token_id, rows=train.eval_batch_size)
        requests = [Request(list(prompt), train.eval_max_new_tokens, criterion=criterion) for prompt in mine]
        decode(decoder, requests)
        return [tokenizer.decode(request.tokens, skip_special_tokens=True) for request in requests]

    eos_ids = eos_token_ids(tokenizer, model.generation_config)
    with evaluating(model):
        return spread(model, prompts, reply)


def choose_examples(examples: Iterable[Example], count: int, text: Callable[[Example], str]) -> list[Example]:
    """Return the examples whose texts have the smallest hashes, whatever the order of the data."""
    return heapq.nsmallest(count, examples, key=lambda one: hashlib.sha256(text(one).encode(errors="replace")).digest())
