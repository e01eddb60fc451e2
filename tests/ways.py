"""Three ways through the code, traced: how many functions and files of the package each passes, and what it imports.

    python tests/ways.py        (with PYTHONPATH naming another checkout: that one)

The ways: a training record from its file to the loss (`train ras` of a tiny model), a question (`ask` and `eval run`
with RAS and a stub server), and a teacher's calls for a question (`build subq`), each in its own process. Counted are
distinct code objects in the package's files that begin to run, with lambdas and comprehensions, without modules and
bodies of classes. Start-up is all before the user's data file is opened for the first time; the work is all after that
(of training: not what follows a backward pass, until the next batch is read). A function may be in both. Those of one
item are called more often when there are two records, or two questions.
"""

import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FACTS = {name: [name, "born in", "London"] for name in ("Ada", "Bo")}
MODEL = {"dtype": "float32"}
TRAIN = {"save_steps": 9, "bf16": "false", "eval_steps": None, "batch_size": 1, "gradient_accumulation": 1}


def rows_of(name: str, fact: list[str]) -> dict[str, dict[str, Any]]:
    """A row of each file, about one person."""
    question, text = f"Where was {name} born?", f"{name} was born in London."
    return {
        "records": {"id": name, "question_id": name, "task": "answering", "question": question, "answers": ["London"],
                    "steps": [{"query": question, "triples": [fact]}], "action": "[SUFFICIENT]"},
        "corpus": {"title": name, "text": text},
        "triples": {"title": name, "text": text, "triples": [fact]},
        "questions": {"_id": name, "question": question, "answer": "London", "type": "bridge",
                      "supporting_facts": [[name, 0]], "context": [[name, [text]], ["Oslo", ["A city."]]]},
    }  # fmt: skip


class Stub(BaseHTTPRequestHandler):
    """Answers as OpenAI's server does: a plan that searches, one that stops and an answer, or a teacher's JSON."""

    def do_POST(self) -> None:
        """Answer a chat by the words of its prompt."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        name = "Bo" if "Bo was born" in body else "Ada"
        labels = {"documents": [1], "answerable": True, "question": f"Where was {name} born?", "triples": [FACTS[name]]}
        plan = "[SUFFICIENT]" if "Where is London?" in body else "[SUBQ] Where is London?"
        message = {"role": "assistant", "content": plan if "[SUBQ]" in body else json.dumps(labels)}
        reply = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        data = json.dumps({**reply, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing of each request."""
        pass


def prepare(folder: Path) -> None:
    """Write the tiny models and the files of the three ways, for one item and for two."""
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
    rows = [rows_of(name, fact) for name, fact in FACTS.items()]
    for kind in rows[0]:
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row[kind]) + "\n" for row in rows))
    for count in (1, 2):
        (folder / f"{count}").mkdir()
        lines = (json.dumps(row["records"]) + "\n" for row in rows[:count])
        (folder / f"{count}" / "train-00000.jsonl").write_text("".join(lines))
        config = {"output_dir": f"{folder}/run{count}", "data": {"train": f"{folder}/{count}"}}
        config["model"] = {**MODEL, "base": str(base), "encoder": f"{folder}/encoder"}
        config["train"] = {**TRAIN, "max_steps": count}
        (folder / f"{count}.yaml").write_text(json.dumps(config))


def trace(data: str, words: list[str]) -> dict[str, list[Any]]:
    """Run a program here: the calls of functions before and after a data file is opened, and the modules imported."""
    package = f"{Path(os.environ['PYTHONPATH']).resolve()}/"
    # Calls at start-up, in the work, and after a backward pass.
    calls: list[Counter[str]] = [Counter(), Counter(), Counter()]
    names: dict[Any, str] = {}
    imported: list[list[str]] = []
    part = 0

    def name_of(code: Any) -> str:
        name = code.co_filename if code.co_filename.startswith("<") else os.path.realpath(code.co_filename)
        ours = name.startswith(package) and code.co_flags & inspect.CO_OPTIMIZED
        return f"{name.removeprefix(package)}:{code.co_qualname}:{code.co_firstlineno}" if ours else ""

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal part
        if event != "call":
            return
        code = frame.f_code
        if code not in names:
            names[code] = name_of(code)
        if code.co_qualname in ("Tensor.backward", "_MapDatasetFetcher.fetch") and part:
            part = 2 if code.co_qualname == "Tensor.backward" else 1
        if names[code]:
            calls[part][names[code]] += 1

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
    return {"calls": calls[:2], "modules": [imported[0], modules()]}


def is_named(function: str) -> bool:
    """Whether a function has a name, and is no lambda or comprehension."""
    return not function.split(":")[1].endswith(">")


def show(title: str, names: set[str]) -> None:
    """Print how many functions a part of a way passes, and how many of them have a name."""
    files = {name.split(":")[0] for name in names}
    rooms = sorted({file.split("/")[0] for file in files})
    named = sum(map(is_named, names))
    print(f"  {title:9} {len(names):4} functions ({named:3} named), {len(files):3} files of {', '.join(rooms)}")


def main() -> None:
    """Trace each way in a process of its own and print the figures."""
    package = os.environ.get("PYTHONPATH") or str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": package, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def traced(data: str, words: str) -> dict[str, list[Any]]:
        command = [sys.executable, __file__, f"{folder}/{data}", *words.split()]
        ran = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(ran.stderr)
        return dict(json.loads(ran.stdout.splitlines()[-1]))

    with tempfile.TemporaryDirectory() as place:
        prepare(folder := Path(place))
        teacher = f"--teacher openai --teacher-model m --teacher-url http://127.0.0.1:{server.server_port}/v1"
        files = f"--corpus {folder}/corpus.jsonl --triples {folder}/triples.jsonl --index {folder}/index"
        train = f"train ras --config {folder}/%d.yaml"
        run = (f"eval run --system ras --task hotpotqa --data {folder}/questions.jsonl {teacher} {files} "
               f"--output {folder}/out%d --limit %d")  # fmt: skip
        build = (f"build subq --source hotpotqa:{folder}/questions.jsonl {teacher} --output {folder}/subq%d "
                 f"--teacher-ledger {folder}/l%d.sqlite --limit %d")  # fmt: skip
        ask = f"ask Where_was_Ada_born? --system ras {teacher} {files}"
        for title, data, words in (
            ("a record: train ras", "%d/train-00000.jsonl", train), ("a question: ask", "corpus.jsonl", ask),
            ("a question: eval run", "questions.jsonl", run),
            ("a teacher's calls: build subq", "questions.jsonl", build),
        ):  # fmt: skip
            alone = traced(data.replace("%d", "1"), words.replace("%d", "1"))
            in_two = traced(data.replace("%d", "2"), words.replace("%d", "2"))
            first, last = alone["modules"]
            shown = " ".join(name.removeprefix("tripletune.") for name in first)
            print(f"{title}: {len(last)} modules imported, {len(first)} at start-up:\n  {shown}")
            before, work = alone["calls"]
            show("all", {*before, *work})
            show("start-up", set(before))
            show("the work", set(work))
            if "ask" not in title:
                more_often = {name for name, count in in_two["calls"][1].items() if count > work.get(name, 0)}
                show("one item", more_often)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(trace(sys.argv[1], sys.argv[2:])))
    else:
        main()
