"""Write a text model as one GGUF file for llama.cpp, Ollama and similar programs: `tripletune checkpoints gguf`.

The model must be a Llama, Qwen2 or Qwen3 with a byte-level BPE tokenizer. Names, layout and metadata follow llama.cpp's
script `convert_hf_to_gguf.py`, which converts other models too, but is not a package.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from tripletune.core import libraries
from tripletune.core.files import new_file, read_json
from tripletune.models.loading import load_tokenizer
from tripletune.models.run_folders import PROCESSOR, check_finite, is_adapter, stored_weights, trained_folder

if TYPE_CHECKING:
    import gguf
    from transformers import PretrainedConfig

# Types of written matrices.
Quantization = Literal["f32", "f16", "bf16", "q8_0"]
TYPES: tuple[Quantization, ...] = get_args(Quantization)
_FAMILIES = ("llama", "qwen2", "qwen3")
_ROPES = ("default", "llama3")
_OTHERS = "convert it with convert_hf_to_gguf.py of llama.cpp"
# Numbers that q8_0 stores in one block.
_BLOCK = 32
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Steps of splitting a text before BPE: single digits, GPT-2's pattern, and none (a pattern came before).
_DIGITS = "digits"
_GPT2_PATTERN = "GPT-2's pattern"
_NO_PATTERN = "no pattern"
# llama.cpp's names of the ways to split a text, each with its steps: one of those above, or a pattern.
_SPLITTERS = {
    "gpt-2": [_GPT2_PATTERN],
    "smollm": [_DIGITS, _GPT2_PATTERN],
    "qwen2": [_WORDS % r"\p{N}", _NO_PATTERN],
    "llama-bpe": [_WORDS % r"\p{N}{1,3}", _NO_PATTERN],
}


def write_gguf(folder: str | Path, output: str | Path, quantize: Quantization = "f16") -> None:
    """Write the model of a folder as a GGUF file with matrices of the type `quantize`; vectors stay in float32.

    What cannot be written is found before the file appears: the configuration first, the tokenizer before the weights.
    Llama 3.1 scales its rotary frequencies, which llama.cpp reads as a weight.
    """
    import gguf

    logging.getLogger("gguf").setLevel(logging.WARNING)
    source = trained_folder(folder)
    output = Path(output)
    config = _checked_config(source, folder)
    rope = getattr(config, "rope_parameters", None) or {}
    with new_file(output) as scratch:
        writer = gguf.GGUFWriter(scratch, config.model_type)
        _write_settings(writer, config, rope, output.stem)
        prefix = "ALL_" if quantize == "f32" else "MOSTLY_"
        writer.add_file_type(gguf.LlamaFileType[prefix + quantize.upper()])
        _write_tokenizer(writer, source, config.vocab_size)
        if rope.get("rope_type") == "llama3":
            writer.add_tensor("rope_freqs.weight", _rope_factors(config))
        _write_weights(writer, source, config, quantize)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _checked_config(source: Path, folder: str | Path) -> PretrainedConfig:
    """Return a model's configuration; make sure that it is a whole model of a family that is known here.

    Another family may share the names of weights, and would be written without an error but reply with nonsense.
    """
    from transformers import AutoConfig

    is_graph_llm = (source / PROCESSOR).exists()
    if is_adapter(source) or is_graph_llm:
        more = " --language-model-only" if is_graph_llm else ""
        raise ValueError(
            f"{source} is not a plain language model: first run tripletune checkpoints merge {folder}{more}"
        )
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in _FAMILIES or rope.get("rope_type", "default") not in _ROPES:
        raise ValueError(f"{source} is a {config.model_type} with {rope.get('rope_type')} positions: {_OTHERS}")
    return config


def _write_weights(writer: gguf.GGUFWriter, source: Path, config: PretrainedConfig, quantize: Quantization) -> None:
    """Write all weights under GGUF's names, matrices in the type `quantize` if their rows fill its blocks.

    As in llama.cpp's script, vectors (norms, biases) stay in float32: they are small, and its kernels expect that type.
    """
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    matrix_type = gguf.GGMLQuantizationType[quantize.upper()]
    missing = _weight_names(config)
    for name, weight in stored_weights(source):
        missing.discard(name)
        check_finite([(name, weight)], source)
        gguf_name = names.get_name(name, (".weight", ".bias"))
        if gguf_name is None:
            raise ValueError(f"{source}: GGUF has no name for the weight {name}: {_OTHERS}")
        data = _in_gguf_order(name, weight.float().numpy(), config)
        fills_blocks = quantize != "q8_0" or data.shape[-1] % _BLOCK == 0
        stored_type = gguf.GGMLQuantizationType.F32
        if data.ndim > 1 and fills_blocks:
            stored_type = matrix_type
        writer.add_tensor(gguf_name, gguf.quants.quantize(data, stored_type), raw_dtype=stored_type)
    if missing:
        raise ValueError(f"{source}: weights are missing, such as {min(missing)}: copy the folder again")


def _weight_names(config: PretrainedConfig) -> set[str]:
    """The names of the weights that a model of this configuration needs."""
    import torch
    from transformers import AutoModelForCausalLM

    # A model on this device has shapes, but takes no memory.
    with torch.device("meta"):
        names = set(AutoModelForCausalLM.from_config(config).state_dict())
    if config.tie_word_embeddings:
        names.discard("lm_head.weight")
    return names


def _in_gguf_order(name: str, weight: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """Return a weight with its rows in llama.cpp's order; only those of LLaMA's queries and keys differ.

    transformers rotates the two halves of a head, llama.cpp for this family neighbouring numbers. With a wrong order,
    a file loads and replies with nonsense.
    """
    layer = name.split(".")[-2]
    if config.model_type != "llama" or layer not in ("q_proj", "k_proj"):
        return weight
    heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
    # From transformers' two halves of each head into pairs that are rotated together.
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _write_settings(writer: gguf.GGUFWriter, config: PretrainedConfig, rope: dict[str, Any], name: str) -> None:
    """Write the settings that llama.cpp reads for these families.

    A configuration may leave out the width of a head, which is then the model's width shared by all heads, and the base
    of the rotary frequencies, which is then 10,000 in transformers.
    """
    import gguf

    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_rope_dimension_count(head_width)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10_000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_tokenizer(writer: gguf.GGUFWriter, source: Path, size: int) -> None:
    """Write tokens, merges and special tokens; `size` is the number of the model's embeddings.

    The list of tokens must be as long as the embeddings. Whether llama.cpp should add a BOS token is tried out, because
    no field of the tokenizer's files tells it for all families.
    """
    import gguf

    tokenizer = load_tokenizer(source)
    splitter = _splitter_name(source / "tokenizer.json")
    if splitter is None:
        raise ValueError(f"{source}: the tokenizer does not split text like GPT-2, SmolLM, Llama 3 or Qwen2: {_OTHERS}")
    # Ids without a token, of which embeddings may have some, are padding.
    tokens = [f"[PAD{token_id}]" for token_id in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < size:
            tokens[token_id] = token
            kinds[token_id] = gguf.TokenType.NORMAL
    for token_id, added in tokenizer.added_tokens_decoder.items():
        if token_id < size:
            kinds[token_id] = gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(False)
    special = gguf.SpecialVocab(source, load_merges=True, n_vocab=size)
    special.add_special_token["bos"] = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    special.add_to_gguf(writer, quiet=True)


def _splitter_name(file: Path) -> str | None:
    """Return llama.cpp's name of a tokenizer's way to split a text, or None if it has no name here.

    Args:
        file: The tokenizer's `tokenizer.json`.
    """
    if not file.is_file():
        return None
    settings = read_json(file)
    if settings["model"].get("type") != "BPE":
        return None
    pre_tokenizer = settings.get("pre_tokenizer") or {}
    # A sequence of pre-tokenizers, or a single one.
    steps = [_step_of(step) for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer])]
    for name, splitter in _SPLITTERS.items():
        if splitter == steps:
            return name
    return None


def _step_of(step: Mapping[str, Any]) -> str | None:
    """Return the step of `_SPLITTERS` that a pre-tokenizer takes; None for another kind.

    Only what llama.cpp has under a name can be written; a tokenizer that splits text otherwise would give other tokens.
    """
    if step.get("type") == "ByteLevel":
        return _GPT2_PATTERN if step.get("use_regex", True) else _NO_PATTERN
    if step.get("type") == "Digits":
        return _DIGITS if step.get("individual_digits") else None
    if step.get("behavior") != "Isolated":
        return None
    pattern = step.get("pattern") or {}
    return pattern.get("Regex")


def _rope_factors(config: PretrainedConfig) -> np.ndarray:
    """Return the divisor of each rotary frequency in Llama 3.1 and later.

    llama.cpp divides its plain frequencies by a weight, so the scaled ones of transformers are compared with the plain.
    """
    frequencies_of = libraries.take("transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS")
    scaled = frequencies_of["llama3"](config, "cpu")[0].numpy()
    plain = config.rope_parameters["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
    return (plain / scaled).astype(np.float32)
