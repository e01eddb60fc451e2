#!/usr/bin/env bash
# torch_geometric.llm.models.LLMJudge asks a model for a rating of 0, 2 or 4 and takes the largest digit of its reply: of
# "0/4", "0 out of 4" or "Rating: 0 (no match), not 4" it makes 1.0, a right answer. It asks twice and says that a reply
# without a rating is discarded; that holds for the second only: if the first has none, the whole score is nan, which its
# users are told to skip. Expected: 0 for "0/4", and the other rating if one has none.
#
# Seen on 30 November 2026 with Python 3.11.7 and torch 2.13.0 on Linux x86_64, torch_geometric 2.8.1:
#     "0", "0": 0.0    "0/4", "0/4": 1.0    "2 out of 4", "2 out of 4": 1.0
#     "4", "none": 1.0    "none", "4": nan
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "torch_geometric==2.8.1"

cat > "$folder/judge.py" <<'PYTHON'
from math import isnan

from torch_geometric.llm.models import LLMJudge, llm_judge


def score(first, second):
    """The score of an answer if a model replies so to the two prompts, however often it is asked."""
    llm_judge.call_NIM = lambda prompt, *_, **__: first if prompt.startswith("Instruction") else second
    found = LLMJudge(NVIDIA_API_KEY="none").score("Who wrote Dune?", "Isaac Asimov", "Frank Herbert")
    print(f'"{first}", "{second}": {found}')
    return found


wrong = [score("0", "0"), score("0/4", "0/4"), score("2 out of 4", "2 out of 4")]
one_failed = [score("4", "none"), score("none", "4")]
print("scale" if wrong == [0.0, 1.0, 1.0] and one_failed[0] == 1.0 and isnan(one_failed[1]) else "rating")
PYTHON

seen=$("$folder/venv/bin/python" -W ignore "$folder/judge.py" 2> /dev/null)
echo "$seen"
if [ "$(tail -1 <<< "$seen")" != scale ]; then
    echo "changed: the rating is read, and a failed one discarded"
    exit 1
fi
