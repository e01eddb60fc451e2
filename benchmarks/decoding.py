"""Compare our decoding with transformers' `generate`, its continuous batching, and a server of llama.cpp.

All ways get the token ids and limits of the chats that a loop had on the questions of a seeded fictional world, and
decode them greedily with the same weights, as fast as they can: each chat is ready at once.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks import MODEL, Options, Result, Way, hide_progress_of_libraries, take_turns
from tripletune.core.options import setting
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval.running import close_clients
from tripletune.eval.suites.questions import QuestionSuite
from tripletune.eval.systems import QuestionOptions
from tripletune.llm.backends import LLMOptions
from tripletune.llm.ledger import Ledger, sampling_of
from tripletune.models.loading import load_language_model, load_tokenizer
from tripletune.models.local import decode
from tripletune.models.local.chat import ChatEncoder, eos_token_ids
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.requests import Request
from tripletune.models.specs import parse_dtype, usual_dtype

# Tokens of a page of the cache of transformers' continuous batching, its default.
_PAGE = 256
# Its tokens in a forward pass. All prompts at once are slower, since its mask has a column for every token of the pass:
# 13 calls took 31, 30, 30 and 36 s with 256, 512, 1,024 and 2,048, and 95 s with all.
_TOKENS_AT_ONCE = 512


@dataclass(frozen=True)
class DecodingOptions(Options):
    """Options of `decoding`."""

    model: str = setting(MODEL, "chat model that answers the loop's calls")
    system: str = setting("ras", "loop whose calls are decoded", choices=("ras", "t2rag", "ircot"))
    questions: int = setting(32, "questions of the loop", at_least=1)
    rows: int = setting(32, "maximum calls at once", at_least=1)
    dtype: str = setting("auto", "type of the weights here", choices=("auto", "float32", "bfloat16"))
    llama: list[str] = setting(
        [],
        "URLs of servers of llama.cpp, each with the same weights and as many slots as rows, such as "
        "http://127.0.0.1:8080",
    )


class Prompt(NamedTuple):
    """A chat of the loop.

    Attributes:
        ids: Its tokens.
        limit: Maximum tokens of the reply.
        shared: Number of first tokens that other chats share.
    """

    ids: list[int]
    limit: int
    shared: int


class DecodedModel(NamedTuple):
    """What all ways on this machine decode with.

    Attributes:
        ends: End-of-sequence tokens.
        pad: Token for padding.
    """

    model: PreTrainedModel
    ends: list[int]
    pad: int


# The tokens of each prompt's reply, without the end-of-sequence token.
Replies = list[list[int]]


def decoding(options: DecodingOptions) -> Result:
    """Compare the speed of decoding the calls of a loop: ours, transformers' two ways, and llama.cpp's server.

    Rows of transformers' `generate` are sorted by length and padded on the left. Tokens are those that a way wrote, so
    ways whose replies differ compare by tokens per second. "Other replies" counts those that differ from ours.
    """
    hide_progress_of_libraries()
    dtype = usual_dtype(options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        prompts = _prompts_of_loop(options, Path(folder))
    model: Any = load_language_model(options.model, parse_dtype(dtype))
    tokenizer = load_tokenizer(options.model)
    decoded = DecodedModel(model.eval(), eos_token_ids(tokenizer, model.generation_config), int(tokenizer.pad_token_id))
    replies: dict[str, Replies] = {}
    ways = [
        _way("ours", lambda: _our_replies(decoded, prompts, options.rows), replies),
        _way(f"generate, {options.rows} rows", lambda: _padded_replies(decoded, prompts, options.rows), replies),
        _way("generate, 8 rows", lambda: _padded_replies(decoded, prompts, 8), replies),
        _way("generate_batch", lambda: _continuous_replies(decoded, prompts, options.rows), replies),
    ]
    for url in options.llama:

        def ask(url: str = url) -> Replies:
            """Ask a server for all replies."""
            return asyncio.run(_llama_replies(url, prompts, options.rows, decoded.ends))

        ways.append(_way(f"llama.cpp at {url}", ask, replies))
    take_turns(ways, options.repeats)
    rows = []
    for way in ways:
        written = replies[way.name]
        differing = 0
        for ours, theirs in zip(replies["ours"], written, strict=True):
            differing += ours != theirs
        rows.append(
            way.row("calls", "tokens", calls=len(prompts), tokens=sum(map(len, written)))
            | {
                "slowest_and_fastest": f"{max(way.seconds):.3g} {min(way.seconds):.3g}",
                "times_as_fast_as": way.median / ways[0].median,
                "other_replies": differing,
            }
        )
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    return Result(
        f"{len(prompts)} calls of {options.system} on {options.questions} questions, {dtype}, median of "
        f"{options.repeats}",
        "name seconds slowest_and_fastest calls_per_second tokens_per_second tokens times_as_fast_as other_replies",
        rows,
        [
            f"prompts of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}",
            "times as fast as: seconds of the row, divided by ours",
        ],
    )


def _way(name: str, decode_all: Callable[[], Replies], replies: dict[str, Replies]) -> Way:
    """A way that decodes all prompts, and keeps its replies."""

    def work() -> float:
        """Decode once; returns the seconds."""
        start = time.perf_counter()
        replies[name] = decode_all()
        return time.perf_counter() - start

    # A pass is long and compiles nothing, so none is lost to warm up.
    return Way(name, work, warm_up=False)


def _prompts_of_loop(options: DecodingOptions, folder: Path) -> list[Prompt]:
    """Answer the questions with the loop, and return the calls that it made, in their order."""
    write_world(WorldOptions(options.seed, train=0, validation=0, test=options.questions), folder)
    ledger = folder / "ledger.sqlite"
    teacher = LLMOptions("hf", options.model, ledger=str(ledger), batch_size=options.rows, dtype=options.dtype)
    run = QuestionOptions(
        system=options.system,
        task="hotpotqa",
        data=f"{folder}/test.jsonl",
        output=str(folder / "run"),
        corpus=f"{folder}/test.corpus.jsonl",
        triples=f"{folder}/test.triples.jsonl",
        retriever="bm25",
    )
    asyncio.run(_answer_questions(QuestionSuite(run, teacher)))
    encoder = ChatEncoder(load_tokenizer(options.model), options.model)
    prompts = []
    with closing(Ledger(ledger)) as stored, stored.connected() as connection:
        for messages, sampling in connection.execute("SELECT messages, sampling FROM calls WHERE status = 'ok'"):
            chat = json.loads(messages)
            ids = encoder.encode(chat)
            prompts.append(Prompt(ids, sampling_of(sampling).max_tokens, encoder.shared_length(chat, ids)))
    return prompts


async def _answer_questions(suite: QuestionSuite) -> None:
    """Open a suite and ask all its questions at once."""
    suite.open()
    try:
        await asyncio.gather(*(suite.ask([question]) for question in suite.items()))
    finally:
        await close_clients(suite)


def _our_replies(decoded: DecodedModel, prompts: Sequence[Prompt], rows: int) -> Replies:
    """The replies of our decoder, which is made anew, so that no pass finds what another one has read."""
    requests = [Request(prompt.ids, prompt.limit, prompt.shared) for prompt in prompts]
    decode(make_decoder(decoded.model, decoded.ends, decoded.pad, rows), requests)
    return [request.tokens for request in requests]


@torch.inference_mode()
def _padded_replies(decoded: DecodedModel, prompts: Sequence[Prompt], rows: int) -> Replies:
    """The replies of `generate`: prompts of one limit, sorted by length, padded on the left."""
    order = sorted(range(len(prompts)), key=lambda place: (prompts[place].limit, len(prompts[place].ids)))
    replies: Replies = [[] for _ in prompts]
    while order:
        limit = prompts[order[0]].limit
        batch = [place for place in order[:rows] if prompts[place].limit == limit]
        order = order[len(batch) :]
        width = max(len(prompts[place].ids) for place in batch)
        ids = torch.full((len(batch), width), decoded.pad)
        mask = torch.zeros_like(ids)
        for row, place in enumerate(batch):
            length = len(prompts[place].ids)
            ids[row, width - length :] = torch.tensor(prompts[place].ids)
            mask[row, width - length :] = 1
        settings = GenerationConfig(
            max_new_tokens=limit, do_sample=False, eos_token_id=decoded.ends, pad_token_id=decoded.pad
        )
        written = decoded.model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        for row, place in enumerate(batch):
            replies[place] = _without_end(written[row, width:].tolist(), decoded.ends)
    return replies


def _continuous_replies(decoded: DecodedModel, prompts: Sequence[Prompt], rows: int) -> Replies:
    """The replies of transformers' continuous batching, with pages for as many of the longest calls as rows.

    Raises:
        RuntimeError: A call failed, which transformers only notes in its result.
    """
    longest = max(len(prompt.ids) + prompt.limit for prompt in prompts)
    blocks = rows * (-(-longest // _PAGE))
    settings = GenerationConfig(
        max_new_tokens=max(prompt.limit for prompt in prompts),
        do_sample=False,
        eos_token_id=decoded.ends,
        pad_token_id=decoded.pad,
    )
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=_TOKENS_AT_ONCE, max_requests_per_batch=rows)
    model: Any = decoded.model
    replies: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config
    ) as manager:
        names = [manager.add_request(prompt.ids, max_new_tokens=prompt.limit) for prompt in prompts]
        while len(replies) < len(names):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended before all calls were answered")
                continue
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            if result.is_finished():
                replies[result.request_id] = _without_end(result.generated_tokens, decoded.ends)
    return [replies[name] for name in names]


async def _llama_replies(url: str, prompts: Sequence[Prompt], rows: int, ends: Sequence[int]) -> Replies:
    """The replies of a server of llama.cpp, with as many requests at once as rows."""
    import httpx

    slots = asyncio.Semaphore(rows)
    async with httpx.AsyncClient(timeout=None) as client:

        async def reply(prompt: Prompt) -> list[int]:
            """Ask for one reply."""
            body = {"prompt": prompt.ids, "n_predict": prompt.limit, "temperature": 0, "return_tokens": True}
            async with slots:
                response = await client.post(f"{url.rstrip('/')}/completion", json=body)
            response.raise_for_status()
            return _without_end(response.json()["tokens"], ends)

        return await asyncio.gather(*(reply(prompt) for prompt in prompts))


def _without_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens before the first end-of-sequence token."""
    for place, token in enumerate(tokens):
        if token in ends:
            return list(tokens[:place])
    return list(tokens)
