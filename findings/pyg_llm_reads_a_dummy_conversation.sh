#!/usr/bin/env bash
# torch_geometric.llm.models.LLM, which GRetriever is built on, puts the graph's tokens behind the beginning-of-sequence
# token. Of a tokenizer without one, such as Qwen's, it renders a conversation "dummy", "convo" with the chat template and
# takes this whole text for the token: every prompt begins with it, and as many characters are cut from the real prompt.
# So the model reads neither the system prompt nor the beginning of the question. No warning says so. Expected: the
# prompt of the chat template.
#
# Seen on 30 November 2026 with Python 3.11.7, torch 2.13.0, transformers 5.24.0 on Linux x86_64:
#     torch_geometric 2.8.1, bos_token_id None
#     meant '<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\nWho wrote Dune?<|im_end|>\n<|im_start|>assistant\n'
#     read  '<|im_start|>system\ndummy<|im_end|>\n<|im_start|>user\nconvo<|im_end|>\n wrote Dune?<|im_end|>\n<|im_start|>assistant\n'
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    "torch==2.13.0" "transformers==5.24.0" "torch_geometric==2.8.1"

cat > "$folder/prompt.py" <<'PYTHON'
import sys

import torch
import torch_geometric
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch_geometric.llm.models import LLM
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = sys.argv[1]
# A tokenizer of bytes with ChatML's two control tokens, like Qwen's, and a tiny model with random weights.
tokens = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
bytes_of_text = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
bytes_of_text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes_of_text.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bytes_of_text,
    eos_token="<|im_end|>",
    pad_token="<|im_end|>",
    additional_special_tokens=["<|im_start|>"],
)
tokenizer.chat_template = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
tokenizer.save_pretrained(folder)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **sizes)).save_pretrained(folder)

llm = LLM(folder, num_params=1, dtype=torch.float32, sys_prompt="Answer briefly.")
embedded = llm._get_embeds(["Who wrote Dune?"])[0][0]
# The token of each embedding is the one whose vector it is.
read = tokenizer.decode(torch.cdist(embedded, llm.word_embedding.weight).argmin(-1))
turns = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Who wrote Dune?"}]
meant = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
print(f"torch_geometric {torch_geometric.__version__}, bos_token_id {tokenizer.bos_token_id}")
print(f"meant {meant!r}")
print(f"read  {read!r}")
print("dummy" if "dummy" in read and "Answer briefly" not in read and "Who" not in read else "whole")
PYTHON

seen=$("$folder/venv/bin/python" -W ignore "$folder/prompt.py" "$folder/model" 2> /dev/null)
grep -v "^Setting up" <<< "$seen"
if [ "$(tail -1 <<< "$seen")" != dummy ]; then
    echo "changed: the model reads the prompt"
    exit 1
fi
