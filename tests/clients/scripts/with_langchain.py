"""LangChain's ChatOpenAI, by chat completions and by responses."""

from checks import HISTORY, QUESTION, URL, check, finish, refused, show
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

show("langchain-openai", "openai")
model = ChatOpenAI(base_url=URL, api_key="none", model="ras", max_retries=0)
by_responses = ChatOpenAI(base_url=URL, api_key="none", model="ras", max_retries=0, use_responses_api=True)


class Born(BaseModel):
    """The form of an answer."""

    town: str


def streamed(chat):
    return "".join(chunk.text for chunk in chat.stream(QUESTION))


def citations():
    blocks = by_responses.invoke(QUESTION).content_blocks
    notes = [note for block in blocks if block["type"] == "text" for note in block["annotations"]]
    return [note["title"] for note in notes]


def reasoning():
    blocks = by_responses.invoke(QUESTION).content_blocks
    return [block["reasoning"].strip() for block in blocks if block["type"] == "reasoning"][-1]


check("invoke", lambda: model.invoke(QUESTION).text, "Velsund")
check("stream", lambda: streamed(model), "Velsund")
check("batch", lambda: [reply.text for reply in model.batch([QUESTION, QUESTION])], ["Velsund"] * 2)
check("with_structured_output", lambda: model.with_structured_output(Born).invoke(QUESTION), Born(town="Velsund"))
check(
    "results of tools before", lambda: model.invoke([*HISTORY, {"role": "user", "content": QUESTION}]).text, "Velsund"
)
check("the field tripletune is dropped", lambda: "tripletune" in str(model.invoke(QUESTION)), False)
check("responses", lambda: by_responses.invoke(QUESTION).text, "Velsund")
check("responses, stream", lambda: streamed(by_responses), "Velsund")
check("responses, citations", citations, ["Glass Harbour", "Ida Morn"])
check("responses, steps as reasoning", reasoning, "plan  [SUFFICIENT]")
check("responses, with_structured_output", lambda: by_responses.with_structured_output(Born).invoke(QUESTION),
      Born(town="Velsund"))  # fmt: skip
for method, words in (("function_calling", "only auto and none"), ("json_mode", "json_object")):
    refused(method, lambda method=method: model.with_structured_output(Born, method=method).invoke(QUESTION), words)
finish()
