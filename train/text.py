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
from typing import TYPE_CHECKING, Any, TypeVar

from tripletune.core.files import read_prompt
from tripletune.core.options import nearest, rare, setting
from tripletune.models.loading import is_encoder_decoder, load_language_model, load_tokenizer, use_embedded_padding
from tripletune.models.lora import add_lora, take_over
from tripletune.train.settings import DataSection, TrainSection
from tripletune.train.sources import Examples
from tripletune.train.tasks import TrainingTask, shared_by_processes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.models.local.requests import Request
    from tripletune.train.evaluation import Batch
    from tripletune.train.rows.cache import Row

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
    """A task whose model reads and writes text; a subclass implements `tokenised`.

    Attributes:
        weighs_labels: Whether the loaded model computes our loss (`models.losses.learn_labels_only`), which takes
            weights of label tokens.
    """

    processor: PreTrainedTokenizerBase
    next_command: str = "tripletune checkpoints export {run} --output FOLDER"
    weighs_labels: bool = False

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the model with its adapter, and the tokenizer with the chat template of the settings.

        The forward is replaced before PEFT wraps the model, because PEFT calls it through the wrapped object.
        """
        from transformers import set_seed

        from tripletune.models.attention import keeps_apart, set_attention
        from tripletune.models.losses import learn_labels_only

        # LoRA's first matrices are drawn at random.
        set_seed(self.config.seed)
        section = self.config.model
        # Tasks whose rows are prompts have no packing.
        packing = getattr(self.config.train, "packing", False)
        seq2seq = is_encoder_decoder(section.base)
        if seq2seq and packing:
            raise ValueError(f"train.packing: {section.base} is an encoder-decoder, which reads one source per row")
        model = load_language_model(section.base, **section.load_arguments())
        # Before `set_attention`, because flash attention does not run on the CPU.
        if packing and not keeps_apart(model):
            raise ValueError(f"train.packing: {section.base} mixes the samples of a pack: set train.packing false")
        if section.attention != "auto":
            set_attention(model, section.attention)
        if not seq2seq:
            self.weighs_labels = learn_labels_only(model)
        if section.tune == "lora":
            model = add_lora(model, base=section.base, **section.lora_arguments())
            if section.adapter is not None:
                take_over(model, section.adapter, section.base)
        tokenizer = load_tokenizer(section.adapter or section.base)
        use_embedded_padding(tokenizer, model)
        self._set_template(tokenizer)
        return model, tokenizer

    def _set_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give a tokenizer the chat template of the settings, in place.

        It is saved with the model, so every program that runs the model writes the prompts of its training: with the
        same template, the same values of its variables, and the same day in a template that writes one.
        """
        from tripletune.models.local.chat import dated_template

        data = self.config.data
        # Questions of a loop have no section of texts: their student keeps its own template.
        if isinstance(data, TextSection) and data.chat_template:
            tokenizer.chat_template = read_prompt(data.chat_template)
        if isinstance(data, TextSection) and data.template_options:
            base = self.config.model.base
            tokenizer.chat_template = with_options(tokenizer.chat_template, data.template_options, base)
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = dated_template(tokenizer.chat_template)

    @property
    def seq2seq(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return bool(self.model.config.is_encoder_decoder)

    def tokenised(self, source: Examples, cache: Path) -> Dataset:
        """Return the rows of a source, one per sample; see `train.rows.cache.cached_rows`."""
        raise NotImplementedError

    def rows(self, source: Any, cache: Path) -> Dataset:
        """The rows of `tokenised`, in packs on request."""
        from tripletune.train.rows.cache import pack_rows

        rows = self.tokenised(source, cache)
        if self.config.train.packing:
            return pack_rows(rows, self.config.train.pack_tokens)
        return rows

    def collator(self) -> Callable[[list[Row]], Batch]:
        """Pad rows; flash attention instead takes the samples end to end, which then needs no mask.

        Returns:
            A function from rows to a batch; an encoder-decoder gets sources and targets padded apart.
        """
        from transformers import DataCollatorForSeq2Seq

        from tripletune.train.rows.batches import TextCollator

        if not self.seq2seq:
            return TextCollator(self.processor.pad_token_id, flatten="flash" in self.config.model.attention)
        pad = DataCollatorForSeq2Seq(self.processor, self.model, pad_to_multiple_of=8)

        def collate(rows: list[Row]) -> Batch:
            """Pad sources and targets apart; other columns, such as lengths, are not for the model."""
            return dict(pad([{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]))

        return collate

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
        if "seq_lengths" in self.train.column_names:
            length = self.train[0]["seq_lengths"][0]
            return ids[:length], labels[:length]
        return ids, labels


def with_options(template: object, options: Mapping[str, Any], model: str) -> str:
    """Return a chat template that sets these variables itself, so that training and use have the same values.

    A server would otherwise render prompts with the template's own defaults.

    Args:
        template: A tokenizer's template, which may be none, or several by name.
    """
    if not isinstance(template, str):
        raise ValueError(f"data.template_options: {model} has no chat template, so leave the options out")
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    assignments = ""
    for name, value in options.items():
        if name not in words:
            raise ValueError(f"data.template_options: the template has no {name}{nearest(name, sorted(words))}")
        # Jinja writes values as JSON does, except `none`.
        jinja_value = json.dumps(value).replace("null", "none")
        assignments += f"{{%- set {name} = {jinja_value} %}}"
    return assignments + template


def generate_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    train: TextTrainSection,
    criterion: Callable[[Request], bool] | None = None,
) -> list[str]:
    """Return greedy replies to prompts, without special tokens; each process generates a part and returns all.

    Greedy, so that two evaluations differ by the weights alone; in evaluation mode, since dropout would change replies.

    Args:
        prompts: Tokens of each prompt.
        train: Gives the number of rows in a batch, and the maximum tokens of a reply.
        criterion: Tells from a request's tokens whether its reply ends before an end token; None for never.
    """
    from tripletune.models.local import decode
    from tripletune.models.local.chat import eos_token_ids
    from tripletune.models.local.continuous_batch import make_decoder
    from tripletune.models.local.requests import Request
    from tripletune.models.losses import evaluating

    eos_ids = eos_token_ids(tokenizer, model.generation_config)

    def reply(own_prompts: Sequence[list[int]]) -> list[str]:
        """Generate the replies to the prompts of this process, in their order."""
        decoder = make_decoder(model, eos_ids, tokenizer.pad_token_id, rows=train.eval_batch_size)
        requests = [Request(list(prompt), train.eval_max_new_tokens, criterion=criterion) for prompt in own_prompts]
        decode(decoder, requests)
        return [tokenizer.decode(request.tokens, skip_special_tokens=True) for request in requests]

    with evaluating(model):
        return shared_by_processes(model, prompts, reply)


def choose_examples(examples: Iterable[Example], count: int, text: Callable[[Example], str]) -> list[Example]:
    """Return the examples whose texts have the smallest hashes, whatever the order of the data.

    So runs on shuffled or sharded copies of the data are scored on the same examples.
    """

    def digest(example: Example) -> bytes:
        """Bytes that follow from the text alone; an unpaired surrogate, which has none in UTF-8, counts as "?"."""
        return hashlib.sha256(text(example).encode(errors="replace")).digest()

    return heapq.nsmallest(count, examples, key=digest)
