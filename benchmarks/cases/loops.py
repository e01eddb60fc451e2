"""What many questions under way are worth to the loops of RAS and CIRAG, against one question after the other.

Both ways run the same loop with the same model in the same process; only the number of questions under way differs.
Questions, corpus and triples are a seeded fictional world. Answers that differ are counted: in float32 there should be
none. On the CPU unless there is a GPU.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import ENCODER, MODEL, Options, Result, Way, quiet, take_turns
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.options import set_values, setting
from tripletune.rag.systems import LoopOptions, Tools, load_system
from tripletune.rag.systems.cirag.options import CiragOptions


@dataclass(frozen=True)
class LoopsOptions(Options):
    """What both loops can be told."""

    repeats: int = setting(1, "passes of each way, whose median counts", at_least=1)
    questions: int = setting(16, "questions to answer", at_least=1)
    one_by_one: int | None = setting(None, "answer only the first so many of them one by one", at_least=1)
    concurrency: int = setting(64, "most questions under way together", at_least=1)
    batch_size: int = setting(16, "most inputs in a forward pass", at_least=1)
    dtype: str = setting("float32", "float32, bfloat16, float16 or auto")


@dataclass(frozen=True)
class RasOptions(LoopsOptions):
    """Options of `loop`."""

    model: str | None = setting(None, "trained Graph-LLM: run, checkpoint or export (without: an untrained one)")
    base: str = setting(MODEL, "language model of the untrained one")
    encoder: str = setting(ENCODER, "its sentence encoder")
    set: list[str] = setting(
        ["max_plan_tokens=24", "max_answer_tokens=16"], "options of the loop, NAME=VALUE, separated by commas"
    )


@dataclass(frozen=True)
class CiragLoopOptions(LoopsOptions):
    """Options of `cirag_loop`."""

    questions: int = setting(64, "questions to answer", at_least=1)
    batch_size: int = setting(64, "most calls in a forward pass", at_least=1)
    model: str = setting(MODEL, "language model with a chat template")
    integrator: str | None = setting(None, "a distilled student for the integration phase (without: the model)")
    set: list[str] = setting(
        ["max_rounds=2", "top_k=5", "candidates=15", "max_extraction_tokens=96", "max_integration_tokens=96",
         "max_generation_tokens=48"], "options of the loop, NAME=VALUE, separated by commas",
    )  # fmt: skip


def loop(options: RasOptions) -> Result:
    """The RAS loop: many questions under way against one by one.

    Without `--model` the model is untrained: what it says is worthless, how long it takes is what counts.
    """
    import torch

    from tripletune.models.graph_llm.loading import build_graph_llm, load_graph_llm
    from tripletune.models.loading import parse_dtype
    from tripletune.models.local.generator import LocalGenerator

    dtype = parse_dtype(options.dtype)
    if options.model is not None:
        model, processor = load_graph_llm(options.model, dtype)
    else:
        torch.manual_seed(options.seed)
        model, processor = build_graph_llm(
            options.base, encoder=options.encoder, dtype=dtype, graph_hidden_width=384, projector_width=768
        )
    model = model.to("cuda") if torch.cuda.is_available() else model

    def tools(retriever: Any, store: Any) -> Tools:
        # A generator of its own for each pass, so that no way finds the strings that the other has embedded.
        generator = LocalGenerator(model, processor, options.batch_size)
        return Tools(generator, generator, retriever, store)

    result = _compare("ras", options, _settings(LoopOptions, options.set), tools, WorldOptions())
    if options.model is None:
        result.notes.append("the model is untrained: its answers mean nothing, only their cost does")
    return result


def cirag_loop(options: CiragLoopOptions) -> Result:
    """The CIRAG loop on a local chat model: many questions under way against one by one.

    Without a ledger, so that every call is computed. A model that was not distilled for the loop rarely keeps to its
    format, so replies run to their limits; name a student with `--integrator` for the real mixture of rounds.
    """
    from tripletune.models.llm.backends.hf import HFBackend
    from tripletune.models.llm.ledger_client import LedgerClient

    # Triples extracted before, in the order of their store instead of the reranker's, which is no model call.
    loop_options = _settings(CiragOptions, ["rerank=no", "repairs=0", "extraction=store", *options.set])
    llm = LedgerClient(HFBackend(options.model, options.batch_size, options.dtype))
    student = options.integrator and LedgerClient(HFBackend(options.integrator, options.batch_size, options.dtype))

    def tools(retriever: Any, store: Any) -> Tools:
        first = _First(store, max(1, loop_options.candidates // loop_options.top_k))
        return Tools(llm=llm, integrator=student or None, retriever=retriever, store=first)

    return _compare("cirag", options, loop_options, tools, WorldOptions(one_hop=0))


def _settings(kind: Any, settings: Sequence[str]) -> Any:
    values, problems = set_values(kind, settings, "the loop")
    if problems:
        raise ValueError("; ".join(problems))
    return kind(**values)


class _First:
    """The first triples of each passage, so that the candidates of a round are as many as a reranker would leave."""

    def __init__(self, store: Any, each: int) -> None:
        self._store, self._each = store, each

    def get(self, passage: Any) -> Any:
        found = self._store.get(passage)
        return found if found is None else found[: self._each]


def _compare(
    system: str, options: LoopsOptions, loop_options: Any, tools: Callable[[Any, Any], Tools], world: WorldOptions
) -> Result:
    from tripletune.rag.retrieval.retrievers import open_retriever
    from tripletune.rag.triples.store import open_triples

    quiet()
    traces: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # One question more than is measured: it warms up model, encoder and indexes.
        world = replace(world, seed=options.seed, train=0, validation=0, test=options.questions + 1)
        write_world(world, folder / "world")
        retriever = open_retriever("bm25", folder / "world/test.corpus.jsonl", folder / "index")
        store = open_triples(folder / "world/test.triples.jsonl", folder / "triples.sqlite")
        lines = (folder / "world/test.jsonl").read_text(encoding="utf-8").splitlines()
        warm_up, *questions = [str(json.loads(line)["question"]) for line in lines]

        def way(name: str, asked: Sequence[str], concurrency: int) -> Way:
            def answer(some: Sequence[str]) -> None:
                traces[name] = asyncio.run(_answers(system, some, tools(retriever, store), loop_options, concurrency))

            return Way(name, work=lambda: answer(asked), warm_up=lambda: answer([warm_up]))

        ways = [
            way("one by one", questions[: options.one_by_one], 1),
            way("together", questions, options.concurrency),
        ]
        take_turns(ways, options.repeats)
        store.close()
    rows = [_row(way, traces[way.name]) for way in ways]
    pairs = list(zip(traces["one by one"], traces["together"]))
    differ = [
        {"question": one.question, "one_by_one": one.answer, "together": other.answer}
        for one, other in pairs
        if one.answer != other.answer
    ]
    decisions = [[[action.reply for action in trace.actions] for trace in pair] for pair in pairs]
    changed = sum(one != other for one, other in decisions)
    speed_up = rows[1]["questions_per_second"] / rows[0]["questions_per_second"]
    return Result(
        f"{system}: {options.questions} questions, median of {options.repeats} pass(es), {options.dtype}",
        {
            "questions under way": ("name", "{}"),
            "questions": ("questions", "{}"),
            "questions/s": ("questions_per_second", "{:.3f}"),
            "calls": ("calls_per_question", "{:.1f}"),
            "rounds": ("rounds_per_question", "{:.1f}"),
            "tokens read": ("prompt_tokens", "{}"),
            "written": ("completion_tokens", "{}"),
            "peak GB": ("peak_bytes", "GB"),
        },
        rows,
        [
            f"together is {speed_up:.2f} times as fast as one by one",
            f"of {len(pairs)} questions {len(differ)} have another answer and {changed} another decision",
        ],
        {"speed_up": round(speed_up, 3), "answers_that_differ": differ, "decisions_that_differ": changed},
    )


async def _answers(system: str, questions: Sequence[str], tools: Tools, options: Any, concurrency: int) -> list[Any]:
    run = load_system(system).run
    slots = asyncio.Semaphore(concurrency)

    async def answer(question: str) -> Any:
        async with slots:
            return await run(question, question, tools, options)

    return await asyncio.gather(*(answer(question) for question in questions))


def _row(way: Way, traces: Sequence[Any]) -> dict[str, Any]:
    count = len(traces)
    return way.row(
        questions=count,
        questions_per_second=round(count / way.median, 4),
        calls_per_question=round(sum(trace.calls for trace in traces) / count, 2),
        rounds_per_question=round(sum(len(trace.steps) for trace in traces) / count, 2),
        prompt_tokens=sum(trace.prompt_tokens for trace in traces),
        completion_tokens=sum(trace.completion_tokens for trace in traces),
    )
