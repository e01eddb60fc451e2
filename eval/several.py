"""Several calls of `eval run` with one teacher and one ledger: the questions of many tasks, and what waits in one file.

Each job keeps its own folder with results and metrics, and is what its own command line would have made; any of them
can be looked at, compared and continued by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from tripletune.eval.harness import QuestionsPending, answer_questions, finish_task, pending_message
from tripletune.eval.progress import Progress
from tripletune.eval.suites.questions import Job

logger = logging.getLogger(__name__)


def run_jobs(jobs: Sequence[Job]) -> None:
    """Answer the questions of jobs that share their language models, one job after the other.

    A job that is answered gets its metrics, whatever the others wait for. Models and logs are closed at the end.

    Args:
        jobs: At least one; opened by `eval.commands.open_job` with the same models.

    Raises:
        QuestionsPending: questions wait for a batch; the message names the request files of all jobs.
        RetriesExhausted: the model's server does not answer; run again later.
        SetupError: a key, an address or a model's name is at fault.
    """
    try:
        pending = asyncio.run(_run(jobs))
    finally:
        for job in jobs:
            job.log.close()
    if pending:
        raise QuestionsPending(pending)


async def _run(jobs: Sequence[Job]) -> str:
    tools = jobs[0].setup.tools
    total = 0
    try:
        for job in jobs:
            started, before = time.perf_counter(), len(job.log.done)
            logger.info("%s: %d questions, %d answered before", job.setup.task.name, len(job.ids), before)
            with Progress(len(job.ids), before) as progress:
                waiting = await answer_questions(job.setup, job.questions(), job.log, job.concurrency, progress)
            if not waiting:
                finish_task(job.setup, job.ids, job.log, len(job.log.done) - before, time.perf_counter() - started)
            total += waiting
        return pending_message(tools, total) if total else ""
    finally:
        await tools.close()
