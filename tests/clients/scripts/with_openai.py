"""OpenAI's own package: chat completions, completions, responses."""

from checks import HISTORY, QUESTION, TOOL, URL, check, finish, refused, show
from openai import OpenAI
from pydantic import BaseModel

show("openai")
client = OpenAI(base_url=URL, api_key="none", max_retries=0)
chat = client.chat.completions
USER = {"role": "user", "content": QUESTION}


class Born(BaseModel):
    """The form of an answer."""

    town: str


def plain(**fields):
    return chat.create(**{"model": "ras", "messages": [USER], **fields}).choices[0].message


def stream():
    chunks = chat.create(model="ras", messages=[USER], stream=True, stream_options={"include_usage": True})
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    return "".join(texts)


def response_stream():
    with client.responses.stream(model="ras", input=QUESTION) as events:
        kinds = {event.type for event in events}
    return "response.reasoning_summary_text.delta" in kinds and "response.completed" in kinds


def cited_in_response():
    _, message = client.responses.create(model="ras", input=QUESTION).output
    return [note.title for note in message.content[0].annotations]


def second_response():
    first = client.responses.create(model="planner", input="One?")
    return client.responses.create(model="planner", input="Two?", previous_response_id=first.id).output_text


check("chat", lambda: plain().content, "Velsund")
check("chat, stream", stream, "Velsund")
check("chat, parse", lambda: chat.parse(model="ras", messages=[USER], response_format=Born).choices[0].message.parsed,
      Born(town="Velsund"))  # fmt: skip
check("chat, citations", lambda: [note.url_citation.title for note in plain().annotations],
      ["Glass Harbour", "Ida Morn"])  # fmt: skip
check("chat, the field tripletune", lambda: chat.create(model="ras", messages=[USER]).tripletune["stop_reason"],
      "sufficient")  # fmt: skip
check("chat, tools offered", lambda: plain(tools=[TOOL]).content, "Velsund")
check("chat, results of tools before", lambda: plain(messages=[*HISTORY, USER]).content, "Velsund")
check("completions", lambda: client.completions.create(model="ras", prompt=QUESTION).choices[0].text, "Velsund")
check("responses", lambda: client.responses.create(model="ras", input=QUESTION).output_text, "Velsund")
check("responses, stream", response_stream, True)
check("responses, parse", lambda: client.responses.parse(model="ras", input=QUESTION, text_format=Born).output_parsed,
      Born(town="Velsund"))  # fmt: skip
check("responses, citations", cited_in_response, ["Glass Harbour", "Ida Morn"])
check("responses, previous_response_id", second_response, "Velsund")
refused("chat, tool_choice required", lambda: plain(tools=[TOOL], tool_choice="required"), "only auto and none")
refused("chat, logprobs", lambda: plain(logprobs=True), "log-probabilities")
refused("chat, n", lambda: plain(n=2), "n: ")
refused("responses, background", lambda: client.responses.create(model="ras", input=QUESTION, background=True),
        "leave background out")  # fmt: skip
refused("responses, an image",
        lambda: client.responses.create(
            model="ras", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]
        ),
        "no images")  # fmt: skip
finish()
