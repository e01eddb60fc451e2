"""Train a decoder or an encoder-decoder to write the triples of a text, the f_t2t of RAS (sections 3.2 and D.1).

Decoders read the chat of extraction (`core.data.pairs.extraction_chat`, `models.local.chat.ChatEncoder`), and learn
the reply and the token that ends the reply. The reply for a text without facts is `NONE`, because a server takes an
empty reply for a failure. Encoder-decoders read only the text, as in the paper, and learn an empty target for a text
without facts.

A source that is too long is cut on the right, between two words, so the title at its start stays. A target that is too
long loses whole triples from its end. A pair is left out if the target has no room for even one triple, because an
empty target would mean "no facts". All three cases are counted.

The default is LoRA with ten times the learning rate of the paper, which trains all weights
(`recipes/configs/llama32_3b_t2t_paper_text.yaml`). The other defaults are the paper's: source 512 and target 256
tokens, AdamW with linear warm-up and decay, weight decay 0.01, an evaluation every 5,000 steps.
"""

# Tested in tests/train/tasks/test_pair_task.py.

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tripletune.core.calls import Message
from tripletune.core.data.pairs import NO_FACTS, ExtractionPair, extraction_chat, load_instruction
from tripletune.core.data.records import IGNORED
from tripletune.core.data.triples import Triple, format_triples
from tripletune.core.files import json_line
from tripletune.core.options import other_default, setting
from tripletune.models.control_tokens import text_ids
from tripletune.models.fingerprints import content_fingerprint, tokenizer_fingerprint
from tripletune.models.run_folders import EXTRACTOR, PROMPT_FILE, TaskFacts
from tripletune.models.specs import pinned_source
from tripletune.train.settings import DataSection, RunConfig, TrainSection
from tripletune.train.sources import Examples, Sources
from tripletune.train.text import TextSection, TextTask, TextTrainSection, choose_examples, generate_replies

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.models.local.chat import ChatEncoder
    from tripletune.train.rows.cache import Row

# Pairs that are tokenised in one call.
_CHUNK = 256
# A reply whose place in a rendered chat is looked for.
_PROBE = "probe"


class PairCount(StrEnum):
    """What is counted while pairs are tokenised; logs and `training.json` show these names.

    Attributes:
        PAIRS: All pairs.
        NO_FACTS: Pairs whose text has no facts.
        CUT_SOURCES: Texts that were too long.
        CUT_TARGETS: Targets that lost their last triples.
        LOST_TRIPLES: Triples that these targets lost.
        LEFT_OUT: Pairs whose target has no room for one triple.
    """

    PAIRS = "pairs"
    NO_FACTS = "no_facts"
    CUT_SOURCES = "cut_sources"
    CUT_TARGETS = "cut_targets"
    LOST_TRIPLES = "lost_triples"
    LEFT_OUT = "left_out"


@dataclass
class PairSection(TextSection):
    """Pairs of text and triples, and how they become tokens."""

    train: list[str] = other_default(DataSection, "train", ["data/t2t"])
    prompt: str | None = setting(None, "file that replaces the instruction of decoders; saved with the model")
    max_source_tokens: int = setting(512, "maximum source tokens; a longer text is cut after a word", at_least=16)
    max_target_tokens: int = setting(
        256, "maximum tokens of a target, with its end token; a longer target loses its last triples", at_least=16
    )


@dataclass
class PairTrainSection(TextTrainSection):
    """Optimisation."""

    learning_rate: float = other_default(TrainSection, "learning_rate", 2e-4)
    eval_steps: int | None = other_default(TrainSection, "eval_steps", 5000)
    eval_max_new_tokens: int = other_default(TrainSection, "eval_max_new_tokens", 512)


@dataclass
class PairConfig(RunConfig):
    """A whole run."""

    output_dir: str = other_default(RunConfig, "output_dir", "runs/extractor")
    data: PairSection = field(default_factory=PairSection)
    train: PairTrainSection = field(default_factory=PairTrainSection)


