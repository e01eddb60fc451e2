#!/usr/bin/env bash
# torch_geometric.llm.models.LLM without `sys_prompt`, as GRetriever's documented example uses it, ends every label with
# the characters "[/s]" instead of the tokenizer's end-of-sequence token, with any model: `generate` stops only at that
# token, which was never learned, so a trained model writes "[/s]" and goes on to its limit of tokens. With and without
# `sys_prompt`, labels longer than 128 tokens are cut without a warning. Expected: labels that end with eos_token.
#
# Seen on 30 November 2026 with Python 3.11.7, torch 2.13.0, transformers 5.24.0 on Linux x86_64:
#     torch_geometric 2.8.1
#     learned 'Frank Herbert[/s]', eos_token '</s>' among its tokens: False
#     with sys_prompt: learned 'Frank Herbert</s>', among its tokens: True
#     300 tokens of label: 132 learned, with sys_prompt 129
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    "torch==2.13.0" "transformers==5.24.0" "torch_geometric==2.8.1"

cat > "$folder/labels.py" <<'PYTHON'
import sys

import torch
import torch_geometric
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch_geometric.llm.models import LLM
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = sys.argv[1]
# A tokenizer of bytes with the control tokens of LLaMA, and a tiny model with random weights.
tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
bytes_of_text = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
bytes_of_text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes_of_text.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bytes_of_text, bos_token="<s>", eos_token="</s>", pad_token="</s>"
)
tokenizer.chat_template = "{{ bos_token }}{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}\n{% endfor %}"
tokenizer.save_pretrained(folder)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **sizes)).save_pretrained(folder)


def learned(llm, answer):
    """The tokens of a label that have a loss."""
    labels = llm._get_embeds(["Who wrote Dune?"], answer=[answer])[2][0]
    return labels[labels >= 0].tolist()


plain = LLM(folder, num_params=1, dtype=torch.float32)
prompted = LLM(folder, num_params=1, dtype=torch.float32, sys_prompt="Answer briefly.")
answer = "Frank Herbert"
without, with_prompt = learned(plain, answer), learned(prompted, answer)
end = tokenizer.eos_token_id
print(f"torch_geometric {torch_geometric.__version__}")
print(f"learned {tokenizer.decode(without)!r}, eos_token {tokenizer.eos_token!r} among its tokens: {end in without}")
print(f"with sys_prompt: learned {tokenizer.decode(with_prompt)!r}, among its tokens: {end in with_prompt}")
long, long_with_prompt = len(learned(plain, "x" * 300)), len(learned(prompted, "x" * 300))
print(f"300 tokens of label: {long} learned, with sys_prompt {long_with_prompt}")
print("no end" if end not in without and end in with_prompt and long == 132 else "an end")
PYTHON

seen=$("$folder/venv/bin/python" -W ignore "$folder/labels.py" "$folder/model" 2> /dev/null)
grep -v "^Setting up" <<< "$seen"
if [ "$(tail -1 <<< "$seen")" != "no end" ]; then
    echo "changed: labels end with the tokenizer's token"
    exit 1
fi
