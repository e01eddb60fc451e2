"""Training data of models on plain text: text-to-triples pairs and a teacher's trajectories.

**Pairs** (RAS, 3.2 and D.1) are stored as one JSON object per line:
`{"id", "text", "title", "triples": [[s, p, o]], "source"}`; text and triples are required. Training and extraction both
call `render_source`, `format_triples` and `extraction_chat`, so a model reads the same form in both.

    source   Oslo: Oslo is the capital of Norway.
    target   (S> Oslo| P> capital of| O> Norway)

A text without facts has an empty target. A text that is only a name has the target `(S> NAME| P> is| O> NAME)`
(figure 19, rule 7).

**Trajectories** (CIRAG, section 3.5, eq. 7 and 8) are chats of a teacher, stored as one JSON object per line:
`{"id", "question_id", "role", "model", "messages": [{"role", "content"}], "learned": [bool]}`. `learned` marks the
messages in the loss: the teacher's decisions y_t, not retrieved text. Chats in other trainers' layouts are read too
(`core.data.chats`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tripletune.core.calls import Message
from tripletune.core.data.answers import SIGNS
from tripletune.core.data.chats import chat_row, check_role, row_digest
from tripletune.core.data.fields import checked, name_field
from tripletune.core.data.triples import Triple, format_triples, triples_from_json
from tripletune.core.files import PROMPTS, read_prompt
from tripletune.core.rows import rows_of_split

PROMPT = PROMPTS / "models" / "extract_triples.md"
# What a chat model writes for a text without facts, since no service accepts an empty reply.
NO_FACTS = "NONE"

_TEXTS = ("id", "question_id", "role", "model", "rejected?")
_TRAJECTORY = dict.fromkeys(_TEXTS, str) | {"messages": [{"role": str, "content": str}], "learned": [bool]}
_HUMP = re.compile(r"(?<=[a-z0-9])([A-Z])(?=[a-z])")


@dataclass(frozen=True, slots=True)
class ExtractionPair:
    """A text and its facts."""

    id: str
    text: str
    title: str = ""
    triples: tuple[Triple, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"pair {self.id!r}: the text is empty")

    @property
    def source_text(self) -> str:
        """The text that the model reads; see `render_source`."""
        return render_source(self.title, self.text)

    @property
    def target(self) -> str:
        """The text to learn: triples in RAS's format, or an empty text."""
        return format_triples(self.triples)

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored, in the layout of `PAIRS`; `from_json` reads it back."""
        triples = [triple.as_list() for triple in self.triples]
        return {"id": self.id, "text": self.text, "title": self.title, "triples": triples, "source": self.source}

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str = "pair") -> ExtractionPair:
        """Read a stored row; `where` (file and line) opens every error message.

        Rows of others may have no id, title or source, and triples as text; see `triples_from_json`.

        Raises:
            ValueError: The text or the triples are missing or malformed.
        """
        layout: dict[str, Any] = {"text": str, "title?": str, "source?": str}
        if not isinstance(row.get("triples"), str):
            # A text holds the triples in RAS's format, or their list.
            layout["triples"] = list
        fields = checked(row, where, layout)
        fields["id"] = name_field(row, where, "id") or row_digest(row)
        fields["triples"] = triples_from_json(row["triples"], where)
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def render_source(title: str, text: str) -> str:
    """The title, if there is one, and the text, on one line.

    A colon separates them, because SentencePiece tokenizers (Flan-T5) drop line breaks.
    """
    text = " ".join(text.split())
    title = " ".join(title.split())
    return f"{title}: {text}" if title else text


def extraction_chat(source_text: str, instruction: str) -> list[Message]:
    """The chat for a chat model: the instruction is the system message, the text is the user's message."""
    return [{"role": "system", "content": instruction}, {"role": "user", "content": source_text}]


def load_instruction(path: str | Path | None = None) -> str:
    """The instruction of a trained extractor, from a file; None: `tripletune/prompts/models/extract_triples.md`."""
    return read_prompt(path or PROMPT)


