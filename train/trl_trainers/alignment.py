"""Align a reply's tokens of two tokenizers by the bytes of its text, and find outcomes that both models can predict.

A *span* is the shortest piece of a reply between two places where both tokenizers have a border. Before a span, both
models have read the same text, so what each of them expects next can be compared. As in GOLD (Patiño et al., 2025,
"Unlocking On-Policy Distillation for Any Model Family"), the probability of a span of several tokens is the product of
theirs, and a token of one vocabulary is a token of the other if both stand for the same bytes.

Bytes and not characters, since tokens may end inside of a character.

Tested in `tests/train/test_other_family.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from tripletune.core.calls import Message
from tripletune.models.control_tokens import control_tokens, template_ids, text_ids
from tripletune.models.local.chat import ChatEncoder, eos_token_ids

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

# The class of a token that is no outcome: control tokens, padding of an output layer.
NO_CLASS = -1
_END_CLASS = 0
# SentencePiece writes a space so, and a byte that is no character of its vocabulary as <0x0A>.
_SPACE = "\u2581"
_BYTES = {f"<0x{number:02X}>": bytes([number]) for number in range(256)}
# A text that shows whether the bytes of the tokens are those of the text: spaces, line breaks, accents, other scripts.
_PROBE = "The  cat's café,\n\tNo. 10: (S> 東京| P> 🙂 )\n\n"


class AlignedSpan(NamedTuple):
    """A piece of a reply: the student's tokens and the teacher's tokens that stand for the same bytes."""

    student: range
    teacher: range

    @property
    def is_merged(self) -> bool:
        """Whether a side has several tokens, whose probabilities are multiplied."""
        return len(self.student) > 1 or len(self.teacher) > 1


class Unscored(NamedTuple):
    """The student's tokens that lie in no span, by reason.

    Attributes:
        no_border: They come after the last border that both tokenizers have: bytes of incomplete characters, or control
            tokens, which are no text.
        cut: They belong to the last span of a reply that was cut off at its limit. The teacher may have expected one
            token that goes on after the cut, so its probability for the part says nothing.
        too_long: Prompt and reply do not fit into the teacher's context.
    """

    no_border: int = 0
    cut: int = 0
    too_long: int = 0


class AlignedReply(NamedTuple):
    """A reply of the student in the teacher's tokens.

    Attributes:
        teacher_ids: The teacher's tokens of the text, with its end token if the student ended the reply.
        spans: In the order of the text; those at the same place in both models.
        unscored: What no span holds.
    """

    teacher_ids: list[int]
    spans: list[AlignedSpan]
    unscored: Unscored


class SharedClasses(NamedTuple):
    """The outcomes that student and teacher can both predict, as classes of their tokens.

    A token that both tokenizers write is a class. Every other token belongs to the class of the longest beginning of
    its bytes that is such a token: a teacher that expects " Zanzibar" expects a student that lacks this token to write
    " Zan" first. A token that a vocabulary has, but that its tokenizer does not write before a word (`_unwritten`), is
    no class: one model's token for two line breaks would be compared with the other's for the first of two, as if they
    began different texts. All tokens that end a reply are one class. So both models give the classes probabilities that
    sum to 1, and no token is left whose probability could only be compared by its rank, as in ULD (Boizard et al.,
    2024).

    Attributes:
        student: The class of each student token, (V_student,), or `NO_CLASS`.
        teacher: The class of each teacher token, (V_teacher,), or `NO_CLASS`.
        size: The number of classes C.
    """

    student: torch.Tensor
    teacher: torch.Tensor
    size: int


@dataclass(frozen=True)
class ByteVocabulary:
    """A tokenizer as the alignment reads it.

    Attributes:
        name: The model's name in messages.
        pieces: The bytes of each token, by id; None for control tokens.
        unwritten: Pieces of white space or digits that the tokenizer writes as several tokens before a word.
        ends: Tokens that end a reply; the first one is the model's usual one.
    """

    tokenizer: PreTrainedTokenizerBase
    name: str
    pieces: list[bytes | None]
    unwritten: frozenset[bytes]
    ends: list[int]


def byte_vocabulary(chat: ChatEncoder, generation_config: GenerationConfig | None = None) -> ByteVocabulary:
    """Read the vocabulary of a chat model.

    Raises:
        ValueError: The tokens can't be turned into the bytes of a text.
    """
    tokenizer = chat.tokenizer
    pieces = token_bytes(tokenizer)
    ids = text_ids(tokenizer, [_PROBE])[0]
    if b"".join(pieces[token] or b"" for token in ids) != _PROBE.encode():
        raise ValueError(
            f"the tokens of {chat.model} can't be aligned with those of another tokenizer: together they are not the "
            "text (the tokenizer changes letters, or puts a space before a text); use a model whose tokenizer works on "
            "bytes (Llama 3, Qwen, SmolLM, Mistral Nemo) or is Gemma's"
        )
    usual = end_of_reply(chat)
    others = [token for token in eos_token_ids(tokenizer, generation_config) if token != usual]
    return ByteVocabulary(tokenizer, chat.model, pieces, _unwritten(tokenizer, pieces), [usual, *others])


def _unwritten(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[bytes | None]) -> frozenset[bytes]:
    """Pieces of white space or digits alone that the tokenizer writes as several tokens before a word.

    Tokenizers cut a text before they merge its characters. GPT-2's cut leaves the last white space before a word alone:
    it has a token for two line breaks, but writes two tokens before a heading. Others cut numbers into digits.
    """
    tokens = []
    texts = []
    for token, piece in enumerate(pieces):
        if piece and len(piece) > 1 and (piece.isspace() or piece.isdigit()):
            tokens.append(token)
            texts.append(piece.decode())
    unwritten: set[bytes] = set()
    for follower in ("a", " a"):
        rows = text_ids(tokenizer, [text + follower for text in texts]) if texts else []
        for token, ids in zip(tokens, rows, strict=True):
            if ids[0] != token:
                unwritten.add(pieces[token] or b"")
    return frozenset(unwritten)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes | None]:
    """The bytes of text that each token stands for, by id; None for control tokens and unused ids.

    Byte-level tokenizers write a byte as a letter (GPT-2's table); others write a space as "▁", and rare bytes as
    "<0x0A>".
    """
    vocabulary = tokenizer.get_vocab()
    pieces: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    letters = _byte_letters()
    core = getattr(tokenizer, "backend_tokenizer", None)
    is_byte_level = core is not None and "ByteLevel" in f"{core.pre_tokenizer}{core.decoder}"
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    control = control_tokens(tokenizer)
    for token, number in vocabulary.items():
        if number in control:
            continue
        if number in added:
            # An added token is written as it is.
            pieces[number] = added[number].encode()
        elif is_byte_level:
            if all(letter in letters for letter in token):
                pieces[number] = bytes(letters[letter] for letter in token)
        else:
            pieces[number] = _BYTES.get(token) or token.replace(_SPACE, " ").encode()
    return pieces


def end_of_reply(chat: ChatEncoder) -> int:
    """The token with which a model's template ends a reply: the first control token after it; else the end of text."""
    question: Message = {"role": "user", "content": "0"}
    answer: Message = {"role": "assistant", "content": "0"}
    prompt = chat.render([question])
    text = chat.render([question, answer], reply=False)
    control = control_tokens(chat.tokenizer)
    for token in template_ids(chat.tokenizer, text[_common_length(prompt, text) :]):
        if token in control:
            return token
    return int(chat.tokenizer.eos_token_id)


def aligned_spans(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[AlignedSpan]:
    """The spans of two token sequences of a text, up to the last border that both have.

    Where the bytes differ, there is no common text, so the spans end before.
    """
    same = _common_length(b"".join(student), b"".join(teacher))
    student_ends = list(accumulate(map(len, student)))
    teacher_ends = list(accumulate(map(len, teacher)))
    spans: list[AlignedSpan] = []
    student_start = teacher_start = teacher_end = 0
    for student_end, place in enumerate(student_ends, start=1):
        if place > same:
            break
        while teacher_end < len(teacher_ends) and teacher_ends[teacher_end] < place:
            teacher_end += 1
        if teacher_end < len(teacher_ends) and teacher_ends[teacher_end] == place:
            teacher_end += 1
            spans.append(AlignedSpan(range(student_start, student_end), range(teacher_start, teacher_end)))
            student_start = student_end
            teacher_start = teacher_end
    return spans


def align_reply(ids: Sequence[int], student: ByteVocabulary, teacher: ByteVocabulary) -> AlignedReply:
    """Align a reply of the student with the teacher's tokens of its text.

    Args:
        ids: The reply, with its end token unless it was cut off.
    """
    is_ended = bool(ids) and ids[-1] in student.ends
    pieces = []
    for token in ids:
        # An output layer may be wider than its vocabulary.
        is_known = token < len(student.pieces) and token not in student.ends
        piece = student.pieces[token] if is_known else None
        if piece is None:
            break
        pieces.append(piece)
    text = b"".join(pieces).decode(errors="replace")
    teacher_ids = text_ids(teacher.tokenizer, [text])[0]
    teacher_pieces = [teacher.pieces[token] or b"" for token in teacher_ids]
    spans = aligned_spans(pieces, teacher_pieces)
    aligned = spans[-1].student.stop if spans else 0
    cut = 0
    if is_ended:
        # The end can be compared only after the same text.
        if aligned == len(ids) - 1 and (not spans or spans[-1].teacher.stop == len(teacher_ids)):
            last = len(teacher_ids)
            spans.append(AlignedSpan(range(aligned, aligned + 1), range(last, last + 1)))
            aligned += 1
        teacher_ids = [*teacher_ids, teacher.ends[0]]
    elif aligned == len(ids) and spans:
        cut = len(spans.pop().student)
    return AlignedReply(teacher_ids, spans, Unscored(no_border=len(ids) - aligned, cut=cut))


def shared_classes(
    student: ByteVocabulary, teacher: ByteVocabulary, student_width: int, teacher_width: int
) -> SharedClasses:
    """Put the tokens of two vocabularies into the classes that both have; see `SharedClasses`.

    Args:
        student_width: The number of the student's logits, V_student, which may be more than its tokens.
        teacher_width: The same of the teacher, V_teacher.
    """
    in_both = set(student.pieces) & set(teacher.pieces)
    shared = sorted(piece for piece in in_both - student.unwritten - teacher.unwritten if piece)
    classes = {piece: number for number, piece in enumerate(shared, start=_END_CLASS + 1)}
    return SharedClasses(
        _classes_of_tokens(student, classes, student_width),
        _classes_of_tokens(teacher, classes, teacher_width),
        len(classes) + 1,
    )


def _classes_of_tokens(vocabulary: ByteVocabulary, classes: dict[bytes, int], width: int) -> torch.Tensor:
    """The class of each of `width` tokens; `NO_CLASS` for control tokens that end no reply, and for padding."""
    numbers = torch.full((width,), NO_CLASS)
    for token, piece in enumerate(vocabulary.pieces[:width]):
        if token in vocabulary.ends:
            numbers[token] = _END_CLASS
        elif piece:
            numbers[token] = _class_of(piece, classes)
    return numbers


def _class_of(piece: bytes, classes: dict[bytes, int]) -> int:
    """The class of the longest beginning of a token's bytes that is a shared token."""
    for length in range(len(piece), 0, -1):
        number = classes.get(piece[:length])
        if number is not None:
            return number
    return NO_CLASS


def _common_length(one: str | bytes, other: str | bytes) -> int:
    """The number of characters or bytes with which both texts begin."""
    shorter = min(len(one), len(other))
    for place in range(shorter):
        if one[place] != other[place]:
            return place
    return shorter


def _byte_letters() -> dict[str, int]:
    """The byte of each letter of byte-level tokenizers (GPT-2): printable bytes are themselves, others begin at 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for number, byte in enumerate(others):
        letters[chr(256 + number)] = byte
    return letters
