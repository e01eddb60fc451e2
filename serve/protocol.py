"""OpenAI's requests and replies as JSON: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from tripletune.models.data.records import Step, one_line
from tripletune.models.llm import Message
from tripletune.rag import TraceAction, TraceStep, cited
from tripletune.serve.door import Refused
from tripletune.serve.served import Answer, Asked


def _text(content: Any) -> Any:
    """The content of a turn, whose parts are joined."""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ValueError("text alone is read: no images, audio or files")
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class _Turn(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)] = ""


class _Options(BaseModel):
    include_usage: bool = False


class _Own(BaseModel):
    steps: list[Any] = []


class _Request(BaseModel):
    """Fields that are not known have no effect."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str
    messages: list[_Turn] = []
    prompt: Annotated[str, BeforeValidator(lambda one: one[0] if isinstance(one, list) and len(one) == 1 else one)] = ""
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_listed)] | None = None
    stream: bool | None = None
    stream_options: _Options | None = None
    tripletune: _Own | None = None

    @field_validator("messages")
    @classmethod
    def _ends_with_the_user(cls, turns: list[_Turn]) -> list[_Turn]:
        if not turns or turns[-1].role != "user":
            raise ValueError("the last turn must be the user's")
        return turns


def read_request(data: bytes, chat: bool) -> Asked:
    """Read a request; what is wrong with it is a `Refused`."""
    try:
        found = _Request.model_validate_json(data)
        steps = tuple(Step.from_json(row, "tripletune.steps") for row in (found.tripletune or _Own()).steps)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        told = ".".join(place) or "the body"
        raise Refused(400, f"{told}: {first['msg']}", param=place[0] if place else None) from None
    except ValueError as error:
        raise Refused(400, str(error), param="tripletune") from None
    turns = found.messages if chat else [_Turn(role="user", content=found.prompt)]
    if not turns or not turns[-1].content.strip():
        name = "messages" if chat else "prompt"
        raise Refused(400, f"{name}: there is no question", param=name)
    role: dict[str, Any] = {"developer": "system"}
    drawn = {name: getattr(found, name) for name in ("temperature", "top_p", "seed")}
    return Asked(
        found.model,
        [Message(role=role.get(turn.role, turn.role), content=turn.content) for turn in turns],
        max_tokens=found.max_completion_tokens or found.max_tokens,
        drawn={name: value for name, value in drawn.items() if value is not None},
        steps=steps,
        stop=tuple(filter(None, found.stop or ())),
        chat=chat,
        stream=bool(found.stream),
        usage=(found.stream_options or _Options()).include_usage,
    )


class Layout:
    """The objects that answer one request."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._role = asked, {"role": "assistant"}
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._about = {"id": name, "created": int(time.time()), "model": asked.model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """A reply in one piece."""
        chat = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        said = chat if self._asked.chat else {"text": answer.text}
        return self._object("", said, answer.finish_reason, usage=answer.usage, **answer.more)

    def event(self, event: TraceAction | TraceStep) -> dict[str, Any]:
        """A chunk of a stream: what a loop has just done."""
        if isinstance(event, TraceAction):
            kind, line = "plan", one_line(event.reply)
        else:
            kind, line = "retrieve", f"{event.query}: {', '.join(map(cited, event.passages)) or 'nothing found'}"
        about = {"event": kind, **{name: getattr(event, name) for name in event.__slots__}}
        return self._chunk("", {"reasoning_content": f"{kind}  {line}\n"}, tripletune=about)

    def parts(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """The last chunks of a stream: the answer, its end, and its tokens where they are asked for."""
        yield self._chunk(answer.text, {"content": answer.text})
        yield self._chunk("", {}, answer.finish_reason, **answer.more)
        if self._asked.usage:
            yield {**self._object(".chunk", {}, None, usage=answer.usage), "choices": []}

    def _chunk(self, text: str, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        said = {"delta": {**self._role, **delta}} if self._asked.chat else {"text": text}
        self._role = {}
        return self._object(".chunk", said, reason, **more)

    def _object(self, chunk: str, said: dict[str, Any], reason: str | None, **more: Any) -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if self._asked.chat else "text_completion"
        choice = {"index": 0, **said, "finish_reason": reason, "logprobs": None}
        return {**self._about, "object": kind, "choices": [choice], **more}
