"""Tokenise texts so that nothing in a passage or question becomes a control token and ends a turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any


def text_ids(tokenizer: Any, texts: Sequence[str], around: bool = False) -> list[list[int]]:
    """Tokenise texts without control tokens; `around` adds the special tokens that the tokenizer puts around a text."""
    if not texts:
        return []
    read = tokenizer(list(texts), add_special_tokens=around, split_special_tokens=True, return_special_tokens_mask=True)
    control, rows = control_tokens(tokenizer), list[list[int]]()
    for ids, added in zip(read["input_ids"], read["special_tokens_mask"]):
        rows.append(list(ids))
        # Unigram models (SentencePiece) find control tokens among their pieces of text.
        for place in range(len(ids) - 1, -1, -1) if not control.keys().isdisjoint(ids) else ():
            if ids[place] in control and not added[place] and ids[place] != tokenizer.unk_token_id:
                rows[-1][place : place + 1] = tokenizer.convert_tokens_to_ids(list(control[ids[place]]))
    return rows


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a tokenizer by their ids."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def read_text_alone(tokenizer: Any) -> None:
    """Make an encoder's tokenizer read control tokens as plain text, like `text_ids`, also when a library calls it."""
    from tokenizers import Tokenizer, models, normalizers

    tokenizer.split_special_tokens = True
    core = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(core, Tokenizer) and isinstance(core.model, (models.Unigram, models.WordLevel)):
        names = [token.content for token in core.get_added_tokens_decoder().values() if token.special]
        apart = [normalizers.Replace(name, f"{name[0]} {name[1:]}") for name in names]
        core.normalizer = normalizers.Sequence([*([core.normalizer] if core.normalizer else []), *apart])
