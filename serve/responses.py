"""OpenAI's Responses API (`/v1/responses`): requests become chats, and replies have items.

A reply is kept in memory, so that a later request can continue it by `previous_response_id`, or name its message.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, Field, PrivateAttr

from tripletune.core.calls import Message
from tripletune.rag import TraceAction, TraceStep
from tripletune.serve.limits import Refused
from tripletune.serve.protocol import (
    NO_LOGPROBS,
    Answer,
    AskedChat,
    ChatTurn,
    JsonObject,
    Layout,
    progress_of,
    unsupported,
)
from tripletune.serve.schemas import read_schema

# Characters of all chats that are kept; the oldest are forgotten first.
_KEPT = 2**26
_NOT_KEPT = "it is kept in this server's memory, unless `store` is false, until newer replies need the room"
# Ends of the types of items that hold calls of tools and their results.
_TOOL_ITEMS = ("_call", "_output", "_approval_request", "_approval_response", "_list_tools")


def _as_turns(items: object) -> object:
    """The items of an `input` as turns of a chat; calls of tools and their results become turns with the role tool.

    Reasoning is left out: it is what an earlier reply showed of its loop.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        return items
    turns = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind == "item_reference":
            turns.append({"role": "assistant", "reference": item.get("id")})
        elif isinstance(kind, str) and kind.endswith(_TOOL_ITEMS):
            turns.append({"role": "tool"})
        elif kind != "reasoning":
            turns.append(item)
    return turns


def _read_format(text: object) -> dict[str, Any] | None:
    """The JSON schema of `text.format`, whose fields are not nested as those of `response_format` are."""
    if text is None:
        return None
    if not isinstance(text, dict):
        raise ValueError("it should be an object with a format")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return read_schema(form)


def _check_include(fields: object) -> None:
    """Refuse log-probabilities; the other fields are of items that a reply here never has."""
    if isinstance(fields, list) and "message.output_text.logprobs" in fields:
        raise ValueError(NO_LOGPROBS)


class _Item(ChatTurn):
    """A turn, or the id of an item of an earlier reply that stands for it."""

    reference: str = ""


class AskedResponse(AskedChat):
    """A request of `/v1/responses`; fields that other routes call otherwise have the names of these routes here."""

    own_names: ClassVar[Mapping[str, str]] = {"messages": "input", "response_format": "text"}
    messages: Annotated[list[_Item], BeforeValidator(_as_turns)] = Field([], alias="input")  # type: ignore[assignment]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, alias="max_output_tokens")
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(_read_format)] = Field(None, alias="text")
    metadata: dict[str, str] | None = None
    store: bool | None = None
    include: Annotated[None, BeforeValidator(_check_include)] = None
    background: Annotated[None, unsupported("a reply comes with its request: leave background out")] = None
    conversation: Annotated[None, unsupported("conversations are not kept: send previous_response_id")] = None
    prompt: Annotated[None, unsupported("templates of prompts are not kept: send input")] = None
    chat_format: Annotated[None, unsupported("in responses, send text.format")] = Field(None, alias="response_format")
    # Turns of the replies before this request.
    _earlier: list[Message] = PrivateAttr(default_factory=list)

    @property
    def turns(self) -> list[Message]:
        """The chat, with the turns before this request."""
        instructions = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*instructions, *self.history]

    @property
    def history(self) -> list[Message]:
        """The chat without `instructions`, which are for one reply."""
        return [*self._earlier, *super().turns]

    def continue_from(self, earlier: list[Message]) -> None:
        """Put turns before those of the request."""
        self._earlier = earlier


class _Chat(NamedTuple):
    """A chat that ends with a reply, and the number of its characters."""

    turns: list[Message]
    length: int


class Kept:
    """The chats behind the replies of a server, by the random letters of a reply's ids.

    Chats share their texts, but each counts with its whole length, so that memory is limited however they continue.
    """

    def __init__(self, limit: int = _KEPT) -> None:
        self._limit = limit
        self._length = 0
        self._chats = OrderedDict[str, _Chat]()

    def complete(self, asked: AskedResponse) -> None:
        """Give a request the turns and the messages that it names by their ids.

        Raises:
            Refused: One of them is not kept.
        """
        if asked.previous_response_id is not None:
            asked.continue_from(self._turns_behind(asked.previous_response_id, "resp_", "previous_response_id"))
        for item in list(asked.messages):
            if item.reference.startswith("rs_"):
                asked.messages.remove(item)
            elif item.reference:
                item.content = self._turns_behind(item.reference, "msg_", "input")[-1]["content"]

    def add(self, asked: AskedResponse, reply: str) -> None:
        """Keep a request's chat with its reply, and forget the oldest chats if all are too long together."""
        if asked.store is False:
            return
        turns = [*asked.history, Message(role="assistant", content=reply)]
        length = sum(len(turn["content"]) for turn in turns)
        self._chats[asked.name] = _Chat(turns, length)
        self._length += length
        while self._length > self._limit:
            _, oldest = self._chats.popitem(last=False)
            self._length -= oldest.length

    def _turns_behind(self, identifier: str, prefix: str, param: str) -> list[Message]:
        """The chat that ends with the reply of an id, or a `Refused` if it is not kept.

        Args:
            identifier: The id of a reply or of its message, as the client sends it.
            prefix: What ids of this kind begin with.
            param: The field of the request that has the id.
        """
        chat = self._chats.get(identifier.removeprefix(prefix))
        if chat is None or not identifier.startswith(prefix):
            reason = f"{param}: there is no {identifier[:100]!r}: {_NOT_KEPT}; or send the earlier turns as input"
            raise Refused(400, reason, "previous_response_not_found", param)
        return chat.turns