class PairTask(TextTask):
    """Trains an extractor on text-to-triples pairs."""

    Config: ClassVar[type[RunConfig]] = PairConfig
    usage = "--config smollm2_135m_t2t_cpu --model.base MODEL --data.train runs/t2t"
    next_command = (
        "tripletune rag extract --corpus CORPUS --model {run} --output triples.sqlite   (scores: eval extraction)"
    )
    config: PairConfig
    published: ClassVar[str] = "the paper: 1,024 (32 x 4 on 8 GPUs), or 256 (8 x 4) by its table 8"

    @cached_property
    def sources(self) -> Sources:
        """The pairs of training and validation, which share no text (`text_key`)."""
        from tripletune.data_builders.datasets.split import text_key

        return self.source_pair(
            ExtractionPair.from_json, name="text-to-triples pairs", keys_of=lambda pair: [text_key(pair.text)]
        )

    @cached_property
    def instruction(self) -> str | None:
        """The system prompt; None for encoder-decoders, which read only the text."""
        return None if self.seq2seq else load_instruction(self.config.data.prompt)

    @cached_property
    def encoder(self) -> PairEncoder:
        """Tokenises the pairs for the model, with its template and the limits of the settings."""
        return PairEncoder(
            self.processor,
            self.instruction,
            self.config.data,
            generation_config=self.model.generation_config,
            model=self.config.model.base,
        )

    def tokenised(self, source: Examples, cache: Path) -> Dataset:
        """Rows of pairs; the sample in the key reveals a changed template or tokenizer in a folder of the same name."""
        from tripletune.train.rows.cache import cached_rows

        data = self.config.data
        limits = [data.max_source_tokens, data.max_target_tokens]
        tokenizer = tokenizer_fingerprint(self.processor)
        key = ["pairs", source.digest, tokenizer, self.instruction, self.encoder.sample(), *limits]
        return cached_rows(key, cache, source.works(self.encoder.rows))

    def reason_for_no_rows(self, counts: Mapping[str, int]) -> str:
        """Say that no pair has room for a triple."""
        left_out = counts.get(PairCount.LEFT_OUT, 0)
        if not left_out:
            return ""
        limit = self.config.data.max_target_tokens
        return f"in all {left_out:,} pairs, the first triple is longer than data.max_target_tokens {limit}: raise it"

    @cached_property
    def scored(self) -> list[ExtractionPair]:
        """The validation pairs whose replies are scored."""
        pairs: Iterable[ExtractionPair] = self.sources.validation or []
        return choose_examples(pairs, self.config.train.eval_generate_records, lambda pair: pair.source_text)

    def prompts(self, pairs: Sequence[ExtractionPair]) -> list[list[int]]:
        """The tokens of the pairs' prompts, each with its text cut as in training."""
        # Texts are cut as in training and in use, although a cut text may lack some of its facts.
        texts = self.encoder.cut_sources([pair.source_text for pair in pairs], Counter())
        return self.encoder.prompts(texts)

    def prompt_and_expected(self, sample: ExtractionPair) -> tuple[list[int], str]:
        """The prompt of the cut text, and the target of all its triples, also of those that training would cut."""
        (prompt,) = self.prompts([sample])
        return prompt, self.encoder.target_text(sample.triples)

    def generate_replies(self, model: PreTrainedModel) -> list[str]:
        """Generate the extractions of the scored texts, as extraction would: greedily, and ended at repetitions."""
        from tripletune.models.local.chat import Repetition

        # Stop at repetitions, as extraction does: a small model sometimes repeats itself up to the limit.
        enough = Repetition(self.processor).only_repeats
        return generate_replies(model, self.processor, self.prompts(self.scored), self.config.train, enough)

    def metrics(self, replies: list[str]) -> dict[str, Any]:
        """Score the model's triples like `tripletune eval extraction` without an embedder (RAS, figure 15)."""
        from tripletune.eval.triples import Prediction, score_extractions

        return score_extractions(Prediction(pair, [reply]) for pair, reply in zip(self.scored, replies, strict=True))

    @cached_property
    def files(self) -> dict[str, str]:
        """The extractor's facts and its instruction, since extraction must cut and ask as training did.

        Returns:
            Contents by name of files that lie beside the weights in run folders and exports; `TaskFacts` is what
            readers of these folders rely on.
        """
        base, commit = pinned_source(self.config.model.base)
        about: TaskFacts = {
            "task": "text_to_triples",
            "base_model": base,
            "base_revision": commit,
            "base_weights": content_fingerprint(self.config.model.base),
            "encoder_decoder": self.seq2seq,
            "max_source_tokens": self.config.data.max_source_tokens,
            "max_target_tokens": self.config.data.max_target_tokens,
        }
        files = {EXTRACTOR: json_line(about, 2)}
        if self.instruction is not None:
            files[PROMPT_FILE] = self.instruction + "\n"
        return files


