"""Label questions, extract triples and embed a corpus with the workers of a Ray cluster (Ray Data).

    tripletune ray subq --workers 2 OPTIONS     # of `tripletune build subq`
    tripletune ray extract --workers 2 OPTIONS  # of `tripletune rag extract`
    tripletune ray index --workers 2 OPTIONS    # of `tripletune rag index`

Workers make the calls that the ledger lacks, or process the passages or texts that store or index lack. The results
equal those of the one-machine command. The same command continues a stopped run. RAY_ADDRESS names the cluster; without
RAY_ADDRESS, a cluster is started on this machine. See docs/guide/scale.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from tripletune.core.calls import Backend, CallError, Completion, Message, Sampling
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.passages import Passage, read_corpus
from tripletune.core.files import check_new
from tripletune.core.options import setting
from tripletune.core.program import run_program
from tripletune.data_builders.subq.build import build
from tripletune.data_builders.subq.options import read_command, subq_parser
from tripletune.llm.backends import LLMOptions, load_backend, open_client
from tripletune.llm.backends._servers import Servers
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, Retry
from tripletune.rag.extract import CorpusExtraction, add_extract_arguments
from tripletune.rag.extractor import open_extractor
from tripletune.rag.search.opened import build_indexes, search_embedder
from tripletune.rag.search.options import SearchOptions
from tripletune.rag.triple_store import Extraction, TripleStore

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

logger = logging.getLogger(__name__)
Work = Callable[[list[str]], list[Any]]


@dataclass(frozen=True)
class RayOptions:
    """How the work is divided among workers."""

    workers: int = setting(2, "worker processes on all machines together", at_least=1)
    worker_cpus: float = setting(1.0, "CPU cores per worker", above=0)
    worker_gpus: float = setting(0.0, "GPUs per worker", at_least=0)
    block: int = setting(256, "passages or texts per batch of a worker", at_least=1)
    replies: str = setting(
        f"{tempfile.gettempdir()}/tripletune-{os.getuid()}/replies.sqlite",
        "ledger on each machine for replies that are not yet returned; its folder must belong to you alone",
    )


def start_ray(shared: RayOptions) -> AbstractContextManager[Any]:
    """Return a context with a connection to the cluster of RAY_ADDRESS, or to a cluster started on this machine."""
    import ray

    if "RAY_ADDRESS" in os.environ:
        return ray.init()
    # Two cores more than the workers', because Ray Data reads and splits the rows in separate tasks.
    cores = math.ceil(shared.workers * shared.worker_cpus) + 2
    return ray.init(address="local", num_cpus=cores, object_store_memory=2**29, include_dashboard=False)


def blocks_from_workers(
    rows: Iterable[str],
    make: Callable[..., Work],
    *make_arguments: Any,
    shared: RayOptions,
    folder: Path,
    ordered: bool = False,
) -> Iterator[list[Any]]:
    """Let each worker of Ray Data call `make` once, apply what it returns to blocks of rows, and yield each block.

    Rows are first written to a file in `folder`, so that Ray can read any of them again after a worker was lost. The
    cluster is entered only if there is something to do, because starting it takes seconds.

    Args:
        make: Returns the function that each worker applies to blocks of rows.
        *make_arguments: Arguments of `make`, which must be picklable, since the workers are other processes.
        folder: A folder on this machine.
        ordered: Whether a block waits for the blocks before it.
    """
    import ray.data

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ray-", dir=folder) as scratch, ExitStack() as opened:
        todo = Path(scratch).absolute() / "todo.parquet"
        count = _write_rows(rows, todo)
        logger.info("%s rows to do", f"{count:,}")
        if not count:
            return
        opened.enter_context(start_ray(shared))
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = sys.stderr.isatty()
        context.execution_options.preserve_order = ordered
        # The file is on this machine, and other machines need not see it.
        this_machine = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        table = ray.data.read_parquet(str(todo), label_selector=this_machine)
        done = table.repartition(target_num_rows_per_block=shared.block).map_batches(
            _BlockWorker,
            fn_constructor_args=(make, *make_arguments),
            batch_size=shared.block,
            compute=ray.data.ActorPoolStrategy(size=shared.workers, max_tasks_in_flight_per_actor=2),
            num_cpus=shared.worker_cpus,
            num_gpus=shared.worker_gpus or None,
        )
        try:
            for batch in done.iter_batches(batch_size=None, batch_format="numpy"):
                yield batch["row"].tolist()
        except ray.exceptions.RayTaskError as error:
            # Ray returns a worker's error only as text; the error is the last line of the first traceback.
            cause = str(error).split("\n\nThe above exception")[0].strip().splitlines()[-1]
            raise CallError(f"a worker failed: {cause}. Finished blocks are kept: run again to continue") from error


def _write_rows(rows: Iterable[str], file: Path) -> int:
    """Write rows to a Parquet file, a chunk at a time since they may be a whole corpus, and return their number."""
    count = 0
    stream = iter(rows)
    with pq.ParquetWriter(file, pa.schema([("row", pa.string())]), compression="zstd") as writer:
        while chunk := list(islice(stream, 1024)):
            writer.write_table(pa.table({"row": chunk}))
            count += len(chunk)
    return count


class _BlockWorker:
    """A worker of Ray Data, which turns a batch {"row": [...]} into a batch {"row": [...]}.

    Args:
        make: Opens what the work needs, once per worker, and returns the work.
        *make_arguments: Its arguments.
    """

    def __init__(self, make: Callable[..., Work], *make_arguments: Any) -> None:
        self._work = make(*make_arguments)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """Process a block; Ray Data hands over columns as arrays."""
        return {"row": self._work(batch["row"].tolist())}


def embed_work(options: SearchOptions) -> Work:
    """Return a function that turns texts into an index's vectors (float16 bytes)."""
    encode = search_embedder(options).encode
    return lambda texts: [vector.tobytes() for vector in encode(texts).astype(np.float16)]


