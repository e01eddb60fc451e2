"""OpenAI's requests and replies as JSON: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tripletune.models.data.records import Step, one_line
from tripletune.models.llm import Message
from tripletune.rag import TraceAction, TraceStep, cited
from tripletune.serve.door import Refused
from tripletune.serve.served import Answer, Asked

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNTIL = 2**31


@dataclass(frozen=True, slots=True)
class Body:
    """A request as it was understood; `chat` says which of the two routes it came by, `usage` whether a stream ends
    with its tokens.
    """

    model: str
    asked: Asked
    chat: bool
    stream: bool
    usage: bool
    stop: tuple[str, ...]

    def cut(self, text: str) -> str:
        """A reply up to the first of the request's stop texts."""
        return text[: min((place for stop in self.stop if (place := text.find(stop)) >= 0), default=len(text))]


def read_body(data: bytes, chat: bool) -> Body:
    """Read a request; what it says wrongly is a `Refused`, and fields that are not known have no effect."""
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused(400, "the body holds half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON in UTF-8") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    model = _field(body, "model", str)
    if not model:
        raise Refused(400, "name the model: GET /v1/models lists them", param="model")
    for name in ("n", "best_of"):
        if _number(body, name, int, 1, _UNTIL) not in (None, 1):
            raise Refused(400, f"{name}: one reply per request is given", param=name)
    limits = [_number(body, name, int, 1, _UNTIL) for name in ("max_completion_tokens", "max_tokens")]
    drawn = {
        "temperature": _number(body, "temperature", float, 0, 2),
        "top_p": _number(body, "top_p", float, 1e-9, 1),
        "seed": _number(body, "seed", int, -(2**63), 2**63 - 1),
    }
    messages = _messages(body) if chat else [Message(role="user", content=_prompt(body))]
    if not messages[-1]["content"].strip():
        raise Refused(400, "the question is empty", param="messages" if chat else "prompt")
    asked = Asked(
        messages,
        next((limit for limit in limits if limit is not None), None),
        {name: value for name, value in drawn.items() if value is not None},
        _steps(_field(body, "tripletune", dict) or {}),
    )
    usage = (_field(body, "stream_options", dict) or {}).get("include_usage") is True
    return Body(model, asked, chat, bool(_field(body, "stream", bool)), usage, _stop(body))


def _field(body: Mapping[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        words = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
        raise Refused(400, f"{name} must be {words[kind]}", param=name)
    return value


def _number(body: Mapping[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    value = body.get(name)
    if value is None:
        return None
    fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise Refused(400, f"{name} must be {what} from {low:g} to {high:g}", param=name)
    return kind(value)


def _messages(body: Mapping[str, Any]) -> list[Message]:
    given = _field(body, "messages", list)
    if not given or not all(isinstance(turn, dict) for turn in given):
        raise Refused(400, "messages must be a list of objects with role and content", param="messages")
    found = [Message(role=_role(turn), content=_content(turn.get("content"))) for turn in given]
    if found[-1]["role"] != "user":
        raise Refused(400, "the last message must be the user's", param="messages")
    return found


def _role(turn: Mapping[str, Any]) -> Any:
    role = turn.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise Refused(400, f"the role of a message must be one of {', '.join(_ROLES)}", param="messages")
    return _ROLES[role]


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:  # of an assistant's turn that only called a tool
        return ""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    words = [text for text in texts if isinstance(text, str)]
    if len(words) < len(parts):
        raise Refused(400, "the content of a message must be text: images, audio and files are not read", "unsupported",
                      "messages")  # fmt: skip
    return "".join(words)


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise Refused(400, "prompt must be one text", param="prompt")
    return prompt


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise Refused(400, "stop must be a text or a list of texts", param="stop")
    return tuple(filter(None, stops))


def _steps(own: Mapping[str, Any]) -> tuple[Step, ...]:
    try:
        return tuple(Step.from_json(row, "tripletune.steps") for row in _field(own, "steps", list) or ())
    except ValueError as error:
        raise Refused(400, str(error), param="tripletune") from None


class Layout:
    """The objects that answer one request."""

    def __init__(self, body: Body) -> None:
        self._body, self._opened = body, False
        name = f"{'chatcmpl' if body.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._about = {"id": name, "created": int(time.time()), "model": body.model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """A reply in one piece."""
        message = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        choice = self._choice(message if self._body.chat else {"text": answer.text}, answer.finish_reason)
        return self._object("", [choice], usage=_usage(answer), **_trace(answer))

    def event(self, event: TraceAction | TraceStep) -> dict[str, Any]:
        """A chunk of a stream: what a loop has just done."""
        about = {name: getattr(event, name) for name in event.__slots__}
        if isinstance(event, TraceAction):
            kind, line = "plan", one_line(event.reply)
        else:
            found = ", ".join(map(cited, event.passages)) or "nothing found"
            kind, line = "retrieve", f"{event.query}: {found}"
        return self._chunk("", {"reasoning_content": f"{kind}  {line}\n"}, tripletune={"event": kind, **about})

    def parts(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """The last chunks of a stream: the answer, its end, and its tokens where they are asked for."""
        yield self._chunk(answer.text, {"content": answer.text})
        yield self._chunk("", {}, answer.finish_reason, **_trace(answer))
        if self._body.usage:
            yield self._object(".chunk", [], usage=_usage(answer))

    def _chunk(self, text: str, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        role = {} if self._opened else {"role": "assistant"}
        self._opened = True
        said = {"delta": {**role, **delta}} if self._body.chat else {"text": text}
        return self._object(".chunk", [self._choice(said, reason)], **more)

    def _choice(self, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "finish_reason": reason, "logprobs": None}

    def _object(self, chunk: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if self._body.chat else "text_completion"
        return {**self._about, "object": kind, "choices": choices, **more}


def _usage(answer: Answer) -> dict[str, int]:
    read, written = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _trace(answer: Answer) -> dict[str, Any]:
    return {} if answer.trace is None else {"tripletune": answer.trace}
