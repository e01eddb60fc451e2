"""Read chats in the layouts of other trainers: their turns, which replies are learned, and the rejected reply.

A row has its turns in `messages` or `conversations` (TRL, ShareGPT), or in columns: `prompt` and `completion`, `query`
and `response` (ms-swift), `question` and `answer`, a prompt and `chosen`, or `instruction`, `input` and `output`
(Alpaca). Beside any of these, `system` holds the system prompt, `history` earlier rounds, and `rejected` (ms-swift:
`rejected_response`, `rejected_messages`) the worse reply of a pair.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tripletune.core.data.fields import checked, given, is_true, name_field, shown, text_field, unfolded

# The model of a chat whose row names none.
UNNAMED_MODEL = "custom"
# The columns of a question and of its reply, where a row has no list of turns.
_ASKED = ("prompt", "query", "question")
_REPLIES = ("completion", "output", "response", "answer", "chosen")
_SPEAKERS = {"developer": "system", "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_ROLES = ("system", "user", "assistant")
# Roles of calls and results of tools: OpenAI and Llama, LLaMA-Factory, ms-swift.
_TOOL_ROLES = ("tool", "function", "ipython", "function_call", "observation", "tool_call", "tool_response")
# Fields of a reply that call a tool, beside its text: OpenAI, now and before.
_CALLS = ("tool_calls", "function_call")
# Flags of a turn, each of which says whether its reply is learned: ms-swift, axolotl, verl and OpenAI.
_FLAGS = ("loss", "loss_mask", "train", "training", "trainable", "weight")
# Other names of a turn's field, or of a row's column, that say what is learned in a way that is not read here.
_OTHER_FLAG = re.compile("loss|mask|train|weight|learn", re.IGNORECASE)
_MASK = re.compile("mask", re.IGNORECASE)
# How a list of messages begins that is stored as text (JSON, or as Python prints it).
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")


class Turn(NamedTuple):
    """A turn of a chat, and whether it is learned."""

    role: str
    content: str
    is_learned: bool


def chat_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert a chat in another trainer's layout to a stored trajectory (`core.data.pairs.Trajectory`).

    Every reply is learned, except replies in `prompt`, replies before the last one of `chosen`, replies that a flag of
    their turn excludes (`"loss": false`, `"weight": 0` and others), and a greeting, which replies to nothing.

    Raises:
        ValueError: The row is no chat, or says what is learned in a way that is not read.
    """
    turns = _all_turns(row, where)
    if turns and turns[0].role == "assistant":
        turns = [*_not_learned(turns[:1]), *turns[1:]]
    _check_marks(row, where)
    asked = [turn.content for turn in turns if turn.role == "user"]
    # The first question stands for the chat: chats with the same one are never in training and validation both.
    first = asked[0] if asked else ""
    return {
        "id": name_field(row, where, "id") or row_digest(row),
        "question_id": name_field(row, where, "question_id") or row_digest(first),
        "role": name_field(row, where, "role") or "chat",
        "model": name_field(row, where, "model") or UNNAMED_MODEL,
        "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
        "learned": [turn.is_learned for turn in turns],
        "rejected": _rejected_reply(row, where, turns),
    }


def is_chat(row: dict[str, Any]) -> bool:
    """Whether the columns of a row are those of a chat or of a pair of replies, whatever they hold.

    A question with `steps` is one for a planner, though it has an answer.
    """
    if given(row, "messages", "conversations", "chosen") is not None:
        return True
    has_question = given(row, *_ASKED, "instruction") is not None
    return has_question and given(row, *_REPLIES) is not None and "steps" not in row


def check_role(role: str, where: str) -> None:
    """Refuse a role that no chat template is known to have; tools are named, since many chats use them.

    Raises:
        ValueError: The role is not system, user or assistant.
    """
    if role in _TOOL_ROLES:
        raise _tool_error(f"a turn of the role {role!r}", where)
    if role not in _ROLES:
        raise ValueError(f"{where}: the role of a message must be one of {', '.join(_ROLES)}, not {role!r}")


