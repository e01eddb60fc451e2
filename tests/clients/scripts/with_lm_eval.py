"""lm-eval's local-chat-completions, with a task of one question."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import QUESTION, URL, check, finish, show

show("lm_eval")
home = Path.cwd() / "lm-eval-task"
home.mkdir(exist_ok=True)
(home / "data.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "Velsund"}) + "\n")
(home / "task.yaml").write_text(f"""
task: glass
dataset_path: json
dataset_kwargs: {{data_files: {{test: {home}/data.jsonl}}}}
test_split: test
output_type: OUTPUT
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
""")
TASK = (home / "task.yaml").read_text()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def scores(kind, route, output):
    (home / "task.yaml").write_text(TASK.replace("OUTPUT", output))
    arguments = f"model=ras,base_url={URL}/{route},num_concurrent=1,max_retries=1,tokenizer_backend=None"
    words = ["--model", kind, "--model_args", arguments, "--tasks", "glass", "--include_path", str(home)]
    command = [sys.executable, "-m", "lm_eval", *words, "--apply_chat_template", "--output_path", str(home / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    newest = max((home / "out").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())["results"]["glass"]["exact_match,none"]


METRICS = "generate_until\nmetric_list: [{metric: exact_match, ignore_case: true, ignore_punctuation: true}]"
check("local-chat-completions", lambda: scores("local-chat-completions", "chat/completions", METRICS), 1.0)
finish()
