"""Build questions over a custom corpus, split by document: drafts, a teacher's wording, files and card.

`train.jsonl` and `test.jsonl` are in the plain format, with steps. Calls are kept in a ledger, so a build can be killed
and run again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tripletune.core.calls import CallError, LLMClient, RepliesPending, Sampling, SetupError, UnusableReply
from tripletune.core.concurrency import in_order
from tripletune.core.data.passages import Passage, corpus_file, read_corpus
from tripletune.core.files import file_digest, json_line, new_folder, write_json, write_text
from tripletune.core.options import CheckedOptions, rare, setting
from tripletune.core.program import progress
from tripletune.core.tables import Table
from tripletune.data_builders.datasets.writer import CARD, DROPPED, STATISTICS, BuildFacts, card_body
from tripletune.data_builders.questions.facts import PATH_KINDS, Draft, FactGraph, hold_out, key
from tripletune.data_builders.questions.teacher import (
    MAX_TOKENS,
    Rejection,
    Wording,
    load_question_prompts,
    make_question,
)
from tripletune.data_builders.subq.annotations import TripleLookup
from tripletune.llm.ledger_client import LedgerClient, RetriesExhausted

logger = logging.getLogger(__name__)

PARTS = TRAIN, TEST = "train", "test"
MADE = (STATISTICS, CARD, DROPPED, *(f"{part}.jsonl" for part in PARTS))
# Maximum drafts in progress; the client limits the concurrent calls.
_AT_ONCE = 256
_MIX = "1-hop=25,2-hop=40,3-hop=12,4-hop=5,comparison=10,intersection=8"


@dataclass(frozen=True, slots=True)
class QuestionBuildOptions(CheckedOptions):
    """What questions to make."""

    corpus: str = field(metadata={"help": "passages: JSON lines, or the folder of `build passages`"})
    triples: str = field(metadata={"help": "triples of the passages: a store of `rag extract`, or JSON lines"})
    count: int = setting(500, "questions to make, including held-out questions", at_least=1)
    holdout: float = setting(
        0.2, "share of test questions; their documents have the same share of the facts", at_least=0, below=1
    )
    seed: int = setting(0, "seed of split and draws")
    kinds: str = setting(_MIX, "weights of the kinds of questions; if a kind runs out, other kinds replace it")
    tries: float = setting(3.0, "maximum drafts per question, since some are rejected", at_least=1)
    context: int = setting(10, "passages in the context of a question, distractors included", at_least=4)
    prompts: str | None = setting(
        None, "folder of custom prompts: any of questions_word.md, questions_read.md, questions_recall.md"
    )
    copied: int = rare(8, "reject a question that shares N consecutive words with a passage", at_least=2)

    def check(self) -> list[str]:
        """The problem that `kinds` can't be read."""
        with suppress(ValueError):
            if self.weights().keys() <= set(PATH_KINDS) and min(self.weights().values()) > 0:
                return []
        return [f"kinds: {self.kinds!r} is not like {_MIX}: set weights above 0 for some of {', '.join(PATH_KINDS)}"]

    def weights(self) -> dict[str, float]:
        """The weight of each kind."""
        pairs = (part.split("=") for part in self.kinds.split(","))
        return {name.strip(): float(weight) for name, weight in pairs}

    def wanted(self) -> dict[str, int]:
        """Number of questions per part."""
        held_out = round(self.count * self.holdout)
        return {part: number for part, number in zip(PARTS, (self.count - held_out, held_out)) if number}


