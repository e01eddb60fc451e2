"""Triples of a passage from a language model: entities first, then triples (CIRAG, section 3.3, figures 9 and 10).

A call depends on the passage alone, so the ledger answers it for every other question that retrieves the passage: what
the paper calls extraction cached offline. A reply that cannot be read is sent back once, then the passage has no
triples, as one whose call is refused; of one that is cut off the complete triples stay. All of it is counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from tripletune.models.data.records import Passage
from tripletune.models.data.triples import FoundTriples, Triple
from tripletune.models.llm.question_client import QuestionClient
from tripletune.models.llm.replies import UnusableReply, find_json, find_triples
from tripletune.rag.extractor import ask_of_passage

_ENTITIES = 'write one JSON object {"entities": ["...", ...]} and nothing else'
_TRIPLES = 'write one JSON object {"triples": [["subject", "predicate", "object"], ...]} and nothing else'
T = TypeVar("T")


async def passage_triples(
    passage: Passage,
    llm: QuestionClient,
    issues: Counter[str],
    joint: bool = False,
    repairs: int = 1,
    max_tokens: int = 1536,
) -> tuple[Triple, ...] | None:
    """The triples of a passage, in order and each once; None where no reply can be used.

    Args:
        issues: Counts what was odd about the replies, by kind.
        joint: Whether one prompt asks for entities and triples.
        repairs: Most repair turns for a reply of at most `max_tokens` tokens.
    """

    async def call(name: str, user: str, parse: Callable[[str], T]) -> T | None:
        chat, sampling = llm.prompts.chat(f"cirag_{name}", user), llm.up_to(max_tokens)
        return await ask_of_passage(llm, chat, parse, f"cirag.{name}", sampling, repairs, issues)

    user = f"Title: {' '.join(passage.title.split())}\nText: {' '.join(passage.text.split())}"
    if not joint:
        # Without a list the triples are asked for all the same.
        entities = await call("entities", user, read_entities) or ()
        user += f"\nEntities: {json.dumps(entities, ensure_ascii=False)}"
    if (found := await call("joint" if joint else "triples", user, read_passage_triples)) is None:
        return None
    issues += Counter({"malformed_triples": found.malformed, "incomplete_json": found.cut_off})
    return found.triples


def read_entities(text: str) -> tuple[str, ...]:
    """Read `{"entities": ["...", ...]}`, the paper's "named entities" as the key, or the list alone."""
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
        The distinct triples in order and the number of malformed ones. Of a list that is cut off the complete triples
        stay; one without any is fine: some passages state nothing.
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
