"""Selection among the runs of a question: the shortest ones, or a better and a worse reply to one prompt.

Both need all runs of a question, which may lie far apart in the results, so the runs wait in a table on disk.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from tripletune.core.data.pairs import Trajectory
from tripletune.data_builders.datasets import RowKind
from tripletune.data_builders.datasets.lookup import temporary_database
from tripletune.data_builders.trajectories.runs import QuestionRun, RunDrop

_WHERE = "a run's row"


def shortest_runs(
    runs: Iterable[QuestionRun], most: int, kind: RowKind[Any], drops: Counter[str]
) -> Iterator[QuestionRun]:
    """Yield the `most` shortest runs per question, in the order of `runs`; of equally long runs the first is kept.

    `drops` counts the others, as `RunDrop.NOT_SHORTEST`. The rank must be known before the first run is yielded, so
    nothing is yielded until all runs are read.
    """
    with closing(temporary_database()) as database:
        database.execute("CREATE TABLE runs (question, size, rows, split, good)")
        for run in runs:
            rows = json.dumps([row.to_json() for row in run.rows])
            values = (run.question_id, run.size, rows, run.split, run.good)
            database.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?)", values)
        ranked = database.execute(
            "SELECT row_number() OVER (PARTITION BY question ORDER BY size, rowid), question, size, rows, split, good "
            "FROM runs ORDER BY rowid"
        )
        for rank, question_id, size, rows, split, good in ranked:
            if rank <= most:
                kept = [kind.read(row, _WHERE) for row in json.loads(rows)]
                yield QuestionRun(question_id, size, kept, split, bool(good))
            else:
                drops[RunDrop.NOT_SHORTEST] += 1


class _Reply(NamedTuple):
    """A distinct reply to a prompt.

    Attributes:
        question, role, prompt: Two replies are compared where all three are equal.
        row: The stored row that learns the reply, of the first run that gave it.
        good_share: Share of good runs among those that gave the reply.
        place: Number of the first run that gave the reply, to break ties.
    """

    question: str
    role: str
    prompt: str
    reply: str
    row: str
    split: str
    good_share: float
    place: int


def preference_pairs(runs: Iterable[QuestionRun], kind: RowKind[Any]) -> Iterator[QuestionRun]:
    """Yield, per prompt, the row of the best reply with the worst as `rejected`, ranked by the share of good runs.

    Prompts whose replies all have the same share give no pair. The pairs are sorted by question, role and prompt.

    A run as a whole is good or not, so a reply is judged by the runs that gave it: one good run may contain a bad plan.
    Replies are compared only under the very same prompt, because a model that learns from pairs is to prefer one reply
    over another where it stands. `groupby` needs the rows in the order of its key, which the query gives; within a
    prompt the best reply comes first and the worst last. Guarded by tests/data_builders/trajectories.
    """
    with closing(temporary_database()) as database:
        database.execute("CREATE TABLE replies (question, role, prompt, reply, good, row, split)")
        for run in runs:
            for row in run.rows:
                role = row.role if isinstance(row, Trajectory) else ""
                prompt, reply = kind.text(row)
                stored = json.dumps(row.to_json())
                values = (run.question_id, role, prompt, reply, run.good, stored, run.split)
                database.execute("INSERT INTO replies VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        # Beside min(rowid), SQLite takes the plain columns of a group, `row` and `split`, from the row with the least
        # rowid: https://www.sqlite.org/lang_select.html#bareagg
        ranked = database.execute(
            "SELECT question, role, prompt, reply, row, split, avg(good) AS share, min(rowid) AS place FROM replies "
            "GROUP BY question, role, prompt, reply ORDER BY question, role, prompt, share DESC, place"
        )
        replies = map(_Reply._make, ranked)
        for _, group in groupby(replies, key=lambda reply: (reply.question, reply.role, reply.prompt)):
            best, *others = group
            if not others:
                continue
            worst = others[-1]
            if best.good_share > worst.good_share:
                better = replace(kind.read(json.loads(best.row), _WHERE), rejected=worst.reply)
                yield QuestionRun(best.question, 1, [better], best.split)
