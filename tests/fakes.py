"""What stands in for models and indexes: a chat model, a Graph-LLM, an extractor, passages, triples, a reranker."""

import asyncio
import functools
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from tripletune.core import calls as llm
from tripletune.core.calls import Completion, Endpoint, Generator, LLMClient, Message, Sampling
from tripletune.core.data.pairs import render_source
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import ModelInput
from tripletune.core.data.triples import Triple
from tripletune.rag.search.retrievers import Retrieved


class Asked(NamedTuple):
    role: str
    messages: list[Message]
    sampling: Sampling | None
    question_id: str

    @property
    def text(self) -> str:
        """The last turn, which is what most tests look at."""
        return self.messages[-1]["content"]


class Client(LLMClient):
    """An LLM client; its replies come in order, or from a function of the call, and an exception is raised."""

    model = "script"

    def __init__(self, *replies: Any, answer: Callable[[Asked], Any] | None = None) -> None:
        self.replies, self.asked, self.closed = list(replies), list[Asked](), False
        self.answer = answer or (lambda asked: self.replies.pop(0))

    @property
    def roles(self) -> list[str]:
        """The roles of all calls so far, in order."""
        return [asked.role for asked in self.asked]

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Note the call, and give its reply; one that ends in "..." counts as cut off."""
        self.asked.append(Asked(role, list(messages), sampling, question_id))
        reply = self.answer(self.asked[-1])
        if isinstance(reply, Exception):
            raise reply
        return Completion(reply, 10, 2, finish_reason="length" if reply.endswith("...") else "stop")

    async def close(self) -> None:
        """Note that the client was closed."""
        self.closed = True


class Backend(llm.Backend):
    """A chat model behind a client: its reply is what a function says to the messages."""

    def __init__(self, model: str, reply: Callable[[Any], str]) -> None:
        self.model, self.reply = model, reply

    async def complete(self, messages: Any, sampling: Any) -> Completion:
        """The reply of the function, of fixed token counts."""
        return Completion(self.reply(messages), 10, 5)


class Model(Generator):
    """A Graph-LLM: planning replies in order, and one answer."""

    def __init__(self, *plans: str, answer: str = " Ridley Scott\n") -> None:
        self.plans, self.answer = list(plans), answer
        self.inputs: list[tuple[ModelInput, int, str | None]] = []

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Note the input, and give the next plan or the answer, always with one triple that did not fit."""
        self.inputs.append((sample, max_new_tokens, evidence))
        text = self.plans.pop(0) if sample.task == "planning" else self.answer
        return Completion(text, prompt_tokens=10, completion_tokens=2, truncated_triples=1)


class Shelf:
    """A retriever: two passages named after the query, or what `found` gives for it."""

    comparable = True

    def __init__(self, found: Callable[[str], Sequence[Passage]] | None = None) -> None:
        self.queries: list[tuple[str, int]] = []
        self.found = found or (lambda query: [Passage(f"{query} {n}", f"text {n} of {query}") for n in (1, 2)])

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """Note the query, and give the first `k` passages, all with the same score."""
        self.queries.append((query, k))
        return [Retrieved(passage, 1.0, n) for n, passage in enumerate(self.found(query))][:k]


class Facts:
    """Triples of passages: what `found` says of each; without it, that its title says it."""

    def __init__(self, found: Callable[[Passage], tuple[Triple, ...] | None] | None = None) -> None:
        self.found = found or (lambda passage: (Triple(passage.title, "says", "it"),))

    async def read(self, passages: Sequence[Passage]) -> list[tuple[Triple, ...] | None]:
        """The triples of each passage; None for one that `found` does not know."""
        return [self.found(passage) for passage in passages]


class Rule(Endpoint):
    """An extractor that replies "(S> <text>| P> says| O> it)", or what is set for a text."""

    model, settings = "rule", "{}"
    render = staticmethod(render_source)

    vocabulary = None
    drop_outside = False
    instruction = ""

    def __init__(self, replies: dict[str, Any] | None = None, by_length: bool = False, concurrency: int = 3) -> None:
        self.by_length, self.concurrency, self.replies = by_length, concurrency, replies or {}
        self.batches: list[list[str]] = []
        self.under_way = self.most = 0

    @property
    def texts(self) -> list[str]:
        """All texts that were asked for, in order."""
        return [text for batch in self.batches for text in batch]

    async def extract(self, texts: Sequence[str]) -> list[Completion]:
        """Note the batch, and give its replies; batches end in another order than they began, as on a server."""
        self.batches.append(list(texts))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(len(self.batches) % 4):
            await asyncio.sleep(0)
        self.under_way -= 1
        found = [self.replies.get(text, f"(S> {text}| P> says| O> it)") for text in texts]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return [Completion(text, 10, 5, 0.5) for text in found]

    def reject(self, replies: Iterable[Completion]) -> bool:
        """Whether a passage with unreadable replies is to be tried again, as with a model behind a server."""
        return not self.by_length


def on_forward(model: Any, monkeypatch: Any, see: Callable[[dict[str, Any]], Any]) -> None:
    """Call `see` with the keyword arguments of each forward pass, before it; what it raises ends the pass."""
    forward = model.forward

    @functools.wraps(forward)
    def seen(*args: Any, **kwargs: Any) -> Any:
        see(kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", seen)


def shapes_read(model: Any, monkeypatch: Any) -> list[tuple[int, int]]:
    """The shapes of the tokens of each forward pass, to be filled."""
    shapes: list[tuple[int, int]] = []
    on_forward(model, monkeypatch, lambda given: shapes.append(tuple(given["input_ids"].shape)))
    return shapes


class Words:
    """A reranker that counts the words a text shares with the query."""

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The share of common words, from 0 to 1, of each text."""
        words = lambda text: set(re.findall(r"\w+", text.lower()))  # noqa: E731
        return [len(words(query) & words(text)) / (1 + len(words(text))) for text in texts]


class Hub:
    """The cache of the Hugging Face Hub in a folder, filled by tests; nothing is fetched (`HF_HUB_OFFLINE`)."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def add(self, name: str, folder: str | Path, *revisions: str) -> str:
        """Put a folder there as one commit of a model, to which these branches and tags point; return the commit."""
        place = self.cache / f"models--{name.replace('/', '--')}"
        commit = f"{len(list(place.glob('snapshots/*'))) + 1:040x}"
        shutil.copytree(folder, place / "snapshots" / commit)
        for revision in revisions:
            file = place / "refs" / revision
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(commit)
        return commit


def flip_last_byte(file: Path) -> None:
    """Change a weight file's last byte; its size stays."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def damaged(source: str | Path, target: Path, change: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Path:
    """A copy of a model folder with other tensors; one number of the first is NaN unless a change is given."""
    shutil.copytree(source, target)
    (file,) = target.rglob("*.safetensors")
    tensors = load_file(file)
    if change is None:
        next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors if change is None else change(tensors), file, {"format": "pt"})
    return target
