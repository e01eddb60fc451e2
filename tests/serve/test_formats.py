"""Fields that change the form of a reply: what `serve` does, and what it says that it can't."""

import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.serve.conftest import QUESTION, answer
from tripletune.serve.schemas import misfit, read_schema

USER = {"role": "user", "content": QUESTION}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


class Born(BaseModel):
    town: str
    author: str | None


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def post(url, path="/v1/chat/completions", **fields):
    body = {"model": "ras", **fields}
    if "prompt" not in body:
        body = {"messages": [USER], **body}
    return httpx.post(url + path, content=json.dumps(body), timeout=30)


REFUSED = [
    ("response_format", {"type": "json_object"}, "json_object does not say which fields"),
    ("response_format", {"type": "grammar"}, "only"),
    ("response_format", response_format({"type": "object"}), "names no properties"),
    ("tool_choice", "required", "only auto and none"),
    ("tool_choice", {"type": "function", "function": {"name": "look_up"}}, "only auto and none"),
    ("function_call", {"name": "look_up"}, "only auto and none"),
    ("functions", [TOOL["function"]], "no function is ever called"),
    ("logprobs", True, "log-probabilities"),
    ("logprobs", 0, "log-probabilities"),
    ("top_logprobs", 2, "log-probabilities"),
    ("logit_bias", {"50256": -100}, "tokens can't be made likelier"),
    ("modalities", ["text", "audio"], "only text"),
    ("audio", {"voice": "alloy", "format": "mp3"}, "only text"),
    ("suffix", " end", "suffix"),
    ("echo", True, "not repeated"),
    # vLLM's and llama.cpp's own
    ("guided_json", {"type": "object"}, "only response_format with json_schema"),
    ("guided_choice", ["yes", "no"], "only response_format with json_schema"),
    ("guided_regex", "yes|no", "only response_format with json_schema"),
    ("structured_outputs", {"choice": ["yes"]}, "only response_format with json_schema"),
    ("grammar", 'root ::= "yes"', "only response_format with json_schema"),
    ("json_schema", {"type": "object"}, "only response_format with json_schema"),
    ("prompt_logprobs", 1, "log-probabilities"),
    ("n_probs", 3, "log-probabilities"),
]


def test_what_can_not_be_kept_is_refused_by_name(running, model):
    with running() as url:
        for field, value, words in REFUSED:
            for more in ({}, {"path": "/v1/completions", "prompt": QUESTION}):
                found = post(url, **{field: value}, **more)
                error = found.json()["error"]
                assert (found.status_code, error["param"]) == (400, field), (field, value)
                assert words in error["message"]
        assert not model.asked, "nothing is paid for a refused request"
        harmless = {
            "tools": [TOOL], "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False,
            "echo": None, "modalities": ["text"], "logit_bias": {}, "functions": [], "suffix": "", "user": "u",
            "store": True, "n_probs": 0, "guided_json": None,
        }  # fmt: skip
        assert post(url, **harmless).json()["choices"][0]["message"]["content"] == "Velsund"


def test_results_of_tools_are_ignored_turns_of_a_loop(running, model):
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "A novel."}]},
        {"role": "function", "name": "look_up", "content": "A novel."},
        {"role": "assistant", "content": "It is a novel."},
    ]
    with running() as url:
        found = post(url, messages=[*history, USER]).json()
        assert found["choices"][0]["message"]["content"] == "Velsund"
        assert found["tripletune"]["ignored_turns"] == 5
        part = post(url, messages=[*history, USER], model="planner")
        assert (part.status_code, part.json()["error"]["param"]) == (400, "messages")
        last = post(url, messages=[USER, *history[1:3]])
        assert (last.status_code, "last message must have the role user" in last.text) == (400, True)


