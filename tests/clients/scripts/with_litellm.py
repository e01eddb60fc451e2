"""litellm: completion and responses."""

import os

# Otherwise its import fetches a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from checks import HISTORY, QUESTION, TOOL, URL, check, finish, refused, show
from pydantic import BaseModel

show("litellm", "openai")
SERVER = {"model": "openai/ras", "api_base": URL, "api_key": "none", "num_retries": 0, "max_retries": 0}
USER = {"role": "user", "content": QUESTION}


class Born(BaseModel):
    """The form of an answer."""

    town: str


def ask(**fields):
    return litellm.completion(**{**SERVER, "messages": [USER], **fields})


def streamed():
    return "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))


check("completion", lambda: ask().choices[0].message.content, "Velsund")
check("stream", streamed, "Velsund")
check("response_format", lambda: ask(response_format=Born).choices[0].message.content, '{"town": "Velsund"}')
check("the field tripletune", lambda: ask().tripletune["answer"], "Velsund")
check("citations", lambda: [note["url_citation"]["title"] for note in ask().choices[0].message.annotations],
      ["Glass Harbour", "Ida Morn"])  # fmt: skip
check("steps as reasoning_content", lambda: ask().choices[0].message.reasoning_content.splitlines()[-1],
      "plan  [SUFFICIENT]")  # fmt: skip
check("results of tools before", lambda: ask(messages=[*HISTORY, USER]).choices[0].message.content, "Velsund")
check("responses", lambda: litellm.responses(input=QUESTION, **SERVER).output[-1].content[0].text, "Velsund")
refused("tool_choice required", lambda: ask(tools=[TOOL], tool_choice="required"), "only auto and none")
finish()
