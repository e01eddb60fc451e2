"""OpenAI's requests and replies as JSON: `/v1/chat/completions` and `/v1/completions`.

`responses.py` adds `/v1/responses`, whose requests become the same chats.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypedDict, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from tripletune.core.calls import Message
from tripletune.core.data.records import Step, one_line
from tripletune.rag import TraceAction, TraceStep, citation
from tripletune.serve.limits import Refused
from tripletune.serve.schemas import read_schema

# A JSON object of a reply, as OpenAI's API lays it out.
JsonObject = dict[str, Any]
# The types of parts with text, in chat completions and in responses.
_TEXT_PARTS = ("text", "input_text", "output_text")


def _text_of_parts(content: object) -> object:
    """The text of a message, also of one in several parts; what is no text is left for pydantic to refuse."""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS for part in content):
            raise ValueError("only text is accepted, no images, audio or files")
        return "".join(str(part.get("text") or "") for part in content)
    return content or ""


def _only_prompt(prompt: object) -> object:
    """The prompt of a list with one; several would need several choices in the reply, which are refused like `n`."""
    if isinstance(prompt, list) and len(prompt) == 1:
        return prompt[0]
    return prompt


def _as_list(stop: object) -> object:
    """A single stop sequence as a list of one; OpenAI's API takes both."""
    return [stop] if isinstance(stop, str) else stop


def unsupported(reason: str, *harmless: Any) -> BeforeValidator:
    """Refuse a field that would change the form of the reply; null, false and empty values ask for nothing.

    Client libraries send such values for fields that their user never set, so these requests must pass.
    """

    def refuse_request(value: object) -> None:
        """Refuse a value that asks for something; clients send the default of every field."""
        # `is False`, because `0 == False`: a number does ask for something.
        asks_nothing = value is None or value is False or value in ("", [], {}, *harmless)
        if not asks_nothing:
            raise ValueError(reason)

    return BeforeValidator(refuse_request)


def _refuse_tool_choice(value: object) -> None:
    """Refuse a choice that calls a tool; "auto", which clients send by default, calls none."""
    if value not in (None, "auto", "none"):
        raise ValueError(
            "no tool is ever called: only auto and none are accepted; "
            "for an object, send response_format with json_schema"
        )


class ChatTurn(BaseModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_text_of_parts)] = ""


class _StreamOptions(BaseModel):
    """OpenAI's options of a stream."""

    include_usage: bool = False


class _OwnFields(BaseModel):
    """Our fields of a request: the earlier rounds of a loop, for a Graph-LLM (`Step.from_json`)."""

    steps: list[Any] = []


# The role of a turn for models; results of tools have none.
_ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
NO_LOGPROBS = "log-probabilities are not returned"
_NO_AUDIO = "only text is returned"
_NO_GRAMMAR = "only response_format with json_schema sets the form of a reply"