class Material:
    """Passages with their triples and parts, and the drafts of questions over the passages."""

    def __init__(self, options: QuestionBuildOptions) -> None:
        self.options, self.counts = options, Counter[str]()
        self.passages = list(read_corpus(options.corpus, blank_texts=True))
        documents = [str(one.source.get("document") or one.title or one.id) for one in self.passages]
        lookup = TripleLookup(options.triples, self.counts)
        self.triples = [lookup(passage) for passage in progress(self.passages, "passages")]
        lookup.check()
        self.graph = FactGraph(self.passages, self.triples)
        sizes = Counter(documents[fact.passage] for fact in self.graph.facts)
        if options.holdout and len(sizes) < 2:
            raise ValueError(
                f"{options.corpus}: {len(sizes)} document(s) have facts for questions, but a split by document needs "
                "two: add documents, extract more triples, or set --holdout 0"
            )
        self.held_out = hold_out(sizes, self.graph.links(documents), options.holdout, options.seed)
        parts = [TEST if document in self.held_out else TRAIN for document in documents]
        self.numbers = {part: [n for n, one in enumerate(parts) if one == part] for part in PARTS}
        self.documents = {part: len({documents[n] for n in numbers}) for part, numbers in self.numbers.items()}
        self._about = defaultdict[str, set[int]](set)
        for fact in self.graph.facts:
            self._about[fact.subject].add(fact.passage)
            self._about[fact.object].add(fact.passage)

    def drafts(self, part: str) -> Iterator[Draft]:
        """The drafts of a part, at most `tries` times the wanted questions."""
        options, own = self.options, set(self.numbers[part])
        most = round(options.tries * options.wanted()[part])
        return islice(self.graph.drafts(own, options.weights(), options.seed, self.counts), most)

    def of(self, draft: Draft) -> list[Passage]:
        """The passage of each fact."""
        return [self.passages[fact.passage] for fact in draft.facts]

    def row(self, part: str, draft: Draft, made: Wording) -> dict[str, Any]:
        """A question in the plain format (`data_builders/readers/qa.py`)."""
        steps = [
            {"question": asked, "passage": self.passages[fact.passage].id, "answer": sought,
             "triples": [triple.as_list() for triple in self.triples[fact.passage]]}
            for fact, asked, sought in zip(draft.facts, made.subqueries, draft.sought)
        ]  # fmt: skip
        context = [self.passages[number] for number in self._context(part, draft)]
        return {
            "id": draft.id, "question": made.question, "answers": [draft.answer], "type": draft.kind,
            "supporting": [step["passage"] for step in steps], "steps": steps,
            "context": [{"id": one.id, "title": one.title, "text": one.text} for one in context],
        }  # fmt: skip

    def _context(self, part: str, draft: Draft) -> list[int]:
        """A question's passages and distractors of the part, half of them on the same entities, in random order."""
        rng, size, own = random.Random(draft.id), self.options.context, self.numbers[part]
        needed = [fact.passage for fact in draft.facts]
        same = set().union(*(self._about[key(name)] for name in (*draft.given, *draft.sought)))
        near = sorted(same.intersection(own).difference(needed))
        near = rng.sample(near, min(len(near), (size - len(needed)) // 2))
        far = (rng.choice(own) for _ in range(20 * size))
        chosen = list(islice(dict.fromkeys([*needed, *near, *far]), size))
        return rng.sample(chosen, len(chosen))


class QuestionBuild:
    """Makes the questions of both parts from drafts, and keeps the reasons of rejections."""

    def __init__(self, material: Material, client: LLMClient, sampling: Sampling) -> None:
        self._material, self._options, self._client = material, material.options, client
        self._prompts = load_question_prompts(self._options.prompts)
        self._sampling = {role: replace(sampling, max_tokens=most) for role, most in MAX_TOKENS.items()}
        self.kept: dict[str, list[tuple[Draft, Wording]]] = {part: [] for part in self._options.wanted()}
        self.rejected: list[dict[str, Any]] = []
        self._asked = set[str]()

    async def run(self) -> None:
        """Make the questions of both parts; the next draft replaces a rejected draft."""
        wanted, pending = self._options.wanted(), None
        left = {part: self._material.drafts(part) for part in wanted}
        while batch := [(p, draft) for p, n in wanted.items() for draft in islice(left[p], n - len(self.kept[p]))]:
            drafts = iter(progress(batch, "drafts"))
            async with aclosing(in_order(drafts, lambda one: self._make(one[1]), _AT_ONCE)) as results:
                async for (part, draft), made in results:
                    pending = made if isinstance(made, RepliesPending) else pending
                    self._take(part, draft, made)
            if pending:
                raise RepliesPending(self._client.pending_message() or str(pending))
            found = ", ".join(f"{part} {len(self.kept[part]):,} of {n:,}" for part, n in wanted.items())
            logger.info("%s questions; %d drafts rejected", found, len(self.rejected))

    async def _make(self, draft: Draft) -> Wording | Exception:
        try:
            return await make_question(
                self._client, self._prompts, self._sampling, draft, self._material.of(draft), self._options.copied
            )
        except (RetriesExhausted, SetupError):
            raise
        except (UnusableReply, CallError, RepliesPending) as error:
            return error.with_traceback(None)

    def _take(self, part: str, draft: Draft, made: Wording | Exception) -> None:
        if isinstance(made, Wording) and key(made.question) not in self._asked:
            self._asked.add(key(made.question))
            self.kept[part].append((draft, made))
            return
        reason = Rejection.REPEATED if isinstance(made, Wording) else Rejection.CALL_REFUSED
        if isinstance(made, UnusableReply):
            reason = Rejection(made.reason) if made.reason in list(Rejection) else Rejection.UNREADABLE
        said = made.explanation if isinstance(made, UnusableReply) else str(made)
        facts = [fact.triple.as_list() for fact in draft.facts]
        row = {"split": part, "question_id": draft.id, "kind": draft.kind, "facts": facts, "answer": draft.answer}
        self.rejected.append({**row, "reason": str(reason), "detail": said, "reply": getattr(made, "reply", "")})

    def write(self, folder: Path) -> dict[str, int]:
        """Write questions, rejected drafts, statistics and card; return the number of questions per part."""
        files = {f"{part}.jsonl": [self._material.row(part, *one) for one in kept] for part, kept in self.kept.items()}
        for name, rows in {DROPPED: self.rejected, **files}.items():
            write_text(folder / name, "".join(map(json_line, rows)))
        splits = {part: len(kept) for part, kept in self.kept.items()}
        kinds = {part: Counter(draft.kind for draft, _ in kept) for part, kept in self.kept.items()}
        numbers = {"records": sum(splits.values()), "splits": splits, "kinds": kinds, "samples": {}}
        table = Table(["kind", *splits], [[k, *(str(one[k]) for one in kinds.values())] for k in PATH_KINDS], "Kinds")
        kind: Any = SimpleNamespace(plural="questions", tables=lambda numbers, facts: [table])
        card = card_body(kind, facts := self._facts(), numbers)
        shards = "".join(f"\n  - split: {part}\n    path: {part}.jsonl" for part in splits)
        head = f"---\nconfigs:\n- config_name: default\n  data_files:{shards}\n---\n\n"
        write_text(folder / CARD, head + card)
        write_json(folder / STATISTICS, {"statistics": numbers, "build": asdict(facts)})
        return splits

    def _facts(self) -> BuildFacts:
        found = {part: Counter(row["reason"] for row in self.rejected if row["split"] == part) for part in self.kept}
        notes = [f"The part {part} is about {n:,} documents." for part, n in self._material.documents.items() if n]
        for part, wanted in self._options.wanted().items():
            if (made := len(self.kept[part])) < wanted:
                notes.append(f"The part {part} has {made:,} of the {wanted:,} requested questions.")
                logger.warning("%s", notes[-1])
        return BuildFacts(
            title="Questions over a corpus",
            summary="Questions over the facts of a corpus, with answers, supporting passages, sub-queries and triples. "
            "A teacher worded them; a program and the teacher checked them. Questions of `test` are about documents "
            f"of which `train` has no passage. `{DROPPED}` has the rejected drafts.",
            drops={part: {str(r): counts[r] for r in Rejection if counts[r]} for part, counts in found.items()},
            issues=dict(+self._material.counts),
            files={str(f): file_digest(f) for f in (corpus_file(self._options.corpus), self._options.triples)},
            options=asdict(self._options) | {"held out": ", ".join(sorted(self._material.held_out))},
            prompts={self._prompts.files[name]: digest for name, digest in self._prompts.digests().items()},
            models={"teacher": self._client.model},
            notes=notes,
        )


def build_questions(
    options: QuestionBuildOptions, output: str, overwrite: bool, open_client: Callable[[], LedgerClient], how: Sampling
) -> dict[str, int]:
    """Build the folder and return the number of questions per part."""

    async def run(material: Material) -> QuestionBuild:
        async with open_client() as client:
            build = QuestionBuild(material, client, how)
            await build.run()
            return build

    with new_folder(output, MADE, overwrite, [corpus_file(options.corpus), options.triples]) as folder:
        build = asyncio.run(run(Material(options)))
        if not any(build.kept.values()):
            reasons = Counter(row["reason"] for row in build.rejected)
            found = "; ".join(f"{n} x {reason}" for reason, n in reasons.items())
            raise ValueError(f"no question could be made ({found or 'the triples give no path of these kinds'})")
        numbers = build.write(folder)
    lost = sum(row["reason"] in (Rejection.UNREADABLE, Rejection.CALL_REFUSED) for row in build.rejected)
    if 10 * lost > lost + sum(numbers.values()):
        raise CallError(f"{output} is written, but {lost:,} drafts failed for unusable replies: see its {DROPPED}")
    return numbers
