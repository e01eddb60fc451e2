import asyncio
import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tests.cli import sql
from tripletune.models.graph_llm import LocalGenerator
from tripletune.models.graph_llm.prompt_embeds import PromptEmbedsGenerator

pytest.importorskip("openai")


@pytest.fixture
def server():
    """A vLLM server of a language model: it decodes the tensors and goes on from them."""
    seen: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            vectors = torch.load(io.BytesIO(base64.b64decode(body["prompt_embeds"])), weights_only=True)
            seen.append((self.path, body, vectors))
            model, tokenizer = seen[0]
            reply = model.generate(
                inputs_embeds=vectors[None], attention_mask=torch.ones(1, len(vectors)), do_sample=False,
                max_new_tokens=body["max_tokens"], eos_token_id=body["stop_token_ids"], pad_token_id=3,
            )[0]  # fmt: skip
            text = tokenizer.decode(reply, skip_special_tokens=True)
            usage = {"prompt_tokens": len(vectors), "completion_tokens": len(reply)}
            data = json.dumps({"choices": [{"text": text, "finish_reason": "length"}], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}/v1", seen
    found.shutdown()


@pytest.mark.parametrize("use_graph", [True, False])
def test_the_server_reads_what_the_model_reads(use_graph, server, make_graph_llm, embeddings, records, tmp_path):
    url, seen = server
    model, processor = make_graph_llm(use_graph=use_graph)
    seen.append((model.language_model, processor.tokenizer))
    local = LocalGenerator(model, processor, embeddings=embeddings)
    inputs = [record.input for record in records[:4]]
    expected = [one.text for one in local.generate_many(inputs, 8)]

    async def ask():
        there = PromptEmbedsGenerator(local, f"served@{url}", tmp_path / "ledger.sqlite")
        replies = await asyncio.gather(*(there.generate(one, 8) for one in inputs))
        await there.close()
        return replies

    replies = asyncio.run(ask())
    assert [one.text for one in replies] == expected
    for path, body, _ in seen[1:]:
        assert (path, body["model"], body["prompt"], body["max_tokens"]) == ("/v1/completions", "served", "", 8)
        assert body["temperature"] == 0
        assert "messages" not in body
    assert [one.prompt_tokens for one in replies] == [len(processor.encode_input(one).input_ids) for one in inputs]
    asyncio.run(ask())
    assert len(seen) == 5, "the second time the ledger answers"
    assert sql(tmp_path / "ledger.sqlite", "select distinct model from calls") == [("the Graph-LLM in served",)]


@pytest.mark.parametrize("where", ["http://127.0.0.1:8000/v1", "served@127.0.0.1", "served"])
def test_a_server_is_named_with_its_model(where):
    with pytest.raises(ValueError, match="write NAME@URL"):
        PromptEmbedsGenerator(None, where)  # type: ignore[arg-type]
