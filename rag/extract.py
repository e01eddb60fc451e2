"""Extract the triples of a whole corpus in advance (RAS, F.2), or of the passages that questions retrieve (eq. 4).

Passages that the store has are skipped. Long passages are cut into pieces of whole sentences. The triples of a passage
are stored after all its pieces are done, so a killed run loses only the passages in progress.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import NamedTuple

from tripletune.core.calls import CallError, Completion, RepliesPending, SetupError
from tripletune.core.command_line import add_arguments
from tripletune.core.concurrency import all_of, in_workers
from tripletune.core.data.pairs import entity_triple, is_only_a_name
from tripletune.core.data.passages import Passage
from tripletune.core.data.stated import Unsupported
from tripletune.core.data.triples import Triple
from tripletune.core.options import setting
from tripletune.core.program import progress
from tripletune.llm.backends import LLMOptions, add_llm, backend_names
from tripletune.llm.ledger_client import RetriesExhausted
from tripletune.llm.replies import NO_TEXT, kept_text
from tripletune.llm.reply_triples import read_reply
from tripletune.rag.extractor import PIECE_LIMIT, PROMPTS_OF, LocalOptions, TextExtractor, source_pieces
from tripletune.rag.triple_store import Extraction, TripleSource, TripleStore
from tripletune.rag.triples.kept import TripleRules
from tripletune.rag.triples.names import EntityNames
from tripletune.rag.triples.vocabulary import VocabularyCount

logger = logging.getLogger(__name__)
_COUNT_OF: dict[str, str] = {
    Unsupported.NAME: "invented_names",
    Unsupported.NUMBER: "invented_numbers",
    Unsupported.EXAMPLE: "copied_examples",
    VocabularyCount.RENAMED: "renamed_predicates",
    VocabularyCount.REVERSED: "reversed_triples",
    VocabularyCount.OUTSIDE: "outside_vocabulary",
}

_WINDOW = 1024
# So many failures in a row end a run, since the next passages would fail as well.
_FAILURES_IN_A_ROW = 20


@dataclass
class ExtractionCounts:
    """Counts of a run over passages.

    Attributes:
        repeated: Passages that were already in progress.
        extracted: Passages extracted in this run; `without_facts`, `only_names` and `split` are parts of this count.
        without_facts: Passages whose readable reply has no triples.
        only_names: Passages that are only a name; the paper's rule gives their triple without a call.
        tokens_read: Prompt tokens of calls that the ledger did not answer; `tokens_written`: their reply tokens.
        triples: Distinct triples per passage, summed; those that were dropped are not counted.
        invented_names: Triples that were dropped since the passage lacks their subject or object; `invented_numbers`
            since it lacks a number of theirs, `copied_examples` since they stand in the prompt alone.
        renamed_predicates: Triples with another predicate than the reply's, by the vocabulary; `reversed_triples` were
            also turned around, `outside_vocabulary` have a predicate that it lacks.
        malformed_replies: Replies with a malformed triple, or without any readable triple.
        recovered_replies: Malformed replies whose valid triples were kept.
        cut_off_replies: Replies that the model had not ended, so that facts of the passage are missing.
        failed: Passages whose calls failed; they are not stored, so the next run tries again.
        unread: Passages whose replies have no readable triple and do not say "none"; they are stored only if the model
            would reply the same again.
        unread_reply: One of their replies.
    """

    passages: int = 0
    stored: int = 0
    repeated: int = 0
    empty: int = 0
    extracted: int = 0
    without_facts: int = 0
    only_names: int = 0
    split: int = 0
    pieces: int = 0
    tokens_read: int = 0
    tokens_written: int = 0
    triples: int = 0
    invented_names: int = 0
    invented_numbers: int = 0
    copied_examples: int = 0
    renamed_predicates: int = 0
    reversed_triples: int = 0
    outside_vocabulary: int = 0
    malformed_triples: int = 0
    malformed_replies: int = 0
    recovered_replies: int = 0
    cut_off_replies: int = 0
    failed: int = 0
    unread: int = 0
    pending: int = 0
    seconds: float = 0.0
    unread_reply: str = ""

    @property
    def exit_code(self) -> int:
        """1 if passages failed, or more than a tenth of the replies could not be read or were cut off; else 0."""
        has_many_unread = 10 * self.unread > self.unread + self.extracted
        has_many_cut = 10 * self.cut_off_replies > self.pieces
        return int(self.failed > 0 or has_many_unread or has_many_cut)

    def line(self) -> str:
        """All counts that are not 0, on one line, with the speed, which says how long a whole corpus will take."""
        shown = []
        for name, count in vars(self).items():
            if count and name not in ("seconds", "unread_reply"):
                shown.append(f"{name.replace('_', ' ')} {count:,}")
        passages_per_second = self.passages / self.seconds if self.seconds else 0
        tokens_per_second = self.tokens_written / self.seconds if self.seconds else 0
        shown.append(f"{self.seconds:,.1f} s")
        shown.append(f"{passages_per_second:,.1f} passages/s")
        shown.append(f"{tokens_per_second:,.1f} tokens/s")
        return ", ".join(shown)


class StoredExtractor(NamedTuple):
    """What an extractor is known by in a store; see `TripleStore.extractor`."""

    model: str
    prompt: str
    settings: str


def stored_extractor(extractor: TextExtractor, piece_limit: int, keep_unsupported: bool) -> StoredExtractor:
    """What an extractor is known by in a store, with the options of an extraction that change triples."""
    settings = f"pieces of {piece_limit}; {extractor.settings}"
    if not keep_unsupported:
        settings += "; without unsupported triples"
    digest = hashlib.sha256(settings.encode(errors="replace")).hexdigest()[:16]
    return StoredExtractor(extractor.model, digest, settings)


@dataclass
class CorpusExtraction(TripleSource):
    """Extract the triples that a store lacks, for a whole corpus or for passages that a loop retrieves.

    Attributes:
        piece_limit: Maximum characters of a piece with its title.
        window: Number of passages that are looked up in the store and sorted at once.
        keep_unsupported: Whether triples are kept whose names or numbers the passage does not have, as in RAS; the
            programs drop them (`core.data.stated`).
        names: Names that a loop reads in place of those in the store.
        id: The number of the extractor in the store.
    """

    extractor: TextExtractor
    store: TripleStore
    piece_limit: int = PIECE_LIMIT
    window: int = _WINDOW
    keep_unsupported: bool = True
    counts: ExtractionCounts = field(default_factory=ExtractionCounts)
    names: EntityNames = field(default_factory=EntityNames)

    def __post_init__(self) -> None:
        """Add the extractor to the store: its number depends on all that changes the triples of a passage."""
        self._rules = TripleRules(self.extractor.vocabulary, self.extractor.drop_outside, not self.keep_unsupported)
        self.id = self.store.extractor(*stored_extractor(self.extractor, self.piece_limit, self.keep_unsupported))
        self.models = (self.extractor,)
        # The passages in progress, by key.
        self._reading: dict[str, asyncio.Task[tuple[Triple, ...] | None]] = {}
        self._started = 0.0
        self._failures_in_a_row = 0
        # Keys of passages whose replies have no readable triple; they are not tried again in this run.
        self._unread: set[str] = set()

    async def run(self, passages: Iterable[Passage]) -> ExtractionCounts:
        """Extract the passages that the store lacks; raise a `CallError` after twenty failures in a row.

        Replies that wait for a batch are counted, and do not stop the passages after them.
        """
        missing = self.missing(iter(passages))

        async def work() -> None:
            """Extract passages until none is left."""
            # All workers take passages from one iterator, so only passages in progress are in memory.
            for key, passage in missing:
                with suppress(RepliesPending):
                    await self._shared_task(key, passage)
                bar.update()

        with progress(unit="passage") as bar:
            await in_workers(work, self.extractor.concurrency)
        return self.counts

    def close(self) -> None:
        """Close the store; the extractor stays open."""
        self.store.close()

    def get(self, passage: Passage) -> tuple[Triple, ...] | None:
        """The triples of a passage; None if the store lacks the passage."""
        triples = self.store.get(self.id, passage.key)
        return None if triples is None else self.names.of(triples)

    async def read(self, passages: Sequence[Passage]) -> list[tuple[Triple, ...] | None]:
        """Return the triples of retrieved passages (RAS, eq. 4), or None if the extractor failed; extract missing ones.

        Concurrent questions share calls, and each passage is extracted once. Raises the errors of `run`, and
        `RepliesPending`.
        """
        triples_by_key: dict[str, tuple[Triple, ...] | None] = {}
        missing: dict[str, Passage] = {}
        for passage in passages:
            stored = self.store.get(self.id, passage.key)
            self.counts.passages += 1
            if stored is None:
                missing[passage.key] = passage
            else:
                self.counts.stored += 1
                triples_by_key[passage.key] = stored
        # Shielded, because cancelling one question must not cancel the extraction for other questions.
        tasks = [asyncio.shield(self._shared_task(key, passage)) for key, passage in missing.items()]
        triples_by_key.update(zip(missing, await all_of(tasks), strict=True))
        found = [triples_by_key[passage.key] for passage in passages]
        return [None if triples is None else self.names.of(triples) for triples in found]

    def missing(self, passages: Iterator[Passage]) -> Iterator[tuple[str, Passage]]:
        """Yield key and passage of each passage that the store lacks, asked about many at once; count all passages.

        At most `window` passages are in memory. Keys come with their passages, since a key is a digest that takes time.
        """
        while block := list(islice(passages, self.window)):
            self.counts.passages += len(block)
            if self.extractor.by_length:
                # The longest passages come first, so that a lack of memory shows at once.
                block.sort(key=lambda passage: -len(passage.text))
            keys = [passage.key for passage in block]
            stored = self.store.stored_among(self.id, keys)
            for key, passage in zip(keys, block, strict=True):
                if key in stored:
                    self.counts.stored += 1
                else:
                    yield key, passage

    def _shared_task(self, key: str, passage: Passage) -> asyncio.Task[tuple[Triple, ...] | None]:
        """The task that extracts a passage, begun at the first call, so that equal passages in progress cost one call.

        Concurrent questions await the same task; a caller that may be cancelled shields it (`read`).
        """
        if key in self._reading:
            self.counts.repeated += 1
            return self._reading[key]
        if not self._reading:
            self._started = time.monotonic()
        self._reading[key] = asyncio.create_task(self._extract_unless_stored(key, passage))
        return self._reading[key]

    async def _extract_unless_stored(self, key: str, passage: Passage) -> tuple[Triple, ...] | None:
        """Extract a passage unless another run or an equal passage was faster; None if its reply can't be read.

        The seconds count while at least one passage is in progress, since a loop extracts at irregular times.
        """
        try:
            if key in self._unread:
                return None
            # A copy may have been extracted since the store was read.
            stored = self.store.get(self.id, key)
            if stored is not None:
                self.counts.repeated += 1
                return stored
            await self._extract_passage(key, passage)
            return self.store.get(self.id, key)
        finally:
            del self._reading[key]
            if not self._reading:
                self.counts.seconds += time.monotonic() - self._started

    async def _extract_passage(self, key: str, passage: Passage) -> None:
        """Extract the triples of a passage and store them; after a failure, the next run tries again.

        A passage that is only a name gives one triple without a call. Errors that every passage would meet are raised
        and end the run; others are counted, since a corpus of millions should not stop at one passage.
        """
        counts = self.counts
        if is_only_a_name(passage.title, passage.text):
            counts.only_names += 1
            self._store_passage(key, (entity_triple(passage.title),), 0)
            return
        if not passage.text.strip():
            counts.empty += 1
            return
        texts = source_pieces(passage.title, passage.text, self.piece_limit, self.extractor.render)
        counts.split += len(texts) > 1
        counts.pieces += len(texts)
        try:
            completions = await self.extractor.extract(texts)
        except (SetupError, RetriesExhausted, OSError):  # an OSError means that replies can't be stored
            raise
        except RepliesPending:
            counts.pending += 1
            raise
        except Exception as error:
            self._note_failure(passage, error)
            return
        self._failures_in_a_row = 0
        self._store_replies(key, passage, completions)

    def _note_failure(self, passage: Passage, error: Exception) -> None:
        """Count a passage whose calls failed; raise a `CallError` after too many failures in a row.

        A single failure may be the passage's fault, such as a text that a content filter refuses; a row of them is not.
        """
        self.counts.failed += 1
        self._failures_in_a_row += 1
        logger.warning("passage %r failed: %s", passage.label[:100], error)
        if self._failures_in_a_row >= _FAILURES_IN_A_ROW:
            advice = " (for a text without facts, a model on a server writes NONE)" if NO_TEXT in str(error) else ""
            raise CallError(
                f"{self._failures_in_a_row} passages in a row failed, the last one with: {error}. Finished passages "
                f"are kept in {self.store.path}: fix the cause and run the same command again{advice}"
            ) from (None if isinstance(error, CallError) else error)

    def _store_replies(self, key: str, passage: Passage, completions: Sequence[Completion]) -> None:
        """Store the triples in the replies about a passage, unless a new call could give a readable reply.

        Valid triples of a malformed reply are kept: a reply that was cut off at its limit is right up to its last
        triple. A readable reply of which every triple is invented leaves a passage without facts.
        """
        triples: dict[Triple, None] = {}
        malformed_replies: list[Completion] = []
        malformed_triples = 0
        for completion in completions:
            if not completion.is_whole:
                self.counts.cut_off_replies += 1
            reply = read_reply(kept_text(completion))
            triples |= dict.fromkeys(reply.triples)
            # An unreadable reply counts as one malformed triple.
            malformed_triples += reply.malformed + reply.unreadable
            if not completion.cached:
                self.counts.tokens_read += completion.prompt_tokens
                self.counts.tokens_written += completion.completion_tokens
            if reply.is_malformed:
                malformed_replies.append(completion)
                self.counts.malformed_replies += 1
                self.counts.recovered_replies += bool(reply.triples)
        if malformed_replies and not triples:
            self.counts.unread += 1
            self.counts.unread_reply = malformed_replies[0].text
            if self.extractor.reject(malformed_replies):
                self._unread.add(key)
                return
        changes: Counter[str] = Counter()
        kept = self._rules.kept(triples, passage.content, self.extractor.instruction, changes)
        for name, count in changes.items():
            vars(self.counts)[_COUNT_OF[name]] += count
        self._store_passage(key, kept, malformed_triples)

    def _store_passage(self, key: str, triples: tuple[Triple, ...], malformed: int) -> None:
        """Store a passage's triples and count them; it is without facts only if nothing in the reply was malformed."""
        self.counts.extracted += 1
        self.counts.without_facts += not triples and not malformed
        self.counts.triples += len(triples)
        self.counts.malformed_triples += malformed
        self.store.put(self.id, [Extraction(key, triples, malformed)])


