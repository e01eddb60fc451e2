"""OpenAI's requests and replies as JSON: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tripletune.core.calls import Message
from tripletune.core.data.records import Step, one_line
from tripletune.rag import TraceAction, TraceStep, cited
from tripletune.serve.limits import Refused


def _text(content: Any) -> Any:
    """The text of a message, also of one in several parts."""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ValueError("only text is accepted, no images, audio or files")
        return "".join(str(part.get("text") or "") for part in content)
    return content or ""


def _only_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and len(prompt) == 1:
        return prompt[0]
    return prompt


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class _Turn(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)] = ""


class _Options(BaseModel):
    include_usage: bool = False


class _Own(BaseModel):
    steps: list[Any] = []


class Asked(BaseModel):
    """A request; unknown fields have no effect. `chat` says whether it is a request for chat completions."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    chat: ClassVar[bool] = False
    model: str
    messages: list[_Turn] = []
    prompt: Annotated[str, BeforeValidator(_only_prompt)] = ""
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list)] | None = None
    stream: bool | None = None
    stream_options: _Options | None = None
    tripletune: _Own | None = None

    @property
    def turns(self) -> list[Message]:
        """The chat, whose last turn is the user's."""
        if not self.chat:
            return [Message(role="user", content=self.prompt)]
        turns: list[Message] = []
        for turn in self.messages:
            role = "system" if turn.role == "developer" else turn.role
            turns.append(Message(role=role, content=turn.content))
        return turns

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
    def _asks(self) -> Self:
        turns = self.turns
        if not turns or turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
            raise ValueError("there is no question: the last message must have the role user and a text")
        self.steps  # noqa: B018 - raises an error for steps in another form
        return self


class AskedChat(Asked):
    """A request of `/v1/chat/completions`."""

    chat: ClassVar[bool] = True


def read_request(data: bytes, kind: type[Asked]) -> Asked:
    """Read a request, or raise `Refused` if it is invalid."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        where = ".".join(place) or "the body"
        raise Refused(400, f"{where}: {first['msg']}", param=place[0] if place else None) from None


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply.

    Attributes:
        usage: Tokens as OpenAI's API names them: "prompt_tokens", "completion_tokens", "total_tokens".
        finish_reason: "stop", or why the reply is only a part: "length" or "content_filter".
        more: More fields of the response, such as a loop's trace under "tripletune".
    """

    text: str
    usage: dict[str, int]
    finish_reason: str
    more: dict[str, Any]


class Layout:
    """Builds the JSON objects that answer one request."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        # Only the first chunk of a stream has the role.
        self._role = {"role": "assistant"}
        kind = "chatcmpl" if asked.chat else "cmpl"
        self._about = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The reply without streaming."""
        content: dict[str, Any] = {"text": answer.text}
        if self._asked.chat:
            content = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        return self._object("", content, answer.finish_reason, usage=answer.usage, **answer.more)

    def event(self, event: TraceAction | TraceStep) -> dict[str, Any]:
        """A stream chunk with a loop's latest step."""
        if isinstance(event, TraceAction):
            kind, line = "plan", one_line(event.reply)
        else:
            titles = ", ".join(cited(passage) for passage in event.passages)
            kind, line = "retrieve", f"{event.query}: {titles or 'nothing found'}"
        about = {"event": kind, **{name: getattr(event, name) for name in event.__slots__}}
        return self._chunk("", {"reasoning_content": f"{kind}  {line}\n"}, tripletune=about)

    def chunks(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """The last chunks of a stream: the answer, the finish reason, and on request the token usage."""
        yield self._chunk(answer.text, {"content": answer.text})
        yield self._chunk("", {}, answer.finish_reason, **answer.more)
        if self._asked.stream_options and self._asked.stream_options.include_usage:
            yield {**self._object(".chunk", {}, None, usage=answer.usage), "choices": []}

    def _chunk(self, text: str, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        """An object of a stream: for a chat what its message gets, else a text."""
        content: dict[str, Any] = {"text": text}
        if self._asked.chat:
            content = {"delta": {**self._role, **delta}}
        self._role = {}
        return self._object(".chunk", content, reason, **more)

    def _object(self, suffix: str, content: dict[str, Any], reason: str | None, **more: Any) -> dict[str, Any]:
        """An object with one choice; `suffix` is that of a chunk's kind."""
        kind = f"chat.completion{suffix}" if self._asked.chat else "text_completion"
        choice = {"index": 0, **content, "finish_reason": reason, "logprobs": None}
        return {**self._about, "object": kind, "choices": [choice], **more}
