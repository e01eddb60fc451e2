#!/usr/bin/env bash
# transformers 5.23.0: `Trainer` takes every argument of a model's `forward` with "label" in its name for a required
# label. With an optional argument such as `label_weights`, rows with `labels` alone count as rows without labels:
# `evaluate` computes no loss, and its metrics lack `eval_loss` without a message. `label_names=["labels"]` helps.
# Expected: an argument with a default is not required, or a warning that names the labels that rows lack.
#
# Seen on 29 November 2026 with Python 3.11, torch 2.13.0 and accelerate 1.15.0 on Linux x86_64 (no GPU):
#     plain model, default: ['labels'], eval_loss True
#     optional label_weights, default: ['labels', 'label_weights'], eval_loss False
#     optional label_weights, label_names set: ['labels'], eval_loss True
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "transformers==5.23.0" \
    "accelerate==1.15.0"

cat > "$folder/run.py" <<'PYTHON'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Weighted(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, label_weights=None, **others):
        return super().forward(input_ids=input_ids, labels=labels, **others)


def evaluated(name, kind, label_names):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    arguments = TrainingArguments(sys.argv[1], report_to=[], use_cpu=True, label_names=label_names)
    model = kind(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    trainer = Trainer(model, arguments, eval_dataset=rows)
    has_loss = "eval_loss" in trainer.evaluate()
    print(f"{name}: {trainer.label_names}, eval_loss {has_loss}")
    return has_loss


assert evaluated("plain model, default", LlamaForCausalLM, None)
assert not evaluated("optional label_weights, default", Weighted, None), "the loss is computed now"
assert evaluated("optional label_weights, label_names set", Weighted, ["labels"])
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder/out"
