"""Write a text model as one GGUF file for llama.cpp, Ollama and similar programs: `tripletune checkpoints gguf`.

The model must be a Llama, Qwen2 or Qwen3 with a byte-level BPE tokenizer. Names, layout and metadata follow llama.cpp's
script `convert_hf_to_gguf.py`, which converts other models too, but is not a package.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from tripletune.core import libraries
from tripletune.core.files import new_file, read_json
from tripletune.models.loading import load_tokenizer
from tripletune.models.run_folders import PROCESSOR, check_finite, is_adapter, stored_weights, trained_folder

TYPES = ("f32", "f16", "bf16", "q8_0")
_ROPES = ("default", "llama3")
_OTHERS = "convert it with convert_hf_to_gguf.py of llama.cpp"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's names of the ways to split a text before BPE.
_CUTS = {"gpt-2": [True], "smollm": ["digit", True], "qwen2": [_WORDS % r"\p{N}", False],
         "llama-bpe": [_WORDS % r"\p{N}{1,3}", False]}  # fmt: skip


def write_gguf(folder: str | Path, output: str | Path, quantize: str = "f16") -> None:
    """Write the model of a folder as a GGUF file with matrices of the type `quantize`; vectors stay in float32."""
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    logging.getLogger("gguf").setLevel(logging.WARNING)
    source, output = trained_folder(folder), Path(output)
    if is_adapter(source) or (source / PROCESSOR).exists():
        more = " --language-model-only" if (source / PROCESSOR).exists() else ""
        raise ValueError(
            f"{source} is not a plain language model: first run tripletune checkpoints merge {folder}{more}"
        )
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in ("llama", "qwen2", "qwen3") or rope.get("rope_type", "default") not in _ROPES:
        raise ValueError(f"{source} is a {config.model_type} with {rope.get('rope_type')} positions: {_OTHERS}")
    kind = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    wanted = gguf.GGMLQuantizationType[quantize.upper()]
    with new_file(output) as scratch:
        writer = gguf.GGUFWriter(scratch, config.model_type)
        _write_settings(writer, config, rope, output.stem)
        writer.add_file_type(gguf.LlamaFileType[("ALL_" if quantize == "f32" else "MOSTLY_") + quantize.upper()])
        _write_tokenizer(writer, source, config.vocab_size)
        if rope.get("rope_type") == "llama3":
            writer.add_tensor("rope_freqs.weight", _rope_factors(config))
        with torch.device("meta"):
            needed = set(AutoModelForCausalLM.from_config(config).state_dict())
        needed -= {"lm_head.weight"} if config.tie_word_embeddings else set()
        for name, weight in stored_weights(source):
            needed.discard(name)
            check_finite([(name, weight)], source)
            data, stem = weight.float().numpy(), name.split(".")
            if config.model_type == "llama" and stem[-2] in ("q_proj", "k_proj"):
                data = _paired(data, config.num_attention_heads if stem[-2] == "q_proj" else config.num_key_value_heads)
            place = names.get_name(name, (".weight", ".bias"))
            if place is None:
                raise ValueError(f"{source}: GGUF has no name for the weight {name}: {_OTHERS}")
            blocks = data.ndim > 1 and (quantize != "q8_0" or data.shape[-1] % 32 == 0)
            used = wanted if blocks else gguf.GGMLQuantizationType.F32
            writer.add_tensor(place, gguf.quants.quantize(data, used), raw_dtype=used)
        if needed:
            raise ValueError(f"{source}: weights are missing, such as {min(needed)}: copy the folder again")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _write_settings(writer: Any, config: Any, rope: dict[str, Any], name: str) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10_000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(2)


def _write_tokenizer(writer: Any, source: Path, size: int) -> None:
    import gguf

    tokenizer, written = load_tokenizer(source), source / "tokenizer.json"
    about = read_json(written) if written.is_file() else {"model": {}}
    cuts = about.get("pre_tokenizer") or {}
    steps = [_cut(step) for step in cuts.get("pretokenizers", [cuts])]
    pre = next((name for name, way in _CUTS.items() if way == steps), None)
    if about["model"].get("type") != "BPE" or pre is None:
        raise ValueError(f"{source}: the tokenizer does not split text like GPT-2, SmolLM, Llama 3 or Qwen2: {_OTHERS}")
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [gguf.TokenType.UNUSED] * size
    for token, number in tokenizer.get_vocab().items():
        if number < size:
            tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        if number < size:
            kinds[number] = gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(False)
    special = gguf.SpecialVocab(source, load_merges=True, n_vocab=size)
    special.add_special_token["bos"] = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    special.add_to_gguf(writer, quiet=True)


def _cut(step: dict[str, Any]) -> Any:
    if step.get("type") == "ByteLevel":
        return step.get("use_regex", True)
    if step.get("type") == "Digits":
        return "digit" if step.get("individual_digits") else None
    return (step.get("pattern") or {}).get("Regex") if step.get("behavior") == "Isolated" else None


def _paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder each head's rows from transformers' two halves into pairs that are rotated together."""
    apart = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(apart.swapaxes(1, 2).reshape(weight.shape))


def _rope_factors(config: Any) -> np.ndarray:
    """Return the divisor of each rotary frequency in Llama 3.1 and later."""
    frequencies_of = libraries.take("transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS")
    scaled = frequencies_of["llama3"](config, "cpu")[0].numpy()
    plain = config.rope_parameters["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
    return (plain / scaled).astype(np.float32)