class Asked(BaseModel):
    """A request; unknown fields have no effect.

    Fields that would change the form of the reply are refused where they can't be kept, since clients rely on them.
    The last of these fields are those of vLLM and llama.cpp, whose users meet this server with the same clients.

    Attributes:
        own_names: What the request's route calls a field that has another name here.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    own_names: ClassVar[Mapping[str, str]] = {}
    model: str
    messages: list[ChatTurn] = []
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tripletune: _OwnFields | None = None
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(read_schema)] = None
    tool_choice: Annotated[None, BeforeValidator(_refuse_tool_choice)] = None
    function_call: Annotated[None, BeforeValidator(_refuse_tool_choice)] = None
    functions: Annotated[None, unsupported("no function is ever called: leave functions out")] = None
    logprobs: Annotated[None, unsupported(NO_LOGPROBS)] = None
    top_logprobs: Annotated[None, unsupported(NO_LOGPROBS)] = None
    logit_bias: Annotated[None, unsupported("tokens can't be made likelier")] = None
    modalities: Annotated[None, unsupported(_NO_AUDIO, ["text"])] = None
    audio: Annotated[None, unsupported(_NO_AUDIO)] = None
    suffix: Annotated[None, unsupported("text is not inserted before a suffix")] = None
    echo: Annotated[None, unsupported("the prompt is not repeated")] = None
    prompt_logprobs: Annotated[None, unsupported(NO_LOGPROBS)] = None
    n_probs: Annotated[None, unsupported(NO_LOGPROBS, 0)] = None
    structured_outputs: Annotated[None, unsupported(_NO_GRAMMAR)] = None
    guided_json: Annotated[None, unsupported(_NO_GRAMMAR)] = None
    guided_regex: Annotated[None, unsupported(_NO_GRAMMAR)] = None
    guided_choice: Annotated[None, unsupported(_NO_GRAMMAR)] = None
    guided_grammar: Annotated[None, unsupported(_NO_GRAMMAR)] = None
    grammar: Annotated[None, unsupported(_NO_GRAMMAR)] = None
    json_schema: Annotated[None, unsupported(_NO_GRAMMAR)] = None
    # Random letters of the reply's id.
    _name: str = PrivateAttr(default_factory=lambda: secrets.token_hex(12))

    @property
    def name(self) -> str:
        """What the ids of the reply and of its items have in common."""
        return self._name

    @property
    def turns(self) -> list[Message]:
        """The chat, whose last turn is the user's."""
        turns: list[Message] = []
        for turn in self.messages:
            role = _ROLES.get(turn.role)
            if role is not None:
                turns.append(Message(role=role, content=turn.content))
        return turns

    @property
    def tool_turns(self) -> int:
        """Number of turns with results of tools, which are not in `turns`."""
        return sum(turn.role not in _ROLES for turn in self.messages)

    @property
    def limit(self) -> int | None:
        """The reply's token limit, if the request has one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def steps(self) -> tuple[Step, ...]:
        """The earlier rounds, for a Graph-LLM."""
        if self.tripletune is None:
            return ()
        return tuple(Step.from_json(row, "tripletune.steps") for row in self.tripletune.steps)

    @model_validator(mode="after")
    def _check_question(self) -> Self:
        """Check that the request ends with a question.

        `turns` has no results of tools, so the last message is checked itself: a result after the question would mean
        that the client expects an answer to the result.
        """
        turns = self.turns
        ends_with_question = bool(turns) and turns[-1]["role"] == "user" and bool(turns[-1]["content"].strip())
        ends_with_other_role = bool(self.messages) and self.messages[-1].role != "user"
        if not ends_with_question or ends_with_other_role:
            raise ValueError("there is no question: the last message must have the role user and a text")
        self.steps  # noqa: B018 - raises an error for steps in another form
        return self


class AskedChat(Asked):
    """A request of `/v1/chat/completions`."""


class AskedText(Asked):
    """A request of `/v1/completions`."""

    prompt: Annotated[str, BeforeValidator(_only_prompt)] = ""

    @property
    def turns(self) -> list[Message]:
        """The prompt as the only turn of a chat."""
        return [Message(role="user", content=self.prompt)]


Kind = TypeVar("Kind", bound=Asked)


def read_request(data: bytes, kind: type[Kind]) -> Kind:
    """Read a request, or raise `Refused` if it is invalid.

    Only the first problem is named: OpenAI's form of an error has one message and one field.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first_problem = error.errors(include_url=False, include_input=False)[0]
        place = [str(part) for part in first_problem["loc"]]
        where = ".".join(place) or "the body"
        reason = first_problem["msg"].removeprefix("Value error, ")
        raise Refused(400, f"{where}: {reason}", param=place[0] if place else None) from None


class Citation(TypedDict):
    """OpenAI's citation of a URL; it stands for the characters of the answer from `start_index` to `end_index`."""

    url: str
    title: str
    start_index: int
    end_index: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply.

    Attributes:
        usage: Tokens as OpenAI's API names them: "prompt_tokens", "completion_tokens", "total_tokens".
        citations: The passages that a loop's answer is from.
        finish_reason: "stop", or why the reply is only a part: "length" or "content_filter".
        more: More fields of the response, such as a loop's trace under "tripletune".
    """

    text: str
    usage: dict[str, int]
    finish_reason: str
    more: dict[str, Any]
    citations: Sequence[Citation] = ()


class Progress(NamedTuple):
    """A step of a loop: one line for people, and the fields for programs."""

    line: str
    fields: dict[str, Any]


def progress_of(event: TraceAction | TraceStep) -> Progress:
    """A loop's latest step in words and in fields."""
    if isinstance(event, TraceAction):
        kind, line = "plan", one_line(event.reply)
    else:
        titles = ", ".join(citation(passage) for passage in event.passages)
        kind, line = "retrieve", f"{event.query}: {titles or 'nothing found'}"
    return Progress(f"{kind}  {line}", {"event": kind, **{name: getattr(event, name) for name in event.__slots__}})


