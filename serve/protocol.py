"""OpenAI's requests and replies as JSON: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tripletune.core.calls import Message
from tripletune.core.data.records import Step, one_line
from tripletune.rag import TraceAction, TraceStep, cited
from tripletune.serve.limits import Refused
from tripletune.serve.schemas import read_schema


def _text(content: Any) -> Any:
    """The text of a message, also of one in several parts."""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ValueError("only text is accepted, no images, audio or files")
        return "".join(str(part.get("text") or "") for part in content)
    return content or ""


def _only_prompt(prompt: Any) -> Any:
    """The prompt of a list with one; several would need several choices in the reply, which are refused like `n`."""
    if isinstance(prompt, list) and len(prompt) == 1:
        return prompt[0]
    return prompt


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _unsupported(reason: str, *harmless: Any) -> BeforeValidator:
    """Refuse a field that would change the form of the reply; null, false and empty values ask for nothing.

    Client libraries send such values for fields that their user never set, so these requests must pass.
    """

    def refuse_request(value: Any) -> None:
        """Refuse a value that asks for something; clients send the default of every field."""
        # `is False`, because `0 == False`: a number does ask for something.
        asks_nothing = value is None or value is False or value in ("", [], {}, *harmless)
        if not asks_nothing:
            raise ValueError(reason)

    return BeforeValidator(refuse_request)


def _tool_choice(value: Any) -> None:
    """Accept the choices that call no tool: clients send "auto" by default."""
    if value not in (None, "auto", "none"):
        raise ValueError(
            "no tool is ever called: only auto and none are accepted; "
            "for an object, send response_format with json_schema"
        )


class _Turn(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_text)] = ""


class _Options(BaseModel):
    include_usage: bool = False


class _Own(BaseModel):
    steps: list[Any] = []


# The role of a turn for models; results of tools have none.
_ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_NO_LOGPROBS = "log-probabilities are not returned"
_NO_AUDIO = "only text is returned"


class Asked(BaseModel):
    """A request; unknown fields have no effect. `chat` says whether it is a request for chat completions.

    Fields that would change the form of the reply are refused where they can't be kept, since clients rely on them.
    """

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
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(read_schema)] = None
    tool_choice: Annotated[None, BeforeValidator(_tool_choice)] = None
    function_call: Annotated[None, BeforeValidator(_tool_choice)] = None
    functions: Annotated[None, _unsupported("no function is ever called: leave functions out")] = None
    logprobs: Annotated[None, _unsupported(_NO_LOGPROBS)] = None
    top_logprobs: Annotated[None, _unsupported(_NO_LOGPROBS)] = None
    logit_bias: Annotated[None, _unsupported("tokens can't be made likelier")] = None
    modalities: Annotated[None, _unsupported(_NO_AUDIO, ["text"])] = None
    audio: Annotated[None, _unsupported(_NO_AUDIO)] = None
    suffix: Annotated[None, _unsupported("text is not inserted before a suffix")] = None
    echo: Annotated[None, _unsupported("the prompt is not repeated")] = None

    @property
    def turns(self) -> list[Message]:
        """The chat, whose last turn is the user's."""
        if not self.chat:
            return [Message(role="user", content=self.prompt)]
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
    def _asks(self) -> Self:
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

    chat: ClassVar[bool] = True


def read_request(data: bytes, kind: type[Asked]) -> Asked:
    """Read a request, or raise `Refused` if it is invalid.

    Only the first problem is named: OpenAI's form of an error has one message and one field.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        where = ".".join(place) or "the body"
        reason = first["msg"].removeprefix("Value error, ")
        raise Refused(400, f"{where}: {reason}", param=place[0] if place else None) from None


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply.

    Attributes:
        usage: Tokens as OpenAI's API names them: "prompt_tokens", "completion_tokens", "total_tokens".
        citations: The passages that a loop's answer is from, as OpenAI's `annotations`.
        finish_reason: "stop", or why the reply is only a part: "length" or "content_filter".
        more: More fields of the response, such as a loop's trace under "tripletune".
    """

    text: str
    usage: dict[str, int]
    finish_reason: str
    more: dict[str, Any]
    citations: Sequence[dict[str, Any]] = ()


def _cited(answer: Answer) -> dict[str, Any]:
    """The citations as a field of a message; without citations, no field."""
    return {"annotations": list(answer.citations)} if answer.citations else {}


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
            message = {"role": "assistant", "content": answer.text, "refusal": None, **_cited(answer)}
            content = {"message": message}
        return self._object("", content, answer.finish_reason, usage=answer.usage, **answer.more)

    def event(self, event: TraceAction | TraceStep) -> dict[str, Any]:
        """A stream chunk with a loop's latest step.

        It is shown as reasoning in programs that know OpenAI's API only; the page reads the fields under "tripletune".
        """
        if isinstance(event, TraceAction):
            kind, line = "plan", one_line(event.reply)
        else:
            titles = ", ".join(cited(passage) for passage in event.passages)
            kind, line = "retrieve", f"{event.query}: {titles or 'nothing found'}"
        about = {"event": kind, **{name: getattr(event, name) for name in event.__slots__}}
        return self._chunk("", {"reasoning_content": f"{kind}  {line}\n"}, tripletune=about)

    def chunks(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """The last chunks of a stream: the answer, the finish reason, and on request the token usage."""
        yield self._chunk(answer.text, {"content": answer.text, **_cited(answer)})
        yield self._chunk("", {}, answer.finish_reason, **answer.more)
        if self._asked.stream_options and self._asked.stream_options.include_usage:
            yield {**self._object(".chunk", {}, None, usage=answer.usage), "choices": []}

    def _chunk(self, text: str, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        """An object of a stream: for a chat what its message gets, else a text.

        The role is sent once and then forgotten, so chunks must be made in the order in which they are sent.
        """
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
