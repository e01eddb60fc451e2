"""pydantic-ai: chat completions and responses, and objects."""

import asyncio

from checks import QUESTION, URL, check, finish, refused, show
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

show("pydantic-ai-slim", "openai")
provider = OpenAIProvider(base_url=URL, api_key="none")
chat = OpenAIChatModel("ras", provider=provider)
responses = OpenAIResponsesModel("ras", provider=provider)


class Born(BaseModel):
    """The form of an answer."""

    town: str


def ask(model, **options):
    return Agent(model, **options).run_sync(QUESTION)


def streamed(model):
    async def listen():
        async with Agent(model).run_stream(QUESTION) as result:
            return [text async for text in result.stream_text(delta=True)]

    return "".join(asyncio.run(listen()))


def thoughts(model):
    parts = ask(model).all_messages()[-1].parts
    return [part.content for part in parts if part.part_kind == "thinking"][-1].splitlines()[-1]


def second(model):
    first = ask(model)
    return Agent(model).run_sync(QUESTION, message_history=first.all_messages()).output


def with_tool(model):
    agent = Agent(model)
    agent.tool_plain(lambda name: "a novel", name="look_up")
    return agent.run_sync(QUESTION).output


for name, model in (("chat", chat), ("responses", responses)):
    check(name, lambda model=model: ask(model).output, "Velsund")
    check(f"{name}, stream", lambda model=model: streamed(model), "Velsund")
    check(f"{name}, NativeOutput", lambda model=model: ask(model, output_type=NativeOutput(Born)).output,
          Born(town="Velsund"))  # fmt: skip
    check(f"{name}, tools offered", lambda model=model: with_tool(model), "Velsund")
    check(f"{name}, history", lambda model=model: second(model), "Velsund")
    check(f"{name}, steps as thoughts", lambda model=model: thoughts(model), "plan  [SUFFICIENT]")
    refused(f"{name}, output by tools", lambda model=model: ask(model, output_type=Born), "only auto and none")
finish()
