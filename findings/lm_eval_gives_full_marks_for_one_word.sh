#!/usr/bin/env bash
# lm-eval 0.4.13: if `doc_to_target` gives a list of right answers, any score above 0 of a metric of one's own (such as
# the F1 of SQuAD) counts as 1.0, also for one shared word; with the same answer as a text the score is kept. And if
# exact_match comes before it in `metric_list`, the metric gets a list of equal predictions in place of the text, so its
# score depends on the order of the list. No warning says so; a comment in the source has a doubt. Expected: the best
# score over the answers, in any order.
#
# Seen on 1 December 2026 with Python 3.11 on Linux x86_64; the prediction is "the river of Oslo":
#     answer "the town Velsund":               F1 0.286
#     answers ["the town Velsund", "Velsund"]: F1 1.000
#     after exact_match it is called with [['the river of Oslo', 'the river of Oslo']]
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "lm_eval==0.4.13" "datasets==5.2.0" "evaluate==0.4.6"

cat > "$folder/score.py" <<'PYTHON'
import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": sys.argv[1]}
import lm_eval
from lm_eval.api.model import LM

ROW = {"question": "Where?", "answer": "the town Velsund", "answers": ["the town Velsund", "Velsund"]}
PREDICTION = "the river of Oslo"
called_with = []


def f1(references, predictions):
    called_with.append(predictions)
    right, said = references[0].split(), str(predictions[0]).split()
    return 2 * len(set(right) & set(said)) / (len(right) + len(said))


class Fixed(LM):
    def generate_until(self, requests, **options):
        return [PREDICTION for _ in requests]

    def loglikelihood(self, requests, **options):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def metric(function):
    return {"metric": function, "aggregation": "mean", "higher_is_better": True}


def score(target, *metrics):
    task = {
        "task": "places",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{sys.argv[1]}/rows.jsonl"}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": target,
        "metric_list": [metric(function) for function in metrics],
    }
    return lm_eval.simple_evaluate(Fixed(), tasks=[task], bootstrap_iters=0)["results"]["places"]["f1,none"]


with open(f"{sys.argv[1]}/rows.jsonl", "w", encoding="utf-8") as file:
    file.write(json.dumps(ROW) + "\n")
one = score("answer", f1)
several = score("answers", f1)
called_with.clear()
score("answers", "exact_match", f1)
print(f'answer "the town Velsund":               F1 {one:.3f}')
print(f'answers ["the town Velsund", "Velsund"]: F1 {several:.3f}')
print(f"after exact_match it is called with {called_with[0]}")
changed = one >= 0.5 or several != 1 or called_with[0] == [PREDICTION]
print("changed" if changed else "kept")
PYTHON

seen=$("$folder/venv/bin/python" -W ignore "$folder/score.py" "$folder" 2> /dev/null)
echo "$seen" | tail -4 | head -3
if [ "$(tail -1 <<< "$seen")" != kept ]; then
    echo "changed: scores of several answers are kept"
    exit 1
fi