def row_digest(row: object) -> str:
    """A fingerprint of a JSON value, for rows without an id; stored data refer to it."""
    return hashlib.blake2b(json.dumps(row, default=str).encode(), digest_size=8).hexdigest()


def _tool_error(what: str, where: str) -> ValueError:
    """The error for a chat that uses tools, whatever program reads it."""
    return ValueError(
        f"{where}: the chat has {what}, but calls and results of tools are not trained: leave such chats out, or write "
        "each call as the text of an assistant's turn and each result as the text of a user's turn"
    )


def _all_turns(row: dict[str, Any], where: str) -> list[Turn]:
    """All turns of a row: system prompt, earlier rounds, and the chat itself.

    A system prompt may stand in a column and as the first turn; two different ones are refused, since either could be
    the one that is meant.
    """
    stored = given(row, "messages", "conversations")
    if stored is None:
        chat = _turns_of_columns(row, where)
    else:
        chat = _read_turns(stored, where, "messages")
        lacks_reply = bool(chat) and chat[-1].role != "assistant"
        if lacks_reply:
            # LLaMA-Factory's preference pairs have the reply beside the conversation.
            chat += _read_turns(given(row, "chosen"), where, "chosen")
    system = _read_turns(given(row, "system", "system_prompt", "system_message"), where, "system", "system")
    if chat and chat[0].role == "system":
        if system and chat[0].content.strip() != system[0].content.strip():
            raise ValueError(f"{where}: the column system and the first turn are two system prompts: keep one of them")
        system = chat[:1]
        chat = chat[1:]
    return system + _history_turns(row, where) + chat


def _check_marks(row: dict[str, Any], where: str) -> None:
    """Refuse a row that marks its reply as a bad one, or turns by a list beside them.

    Rows for KTO say by `label` or `kto_tag` whether a reply is good; a bad one must not be learned like a good one.
    """
    # Not with `get`, by which a column would count as read. Cells of a table are text.
    for name, value in row.items():
        if name in ("label", "kto_tag") and str(value).strip().lower() == "false":
            raise ValueError(f"{where}: {name} is false, so the reply is a bad example: leave such rows out")
        if _MASK.search(name) and value not in (None, [], ""):
            raise ValueError(f"{where}: the column {name} is not read: mark the turns themselves, by loss: false")


def _turns_of_columns(row: dict[str, Any], where: str) -> list[Turn]:
    """The turns of a row with prompt and completion, under any of their names, or with instruction, input and output.

    Only the reply is learned. These are the layouts of TRL, ms-swift and Alpaca; "chosen" is the better reply of a
    pair.

    Raises:
        ValueError: The row has neither, or lacks the reply.
    """
    asked = given(row, *_ASKED)
    reply = given(row, *_REPLIES)
    replies = _read_turns(reply, where, "completion", "assistant")
    if replies and replies[0].role != "assistant":
        # A whole chat, as `chosen` often is; the prompt, if there is one, is repeated in it.
        return [*_not_learned(replies[:-1]), replies[-1]]
    if not asked:
        # Dolly's input is its context.
        texts = [text_field(row, where, "instruction"), text_field(row, where, "input", "context")]
        asked = "\n\n".join(text for text in texts if text)
    if not asked or not reply:
        raise ValueError(
            f"{where}: the row is no chat: it needs messages, conversations, prompt and completion, query and "
            f"response, question and answer, or instruction and output, but it has {', '.join(row) or 'no field'} "
            "(a pair for text-to-triples has text and triples)"
        )
    return _not_learned(_read_turns(asked, where, "prompt", "user")) + replies


def _not_learned(turns: Sequence[Turn]) -> list[Turn]:
    """Turns of a prompt, whose replies were written before the one that the row is about."""
    return [turn._replace(is_learned=False) for turn in turns]


