"""The command `llm`, with a model in extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import QUESTION, URL, check, finish, refused, show

show("llm")
SCHEMA = json.dumps({"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]})
home = Path.cwd() / "llm-home"
home.mkdir(exist_ok=True)
os.environ["LLM_USER_PATH"] = str(home)
MODEL = {"model_id": "ras", "model_name": "ras", "api_base": URL, "api_key_name": "tripletune"}
# JSON is YAML.
(home / "extra-openai-models.yaml").write_text(json.dumps([MODEL, {**MODEL, "model_id": "s", "supports_schema": True}]))


def llm(*words):
    done = subprocess.run([sys.executable, "-m", "llm", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip()


llm("keys", "set", "tripletune", "--value", "none")
check("prompt", lambda: llm("-m", "ras", QUESTION), "Velsund")
check("no stream", lambda: llm("-m", "ras", "--no-stream", QUESTION), "Velsund")
check("continue", lambda: llm("-m", "ras", "-c", QUESTION), "Velsund")
check("schema", lambda: json.loads(llm("-m", "s", "--schema", SCHEMA, QUESTION)), {"town": "Velsund"})
refused("schema without supports_schema", lambda: llm("-m", "ras", "--schema", SCHEMA, QUESTION), "does not support")
finish()
