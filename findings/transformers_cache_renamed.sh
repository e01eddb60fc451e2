#!/usr/bin/env bash
# transformers 5.24.0 renames `past_key_values` to `cache`. Old names still work in its own models and outputs, with a
# warning that they are deprecated. But `generate` passes the cache of a custom model only as `cache`: a forward with
# `past_key_values=None, **kwargs`, which was right up to 5.23.0, never sees its cache and still gets one token per step.
# It raises no error: the tokens are wrong from the second one on. Expected: the same tokens as by hand, or an error.
#
# Seen on 28 November 2026 with Python 3.11.7 and torch 2.13.0 on Linux x86_64:
#     5.23.0: by hand [18, 28, 21, 37, 21, 37, 21, 37], generate [18, 28, 21, 37, 21, 37, 21, 37]
#     5.24.0: by hand [18, 28, 21, 37, 21, 37, 21, 37], generate [18, 19, 7, 27, 7, 27, 7, 27]
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" "torch==2.13.0" "transformers==5.24.0"
"${pip[@]}" --no-deps --target "$folder/earlier" "transformers==5.23.0"

cat > "$folder/model.py" <<'PYTHON'
import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TinyConfig(PretrainedConfig):
    model_type = "tiny"
    hidden_size: int = 16
    num_hidden_layers: int = 1
    num_attention_heads: int = 1


class Tiny(PreTrainedModel, GenerationMixin):
    """One layer of causal attention without positions, over 50 tokens."""

    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, past_key_values=None, **kwargs):
        hidden = self.embed(input_ids)[:, None]
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, 0)
        scores = query @ key.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:]).triu(1 + key.shape[2] - query.shape[2]).bool()
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return CausalLMOutputWithPast(logits=self.out(mixed[:, 0]), past_key_values=past_key_values)


torch.manual_seed(0)
model = Tiny(TinyConfig()).eval()
for weights in model.parameters():
    nn.init.normal_(weights)
prompt = torch.tensor([[3, 14, 15, 9, 2, 6]])
tokens = prompt
for _ in range(8):
    tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
by_hand = tokens[0, 6:].tolist()
written = model.generate(
    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=49
)[0, 6:].tolist()
print(f"{transformers.__version__}: by hand {by_hand}, generate {written}")
print("same" if by_hand == written else "different")
PYTHON

earlier=$(PYTHONPATH="$folder/earlier" "$folder/venv/bin/python" -W ignore "$folder/model.py" 2> /dev/null)
later=$("$folder/venv/bin/python" -W ignore "$folder/model.py" 2> /dev/null)
echo "$earlier"
echo "$later"
if [ "$(tail -1 <<< "$earlier")" != same ] || [ "$(tail -1 <<< "$later")" != different ]; then
    echo "changed: the two versions no longer differ"
    exit 1
fi