class RayWorker(Backend):
    """A backend whose calls are made by a Ray worker, with the worker's own limits and retries.

    Args:
        llm: The options of the model that the worker calls.
        shared: How Ray is started, and what a worker gets.
    """

    def __init__(self, llm: LLMOptions, shared: RayOptions) -> None:
        # This client makes no calls; the ledger's keys hold its model.
        client = open_client(llm)
        self._llm = llm
        self._shared = shared
        self.model = client.model
        self.send_temperature = client.send_temperature

    @cached_property
    def _ray_actor(self) -> Any:
        """The handle of a `_ServerCaller` in a Ray worker, which the first call that the ledger lacks starts.

        Ray makes the methods of a handle when it is called, so they have no types.
        """
        import ray

        if not ray.is_initialized():
            start_ray(self._shared)
        # Ray restarts a killed worker and repeats its calls.
        worker = ray.remote(_ServerCaller).options(
            num_cpus=self._shared.worker_cpus,
            num_gpus=self._shared.worker_gpus,
            max_concurrency=self._llm.concurrency,
            max_restarts=-1,
            max_task_retries=-1,
        )
        return worker.remote(self._llm)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat; the worker's own error is raised here, so that it is handled like that of any backend."""
        from ray.exceptions import RayTaskError

        try:
            return await self._ray_actor.complete.remote(messages, sampling)
        except RayTaskError as error:
            raise error.cause from None

    async def close(self) -> None:
        """Leave the cluster, or end the one that this process has started."""
        import ray

        ray.shutdown()


class _ServerCaller:
    """What runs in a Ray worker of `RayWorker`."""

    def __init__(self, llm: LLMOptions) -> None:
        self._client = open_client(llm)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat with this worker's own limits and retries."""
        return await self._client.chat(messages, role="ray", sampling=sampling)


def share_subq(argv: list[str], shared: RayOptions) -> int:
    """Run `tripletune build subq`, with workers that make the teacher's calls.

    The questions stay in this process, so the data set is the same as that of one machine. A model on this machine
    would not be shared, and a batch file is one file for all calls, so only servers are called by workers.
    """
    parsed = subq_parser().parse_args(argv)
    sources, options, llm = read_command(parsed)
    if llm is None or llm.is_local or not load_backend(llm.backend).sends:
        raise ValueError("workers can only call servers: give --teacher openai and --teacher-url, for example")
    if options.direct_answer_model or parsed.dry_run:
        raise ValueError("--direct-answer-model and --dry-run work only in `tripletune build subq`: leave them out")
    check_new(options.output, [str(llm.ledger)])

    def client() -> LedgerClient:
        """Open the ledger's client, whose calls go to the workers in turn."""
        workers = Servers([RayWorker(replace(llm, ledger=None), shared) for _ in range(shared.workers)])
        # The workers retry failed calls, so this client does not.
        return LedgerClient(workers, Ledger(str(llm.ledger)), retry=Retry(1, empty_attempts=1))

    # Each worker handles as many questions at once as one process would.
    options = replace(options, concurrency=options.concurrency * shared.workers)
    build(sources, options, client, llm.sampling(1))
    return 0


