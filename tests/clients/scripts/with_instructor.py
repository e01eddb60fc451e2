"""instructor: objects by its modes."""

import instructor
from checks import QUESTION, URL, check, finish, refused, show
from openai import OpenAI
from pydantic import BaseModel

show("instructor", "openai")


class Born(BaseModel):
    """The form of an answer."""

    town: str


def ask(mode):
    client = instructor.from_openai(OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(model="ras", messages=messages, response_model=Born, max_retries=0)


check("JSON_SCHEMA", lambda: ask(instructor.Mode.JSON_SCHEMA).town, "Velsund")
refused("TOOLS", lambda: ask(instructor.Mode.TOOLS), "only auto and none")
refused("JSON", lambda: ask(instructor.Mode.JSON), "json_object")
finish()