@dataclass(frozen=True, slots=True)
class PartOptions:
    """Options that say which passages of a corpus `rag extract` reads."""

    piece_limit: int = setting(PIECE_LIMIT, "maximum characters per call; longer passages are cut", at_least=1)
    limit: int | None = setting(None, "read only the first N passages", at_least=1)
    keep_unsupported: bool = setting(
        False, "keep triples with a name or number that the passage does not have (else they are dropped and counted)"
    )


def add_extract_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tripletune rag extract` to a parser.

    They are here and not beside the command, since recipes that extract (`recipes/ray_corpus.py`) take the same ones.
    """
    add = parser.add_argument
    add("--corpus", required=True, help="passages: a folder of `build passages`, or JSON lines with text")
    add("--output", required=True, metavar="STORE", help="SQLite file of the triples; several processes may share it")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--model", help="trained decoder or encoder-decoder: folder (run, checkpoint, export, merged) or "
        "owner/name[@revision]")  # fmt: skip
    who.add_argument("--teacher", choices=backend_names(), help="backend of a chat model; see --teacher-model")
    add_llm(who)
    add("--prompt", metavar="FILE", help="file with the system prompt (default: the prompt in the folder of a trained "
        "model; tripletune/prompts/systems/extract_triples_chat.md for a teacher)")  # fmt: skip
    add("--prompts-of", choices=PROMPTS_OF, help="with --teacher: system whose prompts to use; cirag and ppr extract "
        "entities, then triples, gear extracts both in one call")  # fmt: skip
    add_arguments(parser, PartOptions)
    add_arguments(parser.add_argument_group("--model", "how a model on this machine extracts"), LocalOptions)
    own_flags = [item.name for item in fields(LLMOptions) if item.name != "backend"]  # `--teacher` names the backend
    add_arguments(parser.add_argument_group("teacher model"), LLMOptions, "teacher", only=own_flags)
