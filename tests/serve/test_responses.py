"""The Responses API: whole replies, streams, chats that go on, schemas, and what is refused by name."""

import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.serve.conftest import QUESTION, answer
from tripletune.core.calls import CallError
from tripletune.serve.limits import Refused
from tripletune.serve.protocol import read_request
from tripletune.serve.responses import AskedResponse, Kept

USER = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}


class Born(BaseModel):
    town: str


def sdk(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def post(url, **fields):
    return httpx.post(f"{url}/v1/responses", content=json.dumps({"model": "ras", **fields}), timeout=30)


def test_a_loop_answers_with_its_steps_and_citations(running, model):
    with running() as url:
        found = sdk(url).responses.create(model="ras", input=QUESTION, metadata={"user": "u"})
    assert found.output_text == "Velsund"
    # As clients read it that check every field.
    reasoning, message = type(found).model_validate(found.model_dump(warnings="error")).output
    assert [part.text for part in reasoning.summary][1:4:2] == [
        f"retrieve  {QUESTION}: Glass Harbour\n", "retrieve  Where was Ida Morn born?: Ida Morn\n",
    ]  # fmt: skip
    assert (message.status, found.status, found.metadata) == ("completed", "completed", {"user": "u"})
    assert {note.title for note in message.content[0].annotations} == {"Glass Harbour", "Ida Morn"}
    trace = found.tripletune
    assert (trace["answer"], trace["ignored_turns"]) == ("Velsund", 0)
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (40, 8, 48)


def test_a_stream_has_each_step_then_the_reply_as_if_it_were_whole(running, model):
    with running() as url:
        whole = sdk(url).responses.create(model="ras", input=QUESTION)
        with sdk(url).responses.stream(model="ras", input=QUESTION) as stream:
            events = list(stream)
            last = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events][:3] == [
        "response.created", "response.in_progress", "response.output_item.added",
    ]  # fmt: skip
    steps = [event for event in events if event.type == "response.reasoning_summary_text.delta"]
    assert [event.tripletune["event"] for event in steps] == ["plan", "retrieve", "plan", "retrieve", "plan"]
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert said == ["Velsund"]
    assert events[-1].type == "response.completed"

    def without_ids(response):
        values = response.model_dump(exclude={"id", "created_at", "tripletune"})
        for item in values["output"]:
            del item["id"]
            for part in item["content"] or ():
                part.pop("parsed", None)
        return values

    assert without_ids(last) == without_ids(whole)
    assert last.id == events[0].response.id
    assert last.tripletune["stop_reason"] == "sufficient"


def test_an_error_after_the_first_step_is_an_event(running, model):
    model.answer = lambda asked: CallError("gone") if asked.role == "ras.answer" else answer(asked)
    with running() as url:
        assert post(url, input=QUESTION).status_code == 502
        *_, last = post(url, input=QUESTION, stream=True).text.strip().split("\n\n")
        kind, _, data = last.partition("\ndata: ")
        assert kind == "event: error"
        assert json.loads(data)["code"] == "upstream_error"
        events = list(sdk(url).responses.create(model="ras", input=QUESTION, stream=True))
        assert (events[-1].type, events[-1].code) == ("error", "upstream_error")


def test_a_chat_goes_on_by_the_id_of_a_reply_or_by_its_items(running, model):
    model.answer = lambda asked: f"{len(asked.messages)}: {asked.text}"
    with running() as url:
        client = sdk(url)
        first = client.responses.create(model="planner", input="One?", instructions="Be brief.")
        second = client.responses.create(model="planner", input="Two?", previous_response_id=first.id)
        client.responses.create(
            model="planner", input="Three?", previous_response_id=second.id, instructions="Be rude."
        )
        history = [{"role": "user", "content": "One?"}, *(item.model_dump() for item in first.output)]
        client.responses.create(model="planner", input=[*history, {"role": "user", "content": "Two?"}])
        named = [{"type": "item_reference", "id": first.output[0].id}, {"type": "item_reference", "id": "rs_1"}]
        client.responses.create(model="planner", input=[history[0], *named, {"role": "user", "content": "Two?"}])
        chats = [[turn["content"] for turn in asked.messages] for asked in model.asked]
        assert chats[0] == ["Be brief.", "One?"]
        assert chats[1] == ["One?", "2: One?", "Two?"], "instructions are for one reply"
        assert chats[2] == ["Be rude.", "One?", "2: One?", "Two?", "3: Two?", "Three?"]
        assert chats[3] == chats[4] == chats[1]

        once = client.responses.create(model="planner", input="One?", store=False)
        for fields, param in (
            ({"previous_response_id": once.id, "input": "Two?"}, "previous_response_id"),
            ({"previous_response_id": "msg_1", "input": "Two?"}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}, USER]}, "input"),
        ):
            error = post(url, **fields).json()["error"]
            assert (error["code"], error["param"]) == ("previous_response_not_found", param)


