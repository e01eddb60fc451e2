"""Write an output folder of GraphRAG, whose model is a server in this process: `python graphrag.py FOLDER`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]  # this file has the package's name
from facts import TEXTS, names_in, triples_in  # noqa: E402

WORKFLOWS = (
    "load_input_documents, create_base_text_units, create_final_documents, extract_graph, finalize_graph, "
    "create_final_text_units"
)


def reply(prompt):
    """The scripted model; anything but an extraction is answered with N."""
    triples = triples_in(prompt[prompt.rfind("Text:") :])
    if not triples:
        return "N"
    rows = [f'("entity"<|>{name.upper()}<|>thing<|>{name} is named.)' for name in names_in(triples)]
    for subject, predicate, object_ in triples:
        ends = f"{subject.upper()}<|>{object_.upper()}"
        rows.append(f'("relationship"<|>{ends}<|>{subject} {predicate} {object_}.<|>5)')
    return "\n##\n".join(rows) + "\n<|COMPLETE|>"


class Server(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        """Print nothing of each request."""
        pass

    def do_POST(self):
        """Answer a chat completion with the scripted model's reply."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": reply(str(request["messages"][-1]["content"]))}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": request["model"]}
        body = json.dumps(answer | {"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(folder):
    """Set up a project with `graphrag init`, point it to the server, and index the texts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / "input").mkdir(parents=True)
    for number, text in enumerate(TEXTS.values()):
        (folder / "input" / f"{number}.txt").write_text(text, encoding="utf-8")
    program = str(Path(sys.executable).with_name("graphrag"))
    models = ["-m", "gpt-4o-mini", "-e", "text-embedding-3-large"]
    subprocess.run([program, "init", "--root", str(folder), *models], check=True)
    settings = (folder / "settings.yaml").read_text(encoding="utf-8").replace("o200k_base", "cl100k_base")
    base = f"\\g<0>\n    api_base: http://127.0.0.1:{server.server_port}/v1"
    settings = re.sub(r"api_key: \$\{GRAPHRAG_API_KEY\}.*", base, settings)
    (folder / "settings.yaml").write_text(f"{settings}\nworkflows: [{WORKFLOWS}]\n", encoding="utf-8")
    # The tokenizer's file, which lies in litellm, instead of a download.
    litellm = Path(importlib.util.find_spec("litellm").origin).parent
    tokens = litellm / "litellm_core_utils" / "tokenizers"
    environment = os.environ | {"GRAPHRAG_API_KEY": "x", "TIKTOKEN_CACHE_DIR": str(tokens)}
    subprocess.run([program, "index", "--root", str(folder), "--skip-validation"], check=True, env=environment)


main(Path(sys.argv[1]))
