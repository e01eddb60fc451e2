"""Triples of a passage from a language model: entities first, then triples (CIRAG, section 3.3, figures 9 and 10).

A call depends on the passage alone, so the ledger answers it for every other question that retrieves the passage: what
the paper calls extraction cached offline. `StoredExtractor` reads triples that were extracted before: from a file, or
by a trained text-to-triples model (`rag.extract`). A reply that cannot be read is sent back once, then the passage
goes on with nothing, as one does whose call is refused; of one that is cut off the complete triples stay. All of it is
counted.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm import CallError, Message, SetupError
from tripletune.models.llm.ledger_client import RetriesExhausted
from tripletune.models.llm.replies import FoundTriples, UnusableReply, ask, find_json, find_triples
from tripletune.rag.systems import PromptSet, QuestionClient
from tripletune.rag.triple_store import TripleSource

logger = logging.getLogger(__name__)

ENTITIES_ROLE, TRIPLES_ROLE, JOINT_ROLE = "cirag.entities", "cirag.triples", "cirag.joint"
_ENTITIES = 'write one JSON object {"entities": ["...", ...]} and nothing else'
_TRIPLES = 'write one JSON object {"triples": [["subject", "predicate", "object"], ...]} and nothing else'
_WORD = re.compile(r"\w+")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fact:
    """A triple with its provenance, the maps M^D and M^S of the paper.

    Attributes:
        triple: The triple.
        passage: The passage it was extracted from.
        sentence: The sentence of the passage that states it.
    """

    triple: Triple
    passage: Passage
    sentence: str


@dataclass(slots=True)
class Extracted:
    """The triples of a passage, in order and each once, and what was odd about the replies, by kind.

    Attributes:
        triples: The triples.
        known: False when the passage was never read for triples, or no reply could be used.
        issues: Counts by kind.
    """

    triples: tuple[Triple, ...] = ()
    known: bool = True
    issues: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class StoredExtractor:
    """Triples that were extracted before, by passage."""

    store: TripleSource

    async def extract(self, passage: Passage, llm: QuestionClient) -> Extracted:
        """The triples of a passage; no call is made."""
        triples = self.store.get(passage)
        return Extracted(tuple(dict.fromkeys(triples or ())), triples is not None)


@dataclass(frozen=True, slots=True)
class LLMExtractor:
    """Triples from a language model, in two steps or with one prompt for both.

    Attributes:
        prompts: Has the prompts that are named next.
        triples: Name of the prompt for triples.
        entities: Name of the prompt for entities; None: the prompt for triples asks for both.
        repairs: Most repair turns a reply.
        max_tokens: Longest reply.
    """

    prompts: PromptSet
    triples: str
    entities: str | None = None
    repairs: int = 1
    max_tokens: int = 1536

    async def extract(self, passage: Passage, llm: QuestionClient) -> Extracted:
        """The triples of a passage."""
        issues: Counter[str] = Counter()
        user = f"Title: {' '.join(passage.title.split())}\nText: {' '.join(passage.text.split())}"
        role = JOINT_ROLE
        if self.entities is not None:
            messages = self.prompts.chat(self.entities, user)
            entities = await self._ask(llm, ENTITIES_ROLE, messages, read_entities, issues)
            # Without a list the triples are asked for all the same.
            user, role = f"{user}\nEntities: {json.dumps(entities or [], ensure_ascii=False)}", TRIPLES_ROLE
        found = await self._ask(llm, role, self.prompts.chat(self.triples, user), read_passage_triples, issues)
        if found is None:
            return Extracted((), False, issues)
        issues += Counter(malformed_triples=found.malformed, **{f"cut_off.{role}": int(found.cut_off)})
        return Extracted(found.triples, True, issues)

    async def _ask(
        self, llm: QuestionClient, role: str, messages: list[Message], parse: Callable[[str], T], issues: Counter[str]
    ) -> T | None:
        repaired: Counter[str] = Counter()
        try:
            return await ask(
                llm, messages, parse, role=role, sampling=llm.up_to(self.max_tokens), repairs=self.repairs,
                repaired=repaired,
            )  # fmt: skip
        except UnusableReply:
            issues[f"unreadable.{role}"] += 1
            return None
        except (RetriesExhausted, SetupError):
            raise
        except CallError as error:
            # A filter that refuses a passage would otherwise cost every question that finds it.
            logger.warning("%s: a passage is left without a reply: %s", role, error)
            issues[f"refused.{role}"] += 1
            return None
        finally:
            if repaired:
                issues[f"repairs.{role}"] += repaired.total()


def read_entities(text: str) -> tuple[str, ...]:
    """Read `{"entities": ["...", ...]}`, the paper's "named entities" as the key, or the list alone.

    Raises:
        UnusableReply: there is no list of strings.
    """
    value = find_json(text, advice=_ENTITIES)
    if isinstance(value, dict):
        value = next((value[name] for name in ("entities", "named entities", "named_entities") if name in value), None)
    if not isinstance(value, list) or not all(isinstance(name, (str, int, float)) for name in value):
        raise UnusableReply("no_entities", f"The reply holds no list of entities; {_ENTITIES}.")
    names = (" ".join(str(name).split()) for name in value)
    return tuple(dict.fromkeys(name for name in names if name))


def read_passage_triples(text: str) -> FoundTriples:
    """Read `{"triples": [[s, p, o], ...]}` and what else `models.llm.replies.find_triples` reads.

    Returns:
        The distinct triples in order and the number of malformed ones, which cost no neighbour: of a list that is cut
        off, or has a comma too few, the complete triples stay. A list without any triple is fine: some passages state
        nothing.

    Raises:
        UnusableReply: there is no list, or nothing in it is a triple.
    """
    found = find_triples(text, _TRIPLES)
    if found.cut_off and '"triples"' in text:
        # Entities that stand before them would be read as triples, since the object around both is not complete.
        found = find_triples(text[text.rindex('"triples"') :], _TRIPLES)
    if found.cut_off and not found.triples:
        raise UnusableReply("bad_json", f"In the reply: the JSON in it is cut off or malformed; {_TRIPLES}.")
    if found.malformed and not found.triples:
        raise UnusableReply("no_triples", f"Nothing in the list is a triple of three non-empty strings; {_TRIPLES}.")
    return found._replace(triples=tuple(dict.fromkeys(found.triples)))


def provenance(passage: Passage, triples: Iterable[Triple]) -> list[Fact]:
    """The triples of a passage with the sentences they come from."""
    sentences = split_sentences(passage.text)
    return [Fact(triple, passage, sentences[source_sentence(triple, sentences)]) for triple in triples]


@lru_cache(maxsize=8192)
def split_sentences(text: str) -> tuple[str, ...]:
    """The sentences of an English text, by the rules of sentencex; a text without any is one sentence.

    White space is folded, and half characters become question marks.
    """
    from sentencex import segment

    folded = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    sentences = tuple(stripped for part in segment("en", folded) if (stripped := part.strip()))
    return sentences or (folded,)


def source_sentence(triple: Triple, sentences: Sequence[str]) -> int:
    """The index of the sentence that states a triple.

    Args:
        triple: The triple.
        sentences: At least one sentence.
    """
    fields = [_words(field) for field in triple.as_list()]
    weights = (1.0, 1.0, 2.0)

    def score(sentence: str) -> float:
        words = set(_words(sentence))
        shares = (sum(word in words for word in field) / len(field) if field else 0.0 for field in fields)
        return sum(weight * share for weight, share in zip(weights, shares))

    scores = [score(sentence) for sentence in sentences]
    return scores.index(max(scores))


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
