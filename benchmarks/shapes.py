"""Models of the papers' widths with random weights, and rows of a chosen length, without a model hub.

Speed and memory depend on widths, types and lengths, not on the values of weights and words. A tokenizer is trained on
the words of a fictional world, and each kind of data gets as many of the world's triples as fill the wanted tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.pairs import ExtractionPair, Trajectory
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple, format_triples
from tripletune.core.files import json_line
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.rag.systems.cirag.integration import (
    INTEGRATE_ROLE,
    Decision,
    Round,
    decision_text,
    messages_of,
    triples_as_json,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Questions of the world whose triples fill the rows.
_QUESTIONS = 60
_START, _USER, _END = "<|start|>", "<|turn|>", "<|end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# Labels of the extractor's pairs have about 200 tokens, a triple of the world about 14.
_TRIPLES_OF_PAIR = 14
_ROUNDS = 3


class Shape(NamedTuple):
    """The widths of a language model: its type in transformers, and the fields of its configuration."""

    model_type: str
    fields: dict[str, Any]


def _shape_of_widths(model_type: str, widths: Sequence[int], vocabulary: int, **fields: Any) -> Shape:
    """A shape from its widths.

    Args:
        widths: Those of the hidden state and the MLP, and the numbers of layers, query heads and key heads.
        vocabulary: Number of tokens.
        **fields: Further fields of the configuration in transformers, whose class refuses wrong values.
    """
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return Shape(model_type, {**dict(zip(names, widths, strict=True)), "vocab_size": vocabulary, **fields})


# As in the configurations that the models were published with.
SHAPES = {
    "llama-2-7b": _shape_of_widths("llama", (4096, 11008, 32, 32, 32), 32000, max_position_embeddings=4096),
    "llama-3-8b": _shape_of_widths("llama", (4096, 14336, 32, 32, 8), 128256, max_position_embeddings=8192),
    "qwen2.5-7b": _shape_of_widths("qwen2", (3584, 18944, 28, 28, 4), 152064, max_position_embeddings=32768),
    "llama-3.2-3b": _shape_of_widths(
        "llama", (3072, 8192, 28, 24, 8), 128256, head_dim=128, tie_word_embeddings=True, max_position_embeddings=131072
    ),
}


def shrunk(shape: Shape) -> Shape:
    """The same family and grouping of heads in two narrow layers, to try a benchmark on a CPU."""
    heads = shape.fields["num_attention_heads"]
    groups = heads // shape.fields["num_key_value_heads"]
    small = _shape_of_widths(
        shape.model_type, (32 * groups, 64 * groups, 2, 2 * groups, 2), 4096, max_position_embeddings=4096
    )
    fixed = {name: value for name, value in shape.fields.items() if name == "tie_word_embeddings"}
    return Shape(small.model_type, {**small.fields, **fixed})


def write_model(shape: Shape, folder: Path, dtype: str, texts: Iterable[str]) -> None:
    """Write a model with random weights and a tokenizer trained on `texts`, if the folder has none yet.

    The weights are drawn where they are fastest drawn, on the GPU if there is one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "config.json").is_file():
        return
    tokenizer = _train_tokenizer(texts, min(shape.fields["vocab_size"], 8192))
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(shape.model_type, **shape.fields, **tokens, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(7)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of at most `vocabulary` tokens, trained on some texts, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [_START, _USER, _END]
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=_START, eos_token=_END, pad_token=_START)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def world_triples(folder: Path, seed: int) -> list[Triple]:
    """Write a fictional world, and return the triples of its articles in random order."""
    write_world(WorldOptions(seed, train=0, validation=0, test=_QUESTIONS), folder)
    triples = []
    for _, article in read_jsonl(folder / "test.triples.jsonl"):
        triples += [Triple(*parts) for parts in article["triples"]]
    random.Random(seed).shuffle(triples)
    return triples


def texts_of(triples: Sequence[Triple]) -> list[str]:
    """The texts that a tokenizer of `write_model` learns: triples in the two forms in which prompts write them."""
    texts = [format_triples([triple]) for triple in triples]
    texts += [str(triple.as_list()) for triple in triples]
    return texts