TASK = PairTask


class PairEncoder:
    """Tokenises pairs for one model.

    Args:
        tokenizer: The model's tokenizer.
        instruction: A decoder's system prompt. Encoder-decoders have none: their prompts are only the texts.
        data: Limits of source and target.
        generation_config: Names all tokens that end a reply of the model.
        model: The model's name in error messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        instruction: str | None,
        data: PairSection,
        generation_config: GenerationConfig | None = None,
        model: str = "",
    ) -> None:
        """Find the token that ends a target; a tokenizer without one is refused, since no reply would end."""
        from tripletune.models.local.chat import ChatEncoder, eos_token_ids

        # The end token of a decoder's target is found with the chat template, so the chat is made before it.
        self.tokenizer = tokenizer
        self.instruction = instruction
        self.max_source_tokens = data.max_source_tokens
        self.max_target_tokens = data.max_target_tokens
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {model} has no end-of-sequence token: set one before training")
        self._chat: ChatEncoder | None = None
        # The token that ends a target.
        self._end = int(tokenizer.eos_token_id)
        if instruction is not None:
            self._chat = ChatEncoder(tokenizer, model or str(tokenizer.name_or_path))
            self._end = self._end_of_turn(self._chat, eos_token_ids(tokenizer, generation_config))

    def prompts(self, sources: Sequence[str]) -> list[list[int]]:
        """Return the prompts of texts that have been cut.

        A decoder's text is cut alone: the template and the instruction around it are always whole.
        """
        if self._chat is None:
            return text_ids(self.tokenizer, sources, around=True)
        chats = [self._chat.render(extraction_chat(source, self.instruction or "")) for source in sources]
        return self._chat.tokens_of(chats)

    def sample(self) -> list[list[int]]:
        """Return a sample row, which shows a change of the end tokens; it is part of the key of cached rows."""
        probe = ExtractionPair("probe", "Ada was born in London.", "Ada", (Triple("Ada", "born in", "London"),))
        sample = []
        for row in self.rows([probe], Counter()):
            sample += [row["input_ids"], row["labels"]]
        return sample

    def rows(self, pairs: Iterable[ExtractionPair], counts: Counter[str]) -> Iterator[Row]:
        """Yield the rows of pairs in their order.

        Args:
            counts: Receives every `PairCount`, also those that are 0.

        Yields:
            `input_ids`, `labels` and `length`. For decoders, the two lists have one length, and labels are -100 at the
            prompt. For encoder-decoders, they are source and target.
        """
        counts.update(dict.fromkeys(PairCount, 0))
        stream = iter(pairs)
        while chunk := list(islice(stream, _CHUNK)):
            sources = self.cut_sources([pair.source_text for pair in chunk], counts)
            targets = self._targets_of_pairs([pair.triples for pair in chunk], counts)
            counts[PairCount.PAIRS] += len(chunk)
            counts[PairCount.NO_FACTS] += sum(not pair.triples for pair in chunk)
            for prompt, target in zip(self.prompts(sources), targets, strict=True):
                if target is None:
                    counts[PairCount.LEFT_OUT] += 1
                else:
                    yield self._row_of_pair(prompt, target)

    def _row_of_pair(self, prompt: list[int], target: list[int]) -> Row:
        """A row of a pair; a decoder reads its target behind the prompt, and learns only the target."""
        length = len(prompt) + len(target)
        if self._chat is None:
            return {"input_ids": prompt, "labels": target, "length": length}
        return {"input_ids": prompt + target, "labels": [IGNORED] * len(prompt) + target, "length": length}

    def cut_sources(self, sources: Sequence[str], counts: Counter[str]) -> list[str]:
        """Cut texts on the right to the limit, if possible between two words, and count the cut texts.

        The title, which says what a passage is about, stands at the start and stays.
        """
        limit = self.max_source_tokens
        if self._chat is None:
            limit -= 1  # the end token of a source
        kept = []
        for source in sources:
            # No token stands for less than a byte, so most texts are short enough without tokenising.
            if len(source.encode(errors="replace")) < limit:
                kept.append(source)
                continue
            shorter = self._cut_text(source, limit)
            counts[PairCount.CUT_SOURCES] += shorter != source
            kept.append(shorter)
        return kept

    def _cut_text(self, text: str, limit: int) -> str:
        """Cut a text to a number of tokens; the shorter text can have other tokens, so it is counted again.

        Each pass removes at least a character, so the loop ends. A space is used only in the second half of what fits:
        a text with few spaces would else lose most of it (`tests/train/tasks/test_pair_task.py` has both cases).
        """
        while True:
            spans = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True
            )["offset_mapping"]
            if len(spans) <= limit:
                return text
            _, end = spans[limit - 1]
            end = min(end, len(text) - 1)
            space = text.rfind(" ", 0, end + 1)
            if space > end // 2:
                text = text[:space]
            else:
                # A text without a space near the limit, as in Chinese, is cut at the limit.
                text = text[: max(end, 1)]

    def _targets_of_pairs(self, triples: Sequence[Sequence[Triple]], counts: Counter[str]) -> list[list[int] | None]:
        """Return the tokens of each pair's target; None for a target without room for one triple."""
        targets: list[list[int] | None] = []
        whole_targets = text_ids(self.tokenizer, [self.target_text(facts) for facts in triples])
        for facts, ids in zip(triples, whole_targets, strict=True):
            # A target has its end token besides.
            fits = len(ids) < self.max_target_tokens
            if fits:
                targets.append([*ids, self._end])
            else:
                targets.append(self._cut_target(facts, counts))
        return targets

    def _cut_target(self, triples: Sequence[Triple], counts: Counter[str]) -> list[int] | None:
        """The tokens of as many first triples as fit; None if none fits, since an empty target would say "no facts"."""
        kept = self._count_fitting(triples)
        if kept == 0:
            return None
        counts[PairCount.CUT_TARGETS] += 1
        counts[PairCount.LOST_TRIPLES] += len(triples) - kept
        return [*self._tokens_of_target(triples[:kept]), self._end]

    def _count_fitting(self, triples: Sequence[Triple]) -> int:
        """The number of first triples that fit into a target, of a list that does not fit as a whole."""
        shorter_lists = [triples[:count] for count in range(1, len(triples))]
        # A longer list has more tokens, so the first list that does not fit is found by bisection; its index is the
        # number of triples in the list before it.
        return bisect_left(shorter_lists, self.max_target_tokens, key=lambda first: len(self._tokens_of_target(first)))

    def _tokens_of_target(self, triples: Sequence[Triple]) -> list[int]:
        """The tokens of a target, without its end token."""
        (ids,) = text_ids(self.tokenizer, [self.target_text(triples)])
        return ids

    def target_text(self, triples: Sequence[Triple]) -> str:
        """The text that the model learns to write.

        A decoder writes a word where there are no facts, since servers take an empty reply for a failure.
        """
        text = format_triples(triples)
        if not text and self._chat is not None:
            return NO_FACTS
        return text

    def _end_of_turn(self, chat: ChatEncoder, eos_ids: Sequence[int]) -> int:
        """The end token that the chat template puts after a reply (Gemma's is not the text's), else the tokenizer's.

        It is the token with which the base model ends its own replies.
        """
        reply: Message = {"role": "assistant", "content": _PROBE}
        text = chat.render([*extraction_chat("text", self.instruction or ""), reply], reply=False)
        after_reply = text[text.rfind(_PROBE) + len(_PROBE) :]
        for token in chat.tokens(after_reply):
            if token in eos_ids:
                return token
        return self._end
