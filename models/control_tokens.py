"""Tokenise texts so that nothing in a passage or question becomes a control token and ends a turn.

Tested in `tests/models/local/test_chat.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def text_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], around: bool = False) -> list[list[int]]:
    """Tokenise texts without control tokens; `around` adds the special tokens that the tokenizer puts around a text.

    `split_special_tokens` does this for most tokenizers; `_without_control` for those that still find control tokens.
    """
    if not texts:
        return []
    encoded = tokenizer(
        list(texts), add_special_tokens=around, split_special_tokens=True, return_special_tokens_mask=True
    )
    rows = []
    for ids, is_added in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
        rows.append(_without_control(tokenizer, list(ids), is_added))
    return rows


def template_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise what a chat template wrote, whose control tokens are meant; it holds all special tokens itself."""
    if not text:
        return []
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _without_control(tokenizer: PreTrainedTokenizerBase, ids: list[int], is_added: Sequence[int]) -> list[int]:
    """Replace control tokens that stand for text by the tokens of their characters.

    Unigram models (SentencePiece) find control tokens among their pieces of text.

    Args:
        is_added: 1 for each token that the tokenizer put around the text, else 0.
    """
    control = control_tokens(tokenizer)
    if control.keys().isdisjoint(ids):
        return ids
    # Go backwards, since a replacement moves the tokens after it.
    for place in reversed(range(len(ids))):
        token = ids[place]
        # An unknown token is text outside the vocabulary, not a control token that the text spells.
        is_spelled = token in control and not is_added[place] and token != tokenizer.unk_token_id
        if is_spelled:
            ids[place : place + 1] = tokenizer.convert_tokens_to_ids(list(control[token]))
    return ids


@lru_cache(maxsize=8)
def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens of a tokenizer by their ids."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def read_control_as_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make an encoder's tokenizer read control tokens as plain text, like `text_ids`, also when a library calls it.

    sentence-transformers calls the tokenizer itself, so `text_ids` cannot stand between. The tokenizer is changed for
    good.
    """
    from tokenizers import Tokenizer, models, normalizers

    tokenizer.split_special_tokens = True
    core = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(core, Tokenizer) or not isinstance(core.model, (models.Unigram, models.WordLevel)):
        return
    # These models have control tokens among their pieces, so a space breaks the names in the text.
    steps = []
    if core.normalizer:
        steps.append(core.normalizer)
    for token in core.get_added_tokens_decoder().values():
        if token.special:
            name = token.content
            steps.append(normalizers.Replace(name, f"{name[0]} {name[1:]}"))
    core.normalizer = normalizers.Sequence(steps)