def write_records(
    triples: Sequence[Triple], count: int, tokens: int, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write `count` RAS records with somewhat more than `tokens` tokens of triples in three steps.

    Half of them plan and half of them answer. The run's `data.max_input_tokens` then cuts all of them to one length.
    """
    per_step = 1 + _triples_that_fill(tokens * 11 // 10, triples, tokenizer) // _ROUNDS
    source = itertools.cycle(triples)
    rows = []
    for number in range(count):
        steps = []
        for _ in range(_ROUNDS):
            facts = tuple(itertools.islice(source, per_step))
            steps.append(Step(f"What is known about {facts[0].subject}?", facts))
        asked = facts[-1]
        question = f"What is the {asked.predicate} of {asked.subject}, question {number}?"
        key = f"q{number}"
        if number % 2:
            record = Record(key, key, "answering", question, Action.SUFFICIENT, tuple(steps), answers=(asked.object,))
        else:
            record = Record(
                key, key, "planning", question, Action.SUBQ, tuple(steps), f"Who knows {asked.object} and why?"
            )
        rows.append(record.to_json())
    _write_shard(folder, rows)


def write_trajectories(
    triples: Sequence[Triple], count: int, tokens: int, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write `count` chats of CIRAG's integrator with three decisions and more than `tokens` tokens.

    At 8,192 tokens it is an eighth more; the run then leaves out candidates until its limits are kept.
    """
    # A triple is written once as a candidate, and every fifth again as a core triple; the rest is other text.
    per_round = max(2, _triples_that_fill(tokens * 9 // 10, triples, tokenizer, triples_as_json) // _ROUNDS)
    source = itertools.cycle(triples)
    rows = []
    for number in range(count):
        rounds = []
        for place in range(_ROUNDS):
            candidates = tuple(itertools.islice(source, per_round))
            query = "" if place == _ROUNDS - 1 else f"What is the {candidates[0].predicate}, question {number}?"
            thought = f"The question is about {candidates[0].subject}, and {candidates[-1].subject} may help."
            rounds.append(Round(candidates, Decision(thought, candidates[: 1 + per_round // 5], query)))
        last = rounds[-1]
        messages = messages_of("Choose the triples that answer.", f"Question {number}?", last.candidates, rounds[:-1])
        messages.append({"role": "assistant", "content": decision_text(last.decision)})
        learned = tuple(message["role"] == "assistant" for message in messages)
        key = f"q{number}"
        rows.append(Trajectory(f"{key}:0", key, INTEGRATE_ROLE, "made", tuple(messages), learned).to_json())
    _write_shard(folder, rows)


def write_pairs(triples: Sequence[Triple], count: int, folder: Path) -> None:
    """Write `count` pairs of a text and its triples, with about 200 label tokens."""
    source = itertools.cycle(triples)
    rows = []
    for number in range(count):
        facts = tuple(itertools.islice(source, _TRIPLES_OF_PAIR))
        sentences = [f"The {fact.predicate} of {fact.subject} is {fact.object}." for fact in facts]
        rows.append(ExtractionPair(f"p{number}", f"Text {number}. {' '.join(sentences)}", "", facts).to_json())
    _write_shard(folder, rows)


def _triples_that_fill(
    tokens: int,
    triples: Sequence[Triple],
    tokenizer: PreTrainedTokenizerBase,
    write: Callable[[Sequence[Triple]], str] = format_triples,
) -> int:
    """The number of triples that have about so many tokens, as `write` writes them in a prompt."""
    sample = triples[:50]
    per_triple = len(tokenizer(write(sample))["input_ids"]) / len(sample)
    return int(tokens / per_triple)


def _write_shard(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the only shard of a data folder, of JSON values of records, chats or pairs."""
    folder.mkdir(parents=True, exist_ok=True)

    (folder / "train-00000.jsonl").write_text("".join(map(json_line, rows)), encoding="utf-8")


def step_flops(config: PretrainedConfig, lengths: Sequence[int], labels: int, trains_all: bool) -> float:
    """The floating-point operations that a training step needs, without padding and recomputation.

    A forward takes two per weight and token; the head counts for label tokens only, and causal attention for half of
    all pairs. The backward takes as many again for the activations, and for weights in training as many a third time;
    adapters and graph modules are left out (below 1 %).

    Args:
        config: The language model's configuration.
        lengths: Tokens of the rows of a step.
        labels: Label tokens of a step.
        trains_all: Whether all weights are trained, not an adapter.
    """
    width = config.hidden_size
    head_width = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries = config.num_attention_heads * head_width
    keys = config.num_key_value_heads * head_width
    weights = width * (2 * queries + 2 * keys + 3 * config.intermediate_size) * config.num_hidden_layers
    passes = 3 if trains_all else 2
    linear = 2.0 * passes * (weights * sum(lengths) + width * config.vocab_size * labels)
    pairs = sum(length * length for length in lengths) / 2
    # Two products forward (scores, values) and four backward.
    attention = 2.0 * 6 * pairs * queries * config.num_hidden_layers
    return linear + attention
