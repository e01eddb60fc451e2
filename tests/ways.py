"""Three ways through the code, traced: how many functions and files of the package each passes, and what it imports.

    python tests/ways.py        (with PYTHONPATH naming another checkout: that one)

The ways: a training record from its file to the loss (`train ras`, one step of a tiny model), a question (`ask` with
RAS and a stub server), and a teacher's calls (`build subq` of one question and a stub server). A process of its own
runs each program. Counted are distinct code objects in the package's files that begin to run, with lambdas and
comprehensions, without modules and bodies of classes. Start-up is all before the user's data file is opened for the
first time; the work is all after that, of training until the loss goes backward. A function may be in both.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

QUESTION, TEXT, FACT = "Where was Ada born?", "Ada was born in London.", ["Ada", "born in", "London"]
REPLY = {"documents": [1], "answerable": True, "question": QUESTION, "triples": [FACT]}
ROWS = {
    "train-00000.jsonl": {"id": "1", "question_id": "q", "task": "answering", "question": QUESTION,
                          "steps": [{"query": QUESTION, "triples": [FACT]}], "action": "[SUFFICIENT]",
                          "answers": ["London"]},
    "corpus.jsonl": {"title": "Ada", "text": TEXT},
    "triples.jsonl": {"title": "Ada", "text": TEXT, "triples": [FACT]},
    "questions.jsonl": {"_id": "q", "question": QUESTION, "answer": "London", "type": "bridge",
                        "supporting_facts": [["Ada", 0]], "context": [["Ada", [TEXT]], ["Oslo", ["A city."]]]},
}  # fmt: skip


class Stub(BaseHTTPRequestHandler):
    """Answers as OpenAI's server does: a plan that searches, one that stops and an answer, or a teacher's JSON."""

    plans: ClassVar = ["[SUBQ] Where is London?", "[SUFFICIENT]"]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        text = self.plans.pop(0) if self.plans and "[SUBQ]" in body else json.dumps(REPLY)
        message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        data = json.dumps({"object": "chat.completion", "choices": [message], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def prepare(folder: Path) -> None:
    """Write the tiny models and the files of the three ways."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoModelForCausalLM, BertConfig, BertModel

    from tests.conftest import _config, _tokenizer

    torch.manual_seed(0)
    tokenizer, base, bert = _tokenizer(), folder / "base", folder / "bert"
    AutoModelForCausalLM.from_config(_config("llama", len(tokenizer))).save_pretrained(base)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(tokenizer), **small)).save_pretrained(bert)
    for place in (base, bert):
        tokenizer.save_pretrained(place)
    SentenceTransformer(modules=[Transformer(str(bert)), Pooling(16, "mean")]).save(str(folder / "encoder"))
    for name, row in ROWS.items():
        path = folder / ("records" if name.startswith("train") else "") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(row) + "\n")
    config = {"output_dir": f"{folder}/run", "data": {"train": f"{folder}/records"}}
    config["model"] = {"base": str(base), "encoder": f"{folder}/encoder", "dtype": "float32"}
    config["train"] = {"max_steps": 1, "save_steps": 1, "bf16": "false", "eval_steps": None, "batch_size": 1}
    (folder / "train.yaml").write_text(json.dumps(config))


def trace(data: str, words: list[str]) -> dict[str, list[Any]]:
    """Run a program here; its functions before and after the first opening of a data file, and the modules imported."""
    package = str(Path(os.environ["PYTHONPATH"]).resolve())
    found: list[set[tuple[str, str, int]]] = [set(), set(), set()]
    imported: list[list[str]] = []
    seen: set[tuple[int, Any]] = set()
    part = 0

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal part
        code = frame.f_code
        if event != "call" or (part, code) in seen:
            return
        seen.add((part, code))
        if code.co_qualname == "Tensor.backward":
            part = 2
        name = code.co_filename if code.co_filename.startswith("<") else os.path.realpath(code.co_filename)
        if name.startswith(package) and code.co_flags & inspect.CO_OPTIMIZED:
            found[part].add((name.removeprefix(package + "/"), code.co_qualname, code.co_firstlineno))

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal part
        if event == "open" and not part and str(arguments[0]) == data:
            part = 1
            imported.append(modules())

    def modules() -> list[str]:
        return sorted(name for name in sys.modules if name.startswith("tripletune"))

    sys.addaudithook(opened)
    threading.setprofile(called)
    sys.setprofile(called)
    sys.argv = ["tripletune", *words]
    try:
        runpy.run_module("tripletune", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        sys.setprofile(None)
    return {"functions": [sorted(part) for part in found[:2]], "modules": [imported[0], modules()]}


def main() -> None:
    """Trace each way in a process of its own and print the figures."""
    package = os.environ.get("PYTHONPATH") or str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": package, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as place:
        prepare(folder := Path(place))
        teacher = f"--teacher openai --teacher-model m --teacher-url http://127.0.0.1:{server.server_port}/v1"
        found = f"--corpus {folder}/corpus.jsonl --triples {folder}/triples.jsonl --index {folder}/index"
        for title, data, words in (
            ("a record: train ras", "records/train-00000.jsonl", f"train ras --config {folder}/train.yaml"),
            ("a question: ask", "corpus.jsonl", f"ask {QUESTION.replace(' ', '_')} --system ras {teacher} {found}"),
            ("a teacher's calls: build subq", "questions.jsonl",
             f"build subq --source hotpotqa:{folder}/questions.jsonl {teacher} --teacher-ledger {folder}/l.sqlite "
             f"--output {folder}/out"),
        ):  # fmt: skip
            command = [sys.executable, __file__, f"{folder}/{data}", *words.split()]
            ran = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, check=False)
            if ran.returncode:
                sys.exit(ran.stderr)
            traced = json.loads(ran.stdout.splitlines()[-1])
            print(f"{title}: {len(traced['modules'][1])} modules imported, at start-up {len(traced['modules'][0])}:")
            print(f"  {' '.join(name.removeprefix('tripletune.') for name in traced['modules'][0])}")
            both = traced["functions"][0] + traced["functions"][1]
            for part, rows in zip(("all", "start-up", "the work"), (both, *traced["functions"])):
                files = {name for name, *_ in rows}
                rooms = sorted({name.split("/")[0] for name in files})
                count = len({tuple(row) for row in rows})
                print(f"  {part:9} {count:4} functions, {len(files):3} files of {', '.join(rooms)}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(trace(sys.argv[1], sys.argv[2:])))
    else:
        main()