@pytest.mark.parametrize("enforces", [False, True])
def test_a_loops_answer_is_put_into_the_schema(running, model, enforces):
    replies = ['{"town": 3}', '```json\n{"town": "Velsund", "author": "Ida Morn"}\n```']
    model.enforces_schemas = enforces
    model.answer = lambda asked: replies.pop(0) if asked.role.startswith("serve.schema") else answer(asked)
    with running() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        found = client.chat.completions.parse(model="ras", messages=[USER], response_format=Born)
        assert found.choices[0].message.parsed == Born(town="Velsund", author="Ida Morn")
        assert found.tripletune["answer"] == "Velsund"
        plain = len(model.asked) - 2
        assert [asked.role for asked in model.asked[plain:]] == ["serve.schema", "serve.schema.repair"]
        assert found.usage.prompt_tokens == 10 * len(model.asked), "both calls are counted"
        asked = model.asked[plain]
        assert (asked.sampling.schema is not None) == enforces
        for part in ('"town"', "Answer: Velsund", "Glass Harbour | author | Ida Morn", "Born in Velsund.", QUESTION):
            assert part in asked.text
        assert "$: 'author' is a required property" in model.asked[-1].text

        replies[:] = ['{"town": "Velsund", "author": null}']
        stream = {"stream": True, "response_format": response_format(Born.model_json_schema())}
        chunks = [json.loads(line[6:]) for line in post(url, **stream).text.split("\n\n") if line.startswith("data: {")]
        said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert [text for text in said if text] == ['{"town": "Velsund", "author": null}']

        replies[:] = ["I can't.", "No."]
        failed = post(url, response_format=response_format(Born.model_json_schema()))
        assert (failed.status_code, failed.json()["error"]["param"]) == (502, "response_format")


def test_a_part_passes_the_schema_on_or_refuses_it(running, model):
    fields = {"model": "planner", "response_format": response_format(Born.model_json_schema())}
    with running() as url:
        found = post(url, **fields)
        assert (found.status_code, found.json()["error"]["param"]) == (400, "response_format")
        model.enforces_schemas = True
        model.answer = lambda asked: '{"town": "Velsund", "author": null}'
        assert post(url, **fields).json()["choices"][0]["message"]["content"] == model.answer(None)
        assert json.loads(model.asked[-1].sampling.schema) == Born.model_json_schema()
        model.answer = lambda asked: "Velsund"
        assert post(url, **fields).status_code == 502, "a server that takes the schema and ignores it"


def test_the_passages_of_the_answer_are_annotations(running, model):
    with running() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        found = client.chat.completions.create(model="ras", messages=[USER])
        stream = list(client.chat.completions.create(model="ras", messages=[USER], stream=True))
        part = client.chat.completions.create(model="planner", messages=[USER])
    # As clients read it that check every field.
    message = type(found).model_validate(found.model_dump()).choices[0].message
    cited = {note.url_citation.title: note.url_citation for note in message.annotations}
    assert set(cited) == {"Glass Harbour", "Ida Morn"}
    ids = {passage["title"]: passage["id"] for passage in found.tripletune["passages"]}
    for title, citation in cited.items():
        assert citation.url == f"urn:passage:{ids[title]}"
        assert (citation.start_index, citation.end_index) == (0, len("Velsund"))
    in_stream = [chunk.choices[0].delta.model_extra.get("annotations") for chunk in stream if chunk.choices]
    assert [len(notes) for notes in in_stream if notes] == [2]
    assert part.choices[0].message.annotations is None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "year": {"type": ["integer", "null"]}, "kind": {"enum": ["town", "river"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "size": {"anyOf": [{"type": "number"}, {"const": "unknown"}]},
    },
    "required": ["name"], "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"name": "Kelm"}, ""),
        ({"name": "Kelm", "year": 1870, "kind": "town", "places": [{"name": "x", "more": 1}], "size": 2.5}, ""),
        ({"name": "Kelm", "year": None, "places": [], "size": "unknown"}, ""),
        ({}, "$: 'name' is a required property"),
        ({"name": 7}, "$.name: 7 is not of type 'string'"),
        ({"name": "Kelm", "year": True}, "$.year: True is not of type"),
        ({"name": "Kelm", "year": 1.5}, "$.year: 1.5 is not of type"),
        ({"name": "Kelm", "kind": "sea"}, "$.kind: 'sea' is not one of"),
        ({"name": "Kelm", "places": [{"name": "x"}, {}]}, "$.places[1]: 'name' is a required property"),
        ({"name": "Kelm", "size": "big"}, "$.size: "),
        ({"name": "Kelm", "more": 1}, "$: Additional properties are not allowed"),
    ],
)
def test_where_an_object_does_not_fit(value, fault):
    found = misfit(value, SCHEMA)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)
    assert read_schema(response_format(SCHEMA)) == SCHEMA
