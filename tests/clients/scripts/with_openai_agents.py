"""openai-agents: its default model, which asks /v1/responses, and the one for chat completions."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from checks import QUESTION, URL, check, finish, show
from openai import AsyncOpenAI
from pydantic import BaseModel

show("openai-agents", "openai")
set_tracing_disabled(True)
# One event loop, since connections belong to theirs.
runner = asyncio.Runner()
KINDS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


class Born(BaseModel):
    """The form of an answer."""

    town: str


@function_tool
def look_up(name: str) -> str:
    """Look up."""
    return "a novel"


def agent(kind, **options):
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    return Agent(name="a", model=KINDS[kind]("ras", client), **options)


def ask(kind, session=False, **options):
    async def talk():
        kept = SQLiteSession("s") if session else None
        result = await Runner.run(agent(kind, **options), QUESTION, session=kept)
        if session:
            result = await Runner.run(agent(kind, **options), QUESTION, session=kept)
        return result.final_output

    return runner.run(talk())


def streamed(kind):
    async def listen():
        result = Runner.run_streamed(agent(kind), QUESTION)
        kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
        return result.final_output, "response.output_text.delta" in kinds

    return runner.run(listen())


def continued():
    async def talk():
        first = await Runner.run(agent("responses"), QUESTION)
        second = await Runner.run(agent("responses"), QUESTION, previous_response_id=first.last_response_id)
        return second.final_output

    return runner.run(talk())


for kind in KINDS:
    check(kind, lambda kind=kind: ask(kind, instructions="Be brief."), "Velsund")
    check(f"{kind}, stream", lambda kind=kind: streamed(kind), ("Velsund", True))
    check(f"{kind}, output_type", lambda kind=kind: ask(kind, output_type=Born), Born(town="Velsund"))
    check(f"{kind}, tools offered", lambda kind=kind: ask(kind, tools=[look_up]), "Velsund")
    check(f"{kind}, session", lambda kind=kind: ask(kind, session=True), "Velsund")
check("responses, previous_response_id", continued, "Velsund")
finish()