def _history_turns(row: dict[str, Any], where: str) -> list[Turn]:
    """The rounds before a chat: pairs of a question and a reply (Alpaca), or messages; a single one may stand alone.

    They are context and not learned, like all turns before the reply.
    """
    rounds = unfolded(given(row, "history"))
    if rounds is None:
        return []
    messages: list[Any] = []
    for entry in rounds if isinstance(rounds, (list, tuple)) else [rounds]:
        if isinstance(entry, dict):
            messages.append(entry)
        elif isinstance(entry, (list, tuple)) and len(entry) == 2:
            messages += [{"role": "user", "content": entry[0]}, {"role": "assistant", "content": entry[1]}]
        else:
            raise ValueError(f"{where}: history must hold pairs of a question and a reply, found {shown(entry)}")
    return _read_turns(messages, where, "history")


def _rejected_reply(row: dict[str, Any], where: str, turns: Sequence[Turn]) -> str:
    """The worse reply of a preference pair, stored as text or as messages; "" without one.

    If the prompt is stored with it, it must end like the chat's: a loss on pairs compares replies to one prompt.
    """
    stored = given(row, "rejected", "rejected_response", "rejected_messages")
    replies = _read_turns(stored, where, "rejected", "assistant")
    if not replies:
        return ""
    earlier = [turn.content for turn in replies[:-1]]
    expected = [turn.content for turn in turns[:-1]]
    has_same_prompt = not earlier or expected[-len(earlier) :] == earlier
    if replies[-1].role != "assistant" or not has_same_prompt:
        raise ValueError(f"{where}: rejected must be another last reply to the same turns; it is {shown(stored)}")
    return replies[-1].content


def _read_turns(stored: Any, where: str, name: str, role: str = "") -> list[Turn]:
    """Read a message, a list of messages, or a text of the given role; [] if nothing is stored.

    A text may hold the list, as a cell of a table does.

    Args:
        name: The column, for error messages.
        role: Who speaks if the column is only text; "" if it may not be.
    """
    if stored is None:
        return []
    if isinstance(stored, str) and (not role or _MESSAGES_AS_TEXT.match(stored)):
        stored = unfolded(stored)
    if isinstance(stored, str) and role:
        return [_turn_of_message({"role": role, "content": stored}, where)]
    messages = [stored] if isinstance(stored, dict) else stored
    return [_turn_of_message(message, where) for message in checked({name: messages}, where, {name: [{}]})[name]]


def _turn_of_message(message: dict[str, Any], where: str) -> Turn:
    """A message in any layout as a turn; a reply is learned unless one of the flags (`_FLAGS`) says no.

    A reply that calls a tool is refused, also if it has text: the model would learn to announce a call and make none. A
    reply without text that is to be learned would teach silence.
    """
    speaker = name_field(message, where, "role", "from")
    role = _SPEAKERS.get(speaker, speaker)
    check_role(role, where)
    for name in _CALLS:
        if given(message, name) is not None:
            raise _tool_error(f"a turn with {name}", where)
    content = given(message, "content", "value")
    if content is None:
        content = ""
    if isinstance(content, list):  # only the text parts are read
        content = "".join(text_field(part, where, "text") for part in content)
    for name, value in message.items():
        if name not in _FLAGS and _OTHER_FLAG.search(name) and value not in (None, []):
            raise ValueError(
                f"{where}: {name} of a turn is not read: say by one of {', '.join(_FLAGS)} whether the turn is learned"
            )
    # Other trainers set the weight of every turn.
    marks = [flag for flag in _FLAGS if flag != "weight" and role != "assistant" and is_true(message, where, flag)]
    if marks:
        raise ValueError(
            f"{where}: {marks[0]} is true for a turn of {role or 'nobody'}, but only replies are learned: take it "
            "away, or set data.learn to everything and leave out all flags"
        )
    is_learned = role == "assistant" and all(is_true(message, where, flag, True) for flag in _FLAGS)
    if is_learned and not str(content).strip():
        raise ValueError(f"{where}: a reply to learn has no text: leave it out, or give it the weight 0")
    return Turn(role, content, is_learned)