def test_turns_before_the_question_are_ignored_turns_of_a_loop(running, model):
    call = {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "A novel."}
    history = [USER, {"type": "reasoning", "id": "rs_1", "summary": []}, call, result]
    with running() as url:
        found = post(url, input=[*history, USER]).json()
        assert found["output"][-1]["content"][0]["text"] == "Velsund"
        assert found["tripletune"]["ignored_turns"] == 3
        later = post(url, input=QUESTION, previous_response_id=found["id"]).json()
        assert later["tripletune"]["ignored_turns"] == 3
        part = post(url, input=[*history, USER], model="planner")
        assert (part.status_code, part.json()["error"]["param"]) == (400, "input")
        assert post(url, input=history).json()["error"]["message"].startswith("the body: there is no question")


def test_the_oldest_chats_are_forgotten():
    kept = Kept(limit=10)

    def ask(question, previous=None):
        data = json.dumps({"model": "ras", "input": question, "previous_response_id": previous})
        asked = read_request(data.encode(), AskedResponse)
        kept.complete(asked)
        kept.add(asked, "yes")
        return f"resp_{asked.name}"

    first = ask("a")
    second = ask("b")
    third = ask("cc", second)  # with the turns before it nine characters, which leaves no room for the first
    with pytest.raises(Refused, match="there is no 'resp_"):
        ask("d", first)
    with pytest.raises(Refused):
        ask("d", second)
    ask("long text, longer than all")
    with pytest.raises(Refused):
        ask("d", third)


def test_an_answer_is_put_into_the_schema_of_text_format(running, model):
    replies = ['{"town": "Velsund"}']
    model.answer = lambda asked: replies.pop(0) if asked.role.startswith("serve.schema") else answer(asked)
    with running() as url:
        found = sdk(url).responses.parse(model="ras", input=QUESTION, text_format=Born)
        assert found.output_parsed == Born(town="Velsund")
        assert found.tripletune["answer"] == "Velsund"
        replies[:] = ["No.", "No."]
        form = {"type": "json_schema", "name": "x", "schema": Born.model_json_schema()}
        failed = post(url, input=QUESTION, text={"format": form})
        assert (failed.status_code, failed.json()["error"]["param"]) == (502, "text")
        assert post(url, input=QUESTION, text={"format": {"type": "text"}, "verbosity": "low"}).status_code == 200


REFUSED = [
    ("input", 3, "array"),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "no images"),
    ("input", [{"type": "picture"}, USER], "role"),
    ("text", {"format": {"type": "json_object"}}, "json_object does not say which fields"),
    ("text", {"format": {"type": "json_schema", "name": "x"}}, "only"),
    ("text", "json", "an object with a format"),
    ("response_format", {"type": "json_schema"}, "text.format"),
    ("tool_choice", "required", "only auto and none"),
    ("tool_choice", {"type": "web_search"}, "only auto and none"),
    ("top_logprobs", 2, "log-probabilities"),
    ("n", 2, "should be 1"),
    ("background", True, "leave background out"),
    ("conversation", "conv_1", "previous_response_id"),
    ("prompt", {"id": "pmpt_1"}, "templates"),
    ("max_output_tokens", 0, "greater than"),
    ("temperature", 3, "less than"),
    ("modalities", ["text", "audio"], "only text"),
    ("functions", [{"name": "look_up"}], "no function is ever called"),
]


def test_what_can_not_be_kept_is_refused_by_name(running, model):
    with running() as url:
        for field, value, words in REFUSED:
            error = post(url, **{"input": QUESTION, field: value}).json()["error"]
            assert error["param"] == field, (field, value, error)
            assert words in error["message"], error
        assert not model.asked, "nothing is paid for a refused request"
        harmless = {
            "tools": [{"type": "web_search"}], "tool_choice": "auto", "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "auto", "parallel_tool_calls": True,
            "stream_options": {"include_obfuscation": False}, "user": "u", "service_tier": "auto", "max_tool_calls": 3,
        }  # fmt: skip
        assert post(url, input=QUESTION, **harmless).status_code == 200


def test_a_cut_answer_is_incomplete(running, model):
    model.answer = lambda asked: "Vel..." if asked.role == "ras.answer" else answer(asked)
    with running() as url:
        found = sdk(url).responses.create(model="ras", input=QUESTION, max_output_tokens=3)
        events = list(sdk(url).responses.create(model="ras", input=QUESTION, stream=True))
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [asked.sampling.max_tokens for asked in model.asked if asked.role == "ras.answer"] == [3, 100]
    assert events[-1].type == "response.incomplete"
