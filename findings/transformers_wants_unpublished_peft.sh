#!/usr/bin/env bash
# `model.add_adapter(LoraConfig(…))` of transformers 5.24.0 raises a ValueError with every PEFT on PyPI: it wants
# peft>=0.22.0, and the newest published version was 0.21.2 when 5.24.0 was. pip reports no conflict, since
# transformers does not depend on PEFT. With 5.23.0 the call works, and PEFT's own get_peft_model works with both.
# Expected: the adapter is added.
#
# Seen on 28 November 2026 with Python 3.11.7, torch 2.13.0 and peft 0.21.2 on Linux x86_64:
#     5.23.0: the adapter was added
#     5.24.0: ValueError: The version of PEFT you are using is not compatible, please use a version >= 0.22.0
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" "torch==2.13.0" "transformers==5.24.0" "peft==0.21.2"
"${pip[@]}" --no-deps --target "$folder/earlier" "transformers==5.23.0"

cat > "$folder/adapter.py" <<'PYTHON'
import transformers
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
try:
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    print(f"{transformers.__version__}: the adapter was added")
except (ImportError, ValueError) as error:
    print(f"{transformers.__version__}: {type(error).__name__}: {' '.join(str(error).split())}")
PYTHON

earlier=$(PYTHONPATH="$folder/earlier" "$folder/venv/bin/python" -W ignore "$folder/adapter.py" 2> /dev/null)
later=$("$folder/venv/bin/python" -W ignore "$folder/adapter.py" 2> /dev/null)
echo "$earlier"
echo "$later"
if [[ $earlier != *"was added" || $later != *"0.22.0"* ]]; then
    echo "changed: both versions add the adapter, or neither does"
    exit 1
fi
