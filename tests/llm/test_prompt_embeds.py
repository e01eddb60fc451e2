import asyncio
import base64
import io
import json

import pytest
import torch

from tests.cli import sql
from tests.llm.server import MockServer, Reply
from tripletune.llm.graph_generator import LocalGenerator
from tripletune.llm.prompt_embeds import PromptEmbedsGenerator

pytest.importorskip("aiohttp")


def goes_on(model, tokenizer):
    """How a vLLM server of a language model replies: it decodes the tensor and goes on from it."""

    def reply(body):
        vectors = torch.load(io.BytesIO(base64.b64decode(body["prompt_embeds"])), weights_only=True)
        found = model.generate(
            inputs_embeds=vectors[None], attention_mask=torch.ones(1, len(vectors)), do_sample=False,
            max_new_tokens=body["max_tokens"], eos_token_id=body["stop_token_ids"], pad_token_id=3,
        )[0]  # fmt: skip
        choice = {"text": tokenizer.decode(found, skip_special_tokens=True), "finish_reason": "length"}
        usage = {"prompt_tokens": len(vectors), "completion_tokens": len(found)}
        return Reply(raw=json.dumps({"choices": [choice], "usage": usage}))

    return reply


@pytest.mark.parametrize("use_graph", [True, False])
def test_the_server_reads_what_the_model_reads(use_graph, make_graph_llm, embeddings, records, tmp_path):
    model, processor = make_graph_llm(use_graph=use_graph)
    local = LocalGenerator(model, processor, embeddings=embeddings)
    inputs = [record.input for record in records[:4]]
    expected = [one.text for one in local.generate_many(inputs, 8)]

    async def ask(url):
        there = PromptEmbedsGenerator(local, f"served@{url}", tmp_path / "ledger.sqlite")
        replies = await asyncio.gather(*(there.generate(one, 8) for one in inputs))
        await there.close()
        return replies

    with MockServer(goes_on(model.language_model, processor.tokenizer)) as server:
        replies = asyncio.run(ask(server.url))
        asyncio.run(ask(server.url))
    assert [one.text for one in replies] == expected
    assert len(server.bodies) == 4, "the second time the ledger answers"
    for body in server.bodies:
        assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == ("served", "", 8, 0)
        assert "messages" not in body
    assert [one.prompt_tokens for one in replies] == [len(processor.encode_input(one).input_ids) for one in inputs]
    assert sql(tmp_path / "ledger.sqlite", "select distinct model from calls") == [("the Graph-LLM in served",)]


@pytest.mark.parametrize("where", ["http://127.0.0.1:8000/v1", "served@127.0.0.1", "served"])
def test_a_server_is_named_with_its_model(where):
    with pytest.raises(ValueError, match="write NAME@URL"):
        PromptEmbedsGenerator(None, where)  # type: ignore[arg-type]
