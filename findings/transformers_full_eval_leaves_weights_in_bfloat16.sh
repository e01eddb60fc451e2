#!/usr/bin/env bash
# transformers 5.23.0: `bf16_full_eval` is an option of evaluations alone. But an evaluation after training casts the
# trained model itself and does not cast it back: what is saved afterwards is in bfloat16, and the rounding is permanent.
# No message says so. Evaluations during training leave the weights alone. Expected: weights as before the evaluation.
#
# Seen on 29 November 2026 with Python 3.11, torch 2.13.0 and accelerate 1.15.0 on Linux x86_64 (no GPU):
#     after training torch.float32, after an evaluation torch.bfloat16, weights equal: False
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

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
arguments = TrainingArguments(sys.argv[1], max_steps=2, report_to=[], use_cpu=True, bf16_full_eval=True, save_strategy="no")
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
before = model.lm_head.weight.detach().clone()
trainer.evaluate()
after = model.lm_head.weight.detach()
same = torch.equal(before, after.float())
print(f"after training {before.dtype}, after an evaluation {after.dtype}, weights equal: {same}")
assert before.dtype == torch.float32
assert after.dtype == torch.bfloat16 and not same, "the weights are as before the evaluation now"
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder/out"
