"""Run sentence encoders in a thread, so that the event loop of a run never waits for an encoder.

Texts that wait while the thread is busy are encoded together. All texts of a batch have the same number of tokens:
without padding, a vector does not depend on other texts in the batch.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from tripletune.core.calls import CallError, PromptTooLong
from tripletune.llm.backends import URL_FORM, is_plain_url
from tripletune.models.fingerprints import encoder_fingerprint
from tripletune.models.specs import parse_dtype
from tripletune.rag.search.options import Similarity
from tripletune.rag.search.together import Together

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from tripletune.models.encoders import InputModule

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

Kind = Literal["query", "text"]
# Maps texts of one kind to vectors, one row per text.
Encode = Callable[[list[str], Kind], np.ndarray]
Prompts = Mapping[Kind, str | None]
# An encoder behind a server: the name of its model and optionally the server's base URL.
_SERVED = re.compile(r"openai:(?P<model>.+?)(?:@(?P<url>https?://.+))?")
_BATCH, _PATIENCE = 64, 0.002
# Tokens encoded at once: more no longer fit a processor's cache.
_BATCH_TOKENS = 8192
# Maximum texts that are compared in one step of the event loop.
_COMPARED = 4096
# Maximum concurrent requests to a server.
_REQUESTS = 8


class Embedder:
    """Vectors of queries and texts, and their similarity, also for reranking.

    Args:
        name: Encoder and prompts, as in an index manifest.
        weights: Digest of the encoder's weights, if they are on this machine.
        similarity: "cosine" scales all vectors to length one.
        kept: Number of vectors to keep, since triples and sub-queries recur in later rounds and questions.
        threads: Maximum concurrent calls of `encode`, for a server.
    """

    def __init__(
        self,
        name: str,
        encode: Encode,
        weights: str = "",
        similarity: Similarity = "cosine",
        kept: int = 50_000,
        threads: int = 1,
    ) -> None:
        self.name = name
        self.weights = weights
        self._encode = encode
        self._scales = similarity == "cosine"
        self._together: Together[tuple[Kind, str], np.ndarray] = Together(self._encode_keys, kept, _PATIENCE, threads)

    @cached_property
    def width(self) -> int:
        """The number of dimensions of a vector."""
        return self.encode(["width"]).shape[1]

    async def queries(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of queries, shape (texts, width)."""
        return np.stack(await self._together([("query", text) for text in texts]))

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The similarity of a query to each text, rounded to six decimals, so that equal texts tie on any machine."""
        keys: list[tuple[Kind, str]] = [("query", query), *(("text", text) for text in texts)]
        # Keep the vectors of the texts for the next query.
        self._together.most = max(self._together.most, 2 * len(keys))
        vectors: list[np.ndarray] = []
        for start in range(0, len(keys), _COMPARED):
            vectors += await self._together(keys[start : start + _COMPARED])
        if len(keys) > _COMPARED:
            return await asyncio.to_thread(_rounded_similarities, vectors[0], vectors[1:])
        return _rounded_similarities(vectors[0], vectors[1:])

    def encode(self, texts: Sequence[str], kind: Kind = "text") -> np.ndarray:
        """Encode texts in the calling thread, without keeping vectors, for index builds.

        A vector that is not finite is an error: in an index it would be compared with every query.
        """
        vectors = np.asarray(self._encode(list(texts), kind), dtype=np.float32)
        if not np.isfinite(vectors).all():
            raise ValueError(f"encoder {self.name}: a vector is not finite (NaN or infinite): use another encoder")
        return self.scale(vectors)

    def scale(self, vectors: np.ndarray) -> np.ndarray:
        """Scale vectors, shape (rows, width), to length one, unless they are compared by dot product."""
        return to_length_one(vectors) if self._scales else vectors

    def stream(self, texts: Iterable[str], chunk: int) -> Iterator[np.ndarray]:
        """Yield the vectors of many texts, in order, in arrays of at most `chunk` rows."""
        remaining = iter(texts)
        while block := list(islice(remaining, chunk)):
            yield self.encode(block)

    def _encode_keys(self, keys: list[tuple[Kind, str]]) -> list[np.ndarray]:
        """The vectors of queries and texts, in order; each kind is encoded at once, with its own prompt.

        `Together` calls it in its thread, with the distinct keys of all requests that wait.
        """
        vectors: dict[tuple[Kind, str], np.ndarray] = {}
        for kind in get_args(Kind):
            own_keys = [key for key in keys if key[0] == kind]
            if own_keys:
                texts = [text for _, text in own_keys]
                vectors.update(zip(own_keys, self.encode(texts, kind), strict=True))
        return [vectors[key] for key in keys]


def _rounded_similarities(query: np.ndarray, vectors: Sequence[np.ndarray]) -> list[float]:
    """The dot products of a query and texts, rounded to six decimals; see `Embedder.scores`."""
    return [round(float(query @ vector), 6) for vector in vectors]


def to_length_one(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors, shape (rows, width), to length one; a vector of zeros stays one."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


@lru_cache(maxsize=4)
def open_embedder(
    spec: str,
    query_prompt: str | None = None,
    text_prompt: str | None = None,
    trust_remote_code: bool = False,
    similarity: Similarity | None = None,
    dtype: str | None = None,
) -> Embedder:
    """Open an encoder, only once per process. For the arguments see `rag.search.SearchOptions`.

    Prompts, similarity and the type in which it computes are part of the name, because an index of other vectors must
    not be used.
    """
    prompts: Prompts = {"query": query_prompt, "text": text_prompt}
    name = encoder_name(spec)
    for kind, prompt in prompts.items():
        if prompt is not None:
            name += f" {kind}={prompt!r}"
    weights, threads = "", 1
    if dtype is not None and _SERVED.fullmatch(spec):
        raise ValueError(f"encoder_dtype={dtype} has no effect on {name}, whose server chooses the type: leave it out")
    if served := _SERVED.fullmatch(spec):
        encode, threads = _server_encoder(served["model"], served["url"], prompts), _REQUESTS
    else:
        computed_in = None
        if dtype is not None:
            computed_in = parse_dtype(dtype)
            name += f" {str(computed_in).removeprefix('torch.')}"
        from tripletune.models.encoders import load_encoder

        model = load_encoder(spec, computed_in, trust_remote_code)
        encode, weights = _local_encoder(model, prompts), encoder_fingerprint(spec)
        similarity = similarity or ("dot" if model.similarity_fn_name == "dot" else "cosine")
    if similarity == "dot":
        name += " dot"
    return Embedder(name, encode, weights, similarity or "cosine", threads=threads)


def encoder_name(spec: str) -> str:
    """The spec of an encoder without the address of its server, at which the same encoder may be another day."""
    served = _SERVED.fullmatch(spec)
    return f"openai:{served['model']}" if served else spec


def _local_encoder(model: SentenceTransformer, prompts: Prompts) -> Encode:
    """The function that encodes by a SentenceTransformer; `prompts` that are None are the model's own.

    An encoder with two towers needs to hear which of them reads a text; one without a tower for queries or for texts is
    not for retrieval.
    """
    from tripletune.models.encoders import input_modules

    own_prompts = {
        "query": model.prompts.get("query"),
        "text": model.prompts.get("document") or model.prompts.get("passage"),
    }
    towers = input_modules(model)
    tasks: dict[Kind, str] = {"query": "query", "text": "document"}
    for task in tasks.values():
        if len(towers) > 1 and task not in towers:
            raise ValueError(
                f"the encoder has towers for {', '.join(towers)}, but none for {task}: use an encoder for retrieval"
            )

    def encode(texts: list[str], kind: Kind) -> np.ndarray:
        """Encode texts of one kind, those with equally many tokens together.

        Without padding, a vector does not depend on the texts that were encoded with it.

        Returns:
            Vectors of shape (texts, width), in the order of `texts`.
        """
        prompt = own_prompts[kind] if prompts[kind] is None else prompts[kind]
        options: dict[str, Any] = {"show_progress_bar": False}
        tower = next(iter(towers.values()))
        if len(towers) > 1:
            tower, options["task"] = towers[tasks[kind]], tasks[kind]
        vectors: dict[int, np.ndarray] = {}
        for length, places in _equally_long(tower, [f"{prompt or ''}{text}" for text in texts]):
            options["batch_size"] = min(_BATCH, max(1, _BATCH_TOKENS // max(length, 1)))
            batch = [texts[place] for place in places]
            # The encoder adds the prompt itself, since some encoders exclude its tokens from pooling.
            vectors.update(zip(places, model.encode(batch, prompt=prompt or None, **options), strict=True))
        return np.stack([vectors[place] for place in range(len(texts))])

    return encode


class _EquallyLong(NamedTuple):
    """The positions of the texts with the same number of tokens."""

    tokens: int
    places: list[int]


def _equally_long(tower: InputModule, texts: list[str]) -> Iterator[_EquallyLong]:
    """Group the positions of texts by number of tokens: padding would make a vector depend on other texts.

    Encoders without a transformer's tokenizer get one group. `tower` is the module of the encoder that reads the texts.
    """
    counts = [0] * len(texts)
    if callable(tower.tokenizer):
        counts = [len(ids) for ids in tower.tokenizer(texts, verbose=False)["input_ids"]]
        if (limit := tower.max_seq_length) and max(counts) > limit:
            _warn_once(
                "the encoder reads only the first %d tokens of a text, and some texts are longer: shorten the "
                "passages, or search with --retriever hybrid, whose BM25 reads them whole", limit,
            )  # fmt: skip
            counts = [min(count, limit) for count in counts]
    by_length: dict[int, list[int]] = {}
    for place, length in enumerate(counts):
        by_length.setdefault(length, []).append(place)
    for length in sorted(by_length):
        yield _EquallyLong(length, by_length[length])


def _server_encoder(model: str, url: str | None, prompts: Prompts) -> Encode:
    """The function that encodes by a server with OpenAI's API; without a `url` it is the one of OPENAI_BASE_URL.

    Redirects are not followed, since they could send texts to another server. A rejected request may be due to one long
    text, so it has an error of its own (`PromptTooLong`), and its texts are tried alone.
    """
    import openai

    name = f"openai:{model}"
    if re.search("@[^@]*[:/]", model):
        raise ValueError(f"encoder {name}: write the URL behind @ with http:// or https://")
    if url is not None and not is_plain_url(url):
        raise ValueError(f"encoder {name}: the URL behind @ {URL_FORM}")
    try:
        # OpenAI's key is not sent to another server.
        key = None if url is None else "none"
        client = openai.OpenAI(api_key=key, base_url=url, http_client=openai.DefaultHttpxClient(follow_redirects=False))
    except openai.OpenAIError as error:
        raise ValueError(f"encoder {name}: {error}") from None

    def encode(texts: list[str], kind: Kind) -> np.ndarray:
        """Encode texts of one kind; the server's replies are sorted by index, since their order is not promised."""
        # Servers reject an empty text.
        asked = [f"{prompts[kind] or ''}{text}" or " " for text in texts]
        rows: list[list[float]] = []
        for start in range(0, len(asked), _BATCH):
            try:
                reply = client.embeddings.create(model=model, input=asked[start : start + _BATCH])
            except openai.OpenAIError as error:
                failure = PromptTooLong if isinstance(error, openai.BadRequestError) else CallError
                raise failure(f"encoder {name}: {error}") from None
            rows += [item.embedding for item in sorted(reply.data, key=lambda item: item.index)]
        return np.array(rows)

    return encode
