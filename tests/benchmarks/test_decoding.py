"""The benchmark of decoding: every way on this machine writes the same tokens, each up to its own limit."""

import torch
from transformers import AutoModelForCausalLM

from benchmarks.decoding import (
    DecodedModel,
    Prompt,
    _continuous_replies,
    _our_replies,
    _padded_replies,
    _without_end,
)

PROMPTS = [
    Prompt([5, 6, 7, 8, 9, 10, 11], limit=6, shared=0),
    Prompt([20, 21], limit=3, shared=0),
    Prompt([5, 6, 7, 12], limit=6, shared=0),
]


def test_all_ways_write_the_tokens_of_one_prompt_alone(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    decoded = DecodedModel(model, ends=[0], pad=3)
    alone = []
    for prompt in PROMPTS:
        written = model.generate(
            torch.tensor([prompt.ids]), max_new_tokens=prompt.limit, do_sample=False, eos_token_id=[0], pad_token_id=3
        )
        alone.append(_without_end(written[0, len(prompt.ids) :].tolist(), [0]))
    assert sum(map(len, alone)) > 0
    assert _our_replies(decoded, PROMPTS, rows=2) == alone
    assert _padded_replies(decoded, PROMPTS, rows=2) == alone
    assert _continuous_replies(decoded, PROMPTS, rows=2) == alone


def test_a_reply_ends_before_its_first_end_token():
    assert _without_end([4, 5, 0, 6, 0], [0, 2]) == [4, 5]
    assert _without_end([4, 5], [0, 2]) == [4, 5]
