"""LlamaIndex's OpenAILike: with is_chat_model=True, and what is asked without it."""

from checks import QUESTION, URL, check, finish, show
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

show("llama-index-llms-openai-like", "llama-index-core", "openai")
model = OpenAILike(api_base=URL, api_key="none", model="ras", is_chat_model=True, max_retries=0)
default = OpenAILike(api_base=URL, api_key="none", model="ras", max_retries=0)
chat = [ChatMessage(role="user", content=QUESTION)]


class Born(BaseModel):
    """The form of an answer."""

    town: str


check("chat", lambda: model.chat(chat).message.content, "Velsund")
check("complete", lambda: model.complete(QUESTION).text, "Velsund")
check("stream_chat", lambda: [part.delta for part in model.stream_chat(chat) if part.delta], ["Velsund"])
check("raw has the field tripletune", lambda: model.chat(chat).raw.tripletune["answer"], "Velsund")
check("without is_chat_model the roles are in the question",
      lambda: " ".join(default.chat(chat).raw.tripletune["question"].split()),
      f"user: {QUESTION} assistant:")  # fmt: skip
responses = OpenAIResponses(model="ras", api_base=URL, api_key="none", context_window=8192, max_retries=0)
check("OpenAIResponses, chat", lambda: responses.chat(chat).message.content, "Velsund")
structured = OpenAILike(
    api_base=URL, api_key="none", model="ras", is_chat_model=True, should_use_structured_outputs=True, max_retries=0
)
check("as_structured_llm with should_use_structured_outputs=True",
      lambda: structured.as_structured_llm(Born).chat(chat).raw, Born(town="Velsund"))  # fmt: skip
finish()