class Layout(ABC):
    """Builds the JSON objects that answer one request, as a whole or as a stream.

    `step` is called once for each step of the loop, also for a whole reply, which names the steps, too.

    Attributes:
        end: The last line of a stream.
    """

    end = ""

    @abstractmethod
    def whole(self, answer: Answer) -> JsonObject:
        """The reply without streaming."""

    def start(self) -> list[JsonObject]:
        """What a stream begins with."""
        return []

    @abstractmethod
    def step(self, event: TraceAction | TraceStep) -> list[JsonObject]:
        """The objects of a stream for a loop's latest step."""

    @abstractmethod
    def finish(self, answer: Answer) -> list[JsonObject]:
        """The last objects of a stream: the answer, and why it ended."""

    def fail(self, refusal: Refused) -> JsonObject:
        """The object of a stream that ends with an error."""
        return refusal.to_json()

    def line(self, value: JsonObject) -> str:
        """An object as a server-sent event."""
        return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


class ChatLayout(Layout):
    """The replies of `/v1/chat/completions` and `/v1/completions`.

    Steps are shown as reasoning in programs that know OpenAI's API only; the page reads the fields under "tripletune".
    """

    end = "data: [DONE]\n\n"

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._is_chat = isinstance(asked, AskedChat)
        # Only the first chunk of a stream has the role.
        self._role = {"role": "assistant"}
        self._reasoning = ""
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._about = {"id": f"{kind}-{asked.name}", "created": int(time.time()), "model": asked.model}

    def whole(self, answer: Answer) -> JsonObject:
        """The reply without streaming."""
        content: dict[str, Any] = {"text": answer.text}
        if self._is_chat:
            message = {"role": "assistant", "content": answer.text, "refusal": None, **self._annotations_of(answer)}
            if self._reasoning:
                message["reasoning_content"] = self._reasoning
            content = {"message": message}
        return self._choice_object("", content, answer.finish_reason, usage=answer.usage, **answer.more)

    def step(self, event: TraceAction | TraceStep) -> list[JsonObject]:
        """A chunk with a loop's latest step."""
        progress = progress_of(event)
        line = f"{progress.line}\n"
        self._reasoning += line
        return [self._chunk_object("", {"reasoning_content": line}, tripletune=progress.fields)]

    def finish(self, answer: Answer) -> list[JsonObject]:
        """The last chunks of a stream: the answer, the finish reason, and on request the token usage."""
        chunks = [
            self._chunk_object(answer.text, {"content": answer.text, **self._annotations_of(answer)}),
            self._chunk_object("", {}, answer.finish_reason, **answer.more),
        ]
        if self._asked.stream_options and self._asked.stream_options.include_usage:
            chunks.append({**self._choice_object(".chunk", {}, None, usage=answer.usage), "choices": []})
        return chunks

    def _annotations_of(self, answer: Answer) -> JsonObject:
        """The citations as a field of a message; without citations, no field."""
        notes = [{"type": "url_citation", "url_citation": citation} for citation in answer.citations]
        return {"annotations": notes} if notes else {}

    def _chunk_object(self, text: str, delta: JsonObject, reason: str | None = None, **more: Any) -> JsonObject:
        """An object of a stream: for a chat what its message gets, else a text.

        The role is sent once and then forgotten, so chunks must be made in the order in which they are sent.
        """
        content: dict[str, Any] = {"text": text}
        if self._is_chat:
            content = {"delta": {**self._role, **delta}}
        self._role = {}
        return self._choice_object(".chunk", content, reason, **more)

    def _choice_object(self, suffix: str, content: JsonObject, reason: str | None, **more: Any) -> JsonObject:
        """An object with one choice and `more` fields; `suffix` is that of a chunk's kind."""
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        choice = {"index": 0, **content, "finish_reason": reason, "logprobs": None}
        return {**self._about, "object": kind, "choices": [choice], **more}