def is_only_a_name(title: str, text: str) -> bool:
    """Whether a passage is only a name: its text repeats its title, or is empty.

    False for a text without a title, since only a model can tell whether "Oslo" is a name.
    """
    name, body = [" ".join(words.split()).rstrip(".").casefold() for words in (title, text)]
    return bool(name) and body in ("", name)


def entity_triple(name: str) -> Triple:
    """The triple of a text that is only a name (RAS, figure 19, rule 7)."""
    return Triple(name, "is", name)


def predicate_words(predicate: str) -> str:
    """A predicate as words: `birthPlace` and `birth_place` both become "birth place".

    Knowledge graphs name relations so, while extractors write them in words; a predicate of signs alone stays.
    """
    words = " ".join(_HUMP.sub(lambda match: f" {match[1].lower()}", predicate).replace("_", " ").split())
    # "Birth place" becomes "birth place", but "NBA team" stays.
    begins_with_capital = words[:1].isupper() and not words[1:2].isupper()
    if begins_with_capital:
        return words[:1].lower() + words[1:]
    return words or predicate


def spelling_in(name: str, text: str) -> str:
    """A name in the spelling of the text if the text has the name as whole words, else unchanged.

    If the text spells it in several ways, the name's own spelling stays if it is one of them; otherwise the first one
    in the text counts. The places of the two texts in lower case must be those of the originals.
    """
    lower_text = text.lower().translate(SIGNS)
    lower_name = name.lower().translate(SIGNS)
    # A letter such as "İ" is two characters in lower case, and then the places in the two texts differ.
    if len(lower_text) != len(text) or len(lower_name) != len(name):
        return name
    spellings = []
    start = lower_text.find(lower_name)
    while start >= 0:
        end = start + len(name)
        before = text[start - 1 : start] if start else ""
        after = text[end : end + 1]
        if not before.isalnum() and not after.isalnum():
            spellings.append(text[start:end])
        start = lower_text.find(lower_name, start + 1)
    if not spellings or name in spellings:
        return name
    return spellings[0]


def read_pairs(path: str | Path, split: str | None = None) -> Iterator[ExtractionPair]:
    """Stream the pairs of a file or of one split of a folder, in file order, with constant memory."""
    for where, row in rows_of_split(path, split):
        yield ExtractionPair.from_json(row, where)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A chat and its loss mask; `role` names the kind of call, for example "cirag.integrate", `model` the teacher.

    In a preference pair, `rejected` is the worse last turn.
    """

    id: str
    question_id: str
    role: str
    model: str
    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    rejected: str = ""

    def __post_init__(self) -> None:
        """Refuse a chat whose loss mask does not fit it, or from which nothing would be learned."""
        if len(self.messages) != len(self.learned):
            raise ValueError(
                f"trajectory {self.id!r}: {len(self.messages)} messages but {len(self.learned)} learned flags"
            )
        if not any(self.learned):
            raise ValueError(f"trajectory {self.id!r}: no turn is learned: it has no reply, or only of weight 0")

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored, in the layout of `TRAJECTORIES`; a rejected reply is only there for pairs."""
        row = asdict(self)
        row["messages"] = list(self.messages)
        row["learned"] = list(self.learned)
        if not self.rejected:
            del row["rejected"]
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str = "trajectory") -> Trajectory:
        """Read a stored row, or a chat; `where` (file and line) opens every error message.

        Only a stored trajectory has `learned`; a chat of another trainer says in its own way what is learned.
        """
        stored = row if "learned" in row else chat_row(row, where)
        fields = checked(stored, where, _TRAJECTORY)
        turns: list[Message] = [{"role": turn["role"], "content": turn["content"]} for turn in fields.pop("messages")]
        for turn in turns:
            check_role(turn["role"], where)
        try:
            return cls(messages=tuple(turns), learned=tuple(fields.pop("learned")), **fields)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def read_trajectories(path: str | Path, split: str | None = None) -> Iterator[Trajectory]:
    """Stream the trajectories of a file, or of one split of a folder, in file order."""
    for where, row in rows_of_split(path, split):
        yield Trajectory.from_json(row, where)