class ResponseLayout(Layout):
    """The replies of `/v1/responses`: a loop's steps are a reasoning item, the answer is a message."""

    def __init__(self, asked: AskedResponse) -> None:
        self._asked = asked
        self._created = int(time.time())
        self._events = 0
        self._lines: list[str] = []

    def whole(self, answer: Answer) -> JsonObject:
        """The reply without streaming."""
        status = "completed" if answer.finish_reason == "stop" else "incomplete"
        why = "max_output_tokens" if answer.finish_reason == "length" else answer.finish_reason
        reasoning = [self._reasoning_item()] if self._lines else []
        read, written = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        details = {"reason": why} if status == "incomplete" else None
        output = [*reasoning, self._message_item(status, [_text_part(answer)])]
        return {**self._response_object(status, output), "incomplete_details": details, "usage": usage, **answer.more}

    def start(self) -> list[JsonObject]:
        """What a stream begins with."""
        response = self._response_object("in_progress", [])
        return [self._numbered_event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def step(self, event: TraceAction | TraceStep) -> list[JsonObject]:
        """A part of the reasoning item with a loop's latest step."""
        progress = progress_of(event)
        events = []
        if not self._lines:
            events.append(
                self._numbered_event("response.output_item.added", output_index=0, item=self._reasoning_item())
            )
        place = {"item_id": f"rs_{self._asked.name}", "output_index": 0, "summary_index": len(self._lines)}
        # Clients join the parts without a space.
        line = f"{progress.line}\n"
        self._lines.append(line)
        empty, note = _summary_part(""), _summary_part(line)
        kind = "response.reasoning_summary"
        return [
            *events,
            self._numbered_event(f"{kind}_part.added", **place, part=empty),
            self._numbered_event(f"{kind}_text.delta", **place, delta=line, tripletune=progress.fields),
            self._numbered_event(f"{kind}_text.done", **place, text=line),
            self._numbered_event(f"{kind}_part.done", **place, part=note),
        ]

    def finish(self, answer: Answer) -> list[JsonObject]:
        """The last events: the end of the reasoning, the message with its citations, and the whole reply."""
        events = []
        if self._lines:
            events.append(
                self._numbered_event("response.output_item.done", output_index=0, item=self._reasoning_item())
            )
        response = self.whole(answer)
        place = {"output_index": len(response["output"]) - 1}
        message = response["output"][-1]
        (part,) = message["content"]
        events.append(
            self._numbered_event("response.output_item.added", **place, item=self._message_item("in_progress", []))
        )
        inside = {"item_id": message["id"], **place, "content_index": 0}
        empty = {**part, "text": "", "annotations": []}
        events.append(self._numbered_event("response.content_part.added", **inside, part=empty))
        events.append(self._numbered_event("response.output_text.delta", **inside, delta=answer.text, logprobs=[]))
        for number, note in enumerate(part["annotations"]):
            kind = "response.output_text.annotation.added"
            events.append(self._numbered_event(kind, **inside, annotation_index=number, annotation=note))
        events.append(self._numbered_event("response.output_text.done", **inside, text=answer.text, logprobs=[]))
        events.append(self._numbered_event("response.content_part.done", **inside, part=part))
        events.append(self._numbered_event("response.output_item.done", **place, item=message))
        events.append(self._numbered_event(f"response.{response['status']}", response=response))
        return events

    def fail(self, refusal: Refused) -> JsonObject:
        """The event of a stream that ends with an error."""
        error = refusal.to_json()["error"]
        return self._numbered_event("error", code=error["code"], message=error["message"], param=error["param"])

    def line(self, value: JsonObject) -> str:
        """An event with its type in front, by which clients choose."""
        return f"event: {value['type']}\n{super().line(value)}"

    def _numbered_event(self, kind: str, **fields: Any) -> JsonObject:
        """The next event of the stream, with its fields; each one counts, so it must be sent in this order."""
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _response_object(self, status: str, output: list[JsonObject]) -> JsonObject:
        """The reply with the fields that clients expect in each, also those that have one value here."""
        asked = self._asked
        return {
            "id": f"resp_{asked.name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": asked.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }

    def _reasoning_item(self) -> JsonObject:
        """The item of the steps so far."""
        return {
            "id": f"rs_{self._asked.name}",
            "type": "reasoning",
            "summary": [_summary_part(line) for line in self._lines],
        }

    def _message_item(self, status: str, content: list[JsonObject]) -> JsonObject:
        """The item of the answer; its id is the one that a later request may name."""
        message = {"id": f"msg_{self._asked.name}", "type": "message", "role": "assistant"}
        return {**message, "status": status, "content": content}


def _summary_part(line: str) -> JsonObject:
    """A line of the reasoning, as an item has it."""
    return {"type": "summary_text", "text": line}


def _text_part(answer: Answer) -> JsonObject:
    """The text of the answer with its citations, as an item has it."""
    notes = [{"type": "url_citation", **citation} for citation in answer.citations]
    return {"type": "output_text", "text": answer.text, "annotations": notes, "logprobs": []}
