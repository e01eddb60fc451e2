"""Load a language model and its tokenizer from a spec; see `models.specs`.

Nothing in a model folder is executed: no Python code, no pickle, no regular expression of an adapter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tripletune.models.adapters import adapter_base, load_adapter
from tripletune.models.completeness import SAY_WHAT_IS_MISSING, checked_model, loading_errors_explained
from tripletune.models.merging import for_inference, merge_into_base
from tripletune.models.run_folders import TOKENIZERS
from tripletune.models.specs import best_dtype, options_without_code, source_of

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(spec: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer and make sure that it can pad; an adapter without tokenizer files has that of its base model.

    Padding is never read, because masks hide it, so the end token serves where a family has no token for it.
    """
    from transformers import AutoTokenizer

    source = source_of(spec)
    folder = Path(source.place)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZERS):
        base = adapter_base(folder)
        if base is not None:
            return load_tokenizer(base)
        raise FileNotFoundError(
            f"model folder {folder} has no tokenizer (tokenizer.json or tokenizer.model): "
            "copy the tokenizer files of the base model into it"
        )
    with loading_errors_explained(spec, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source.place, **options_without_code(source))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def use_embedded_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Change a tokenizer to pad with the end token if the model has no embedding for the padding token (Llama 2).

    Masks hide padding, but its embedding is looked up.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= model.config.get_text_config().vocab_size:
        tokenizer.pad_token = tokenizer.eos_token


def is_encoder_decoder(spec: str | Path) -> bool:
    """Whether a model is an encoder-decoder (T5, BART), according to its configuration.

    An adapter's folder has none, so its base model is asked.
    """
    from transformers import AutoConfig

    source = source_of(spec)
    base = adapter_base(source.place)
    if base is not None:
        return is_encoder_decoder(base)
    with loading_errors_explained(spec, "configuration"):
        return bool(AutoConfig.from_pretrained(source.place, **options_without_code(source)).is_encoder_decoder)


def load_causal_lm(
    spec: str | Path, dtype: torch.dtype | None = None, nf4: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder in eval mode and its tokenizer; see `load_language_model`.

    Whether it is a decoder is read from the small configuration, before the weights are.

    Raises:
        ValueError: The model is an encoder-decoder.
    """
    tokenizer = load_tokenizer(spec)
    if is_encoder_decoder(spec):
        raise ValueError(f"model {spec} is an encoder-decoder, but a decoder is needed here")
    model = load_language_model(spec, dtype, nf4=nf4)
    use_embedded_padding(tokenizer, model)
    return model, tokenizer


def load_language_model(
    spec: str | Path,
    dtype: torch.dtype | None = None,
    merge: bool = True,
    nf4: bool = False,
) -> PreTrainedModel:
    """Load a language model, decoder or encoder-decoder, in eval mode.

    Args:
        dtype: None means `best_dtype()`.
        merge: Merge an adapter into its base model in any weight type, so that another adapter can be trained on top;
            False: `for_inference` decides whether to merge.
        nf4: Keep linear layers in 4 bits, to train an adapter (QLoRA; Dettmers et al., 2023).
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    _hide_progress_in_logs()
    source = source_of(spec)
    base = adapter_base(source.place)
    if base is not None:
        if nf4:
            # Merged into 4-bit layers, the adapter would be rounded to 4 bits with them.
            raise ValueError(
                f"model {spec} is an adapter: merge it first (tripletune checkpoints merge) to train on it in nf4"
            )
        adapted = load_adapter(load_language_model(base, dtype), source.place, base)
        if not merge:
            return for_inference(adapted)
        # PEFT has frozen the weights, but a run may train them all.
        return merge_into_base(adapted).requires_grad_()
    kind = AutoModelForSeq2SeqLM if is_encoder_decoder(spec) else AutoModelForCausalLM
    dtype = dtype or best_dtype()
    options = options_without_code(source)
    if nf4:
        options["quantization_config"] = _nf4_settings(dtype)
    with loading_errors_explained(spec, "weights"):
        loaded = kind.from_pretrained(source.place, dtype=dtype, use_safetensors=True, **options, **SAY_WHAT_IS_MISSING)
    model = checked_model(loaded, spec)
    if nf4:
        # Only the adapter is saved; its base model is later loaded in the type of its folder.
        del model.config.quantization_config
    return model.eval()


def _hide_progress_in_logs() -> None:
    """Turn transformers' progress bars off where the error output is a file, which would keep every redrawn bar."""
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()


def _nf4_settings(dtype: torch.dtype) -> BitsAndBytesConfig:
    """The settings of the QLoRA paper: quantiles of the normal distribution, with quantised scales."""
    import bitsandbytes  # noqa: F401 - its own error is clearer than that of transformers
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