def share_extract(argv: list[str], shared: RayOptions) -> int:
    """Run `tripletune rag extract`, with workers that read the passages that the store lacks.

    Only this process writes to the store, because SQLite's write-ahead log needs a local disk. What a worker has read
    is stored block by block, so a stopped run loses at most the blocks in progress.
    """
    start = time.monotonic()
    parser = CommandParser(prog="tripletune ray extract")
    add_extract_arguments(parser)
    args = parser.parse_args(argv)
    if args.teacher and not load_backend(args.teacher).sends:
        raise ValueError("--teacher batch works only in `tripletune rag extract`: use another teacher backend")
    # Workers keep a teacher's replies on their own disk until a block is done.
    worker_args = parser.parse_args(argv)
    if args.teacher or args.teacher_ledger:
        worker_args.teacher_ledger = shared.replies
    read_extraction = TypeAdapter(Extraction).validate_json
    with closing(TripleStore(args.output)) as store:
        run = CorpusExtraction(open_extractor(args), store, args.piece_limit, keep_unsupported=args.keep_unsupported)
        passages = islice(read_corpus(args.corpus, blank_texts=True), args.limit)
        rows = (json.dumps([passage.title, passage.text, passage.id]) for _, passage in run.missing(passages))
        blocks = blocks_from_workers(rows, _extract_in_worker, worker_args, shared=shared, folder=store.path.parent)
        # The last row of a block holds its counts.
        for *extractions, counts in blocks:
            store.put(run.id, map(read_extraction, extractions))
            for name, count in json.loads(counts).items():
                # This process counts the passages, because it knows which passages the store already had.
                if name != "passages":
                    vars(run.counts)[name] += count
    run.counts.seconds = time.monotonic() - start
    logger.info("%s: %s", args.output, run.counts.line())
    return run.counts.exit_code


def _extract_in_worker(args: argparse.Namespace) -> Work:
    """Return `_extract_work`, after making sure that no other user can write to the ledger's folder.

    The default folder lies in the temporary folder of the machine, where any user may have made it before.
    """
    if args.teacher_ledger:
        folder = Path(args.teacher_ledger).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and folder.lstat().st_uid != os.getuid():
            raise ValueError(f"--replies: {folder} belongs to another user, who could add replies: name your own")
    return _extract_work(args)


def _extract_work(args: argparse.Namespace) -> Work:
    """Make the function that maps passages to extractions, with the counts as last row.

    Rows are JSON: `[title, text, …]`, the fields of a `Passage`, and the fields of an `Extraction` or of the counts.
    """
    extractor = open_extractor(args)
    runner = asyncio.Runner()

    def work(rows: list[str]) -> list[str]:
        """Extract a block of passages into a store of its own, since the workers of Ray share no file."""
        passages = (Passage(*json.loads(row)) for row in rows)
        with tempfile.TemporaryDirectory() as folder, closing(TripleStore(Path(folder) / "block.sqlite")) as store:
            extraction = CorpusExtraction(extractor, store, args.piece_limit, keep_unsupported=args.keep_unsupported)
            counts = runner.run(extraction.run(passages))
            results = [json.dumps(asdict(extracted)) for extracted in store.extractions(extraction.id)]
        return [*results, json.dumps(asdict(counts))]

    return work


def share_index(argv: list[str], shared: RayOptions) -> int:
    """Run `tripletune rag index`, with workers that embed the texts that the index lacks.

    The blocks come in the order of the texts, since an index names a vector only by its place.
    """
    parser = CommandParser(
        prog="tripletune ray index",
        example="tripletune ray index --corpus corpus.jsonl --retriever dense --encoder SPEC --index runs/index",
    )
    add_arguments(parser, SearchOptions)
    options = from_arguments(SearchOptions, parser.parse_args(argv))
    if options.retriever == "bm25" or not options.encoder:
        raise ValueError("workers only embed texts: give --retriever dense or hybrid, and an --encoder")

    def stream(texts: Iterable[str], _: int) -> Iterator[np.ndarray]:
        """Yield the vectors of texts, (n, D) float16, in blocks of the workers instead of the wanted size."""
        folder = Path(str(options.index))
        for rows in blocks_from_workers(texts, embed_work, options, shared=shared, folder=folder, ordered=True):
            yield np.frombuffer(b"".join(rows), np.float16).reshape(len(rows), -1)

    embedder = search_embedder(options)
    embedder.stream = stream  # type: ignore[assignment, method-assign]
    build_indexes(options, embedder)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run from a command line with options of Ray and of the one-machine command."""
    # The one-machine command reads the options that this parser does not know.
    parser = CommandParser(
        prog="tripletune ray",
        description=(__doc__ or "").split("\n")[0],
        example="tripletune ray extract --workers 2 --corpus corpus.jsonl --model EXTRACTOR --output triples.sqlite",
        hands_on=True,
    )
    commands = {"subq": share_subq, "extract": share_extract, "index": share_index}
    parser.add_argument("command", choices=commands, help="with the options of build subq, rag extract or rag index")
    add_arguments(parser, RayOptions)
    parsed, command_argv = parser.parse_known_args(argv)
    return run_program(lambda: commands[parsed.command](command_argv, from_arguments(RayOptions, parsed)))


if __name__ == "__main__":
    sys.exit(main())
