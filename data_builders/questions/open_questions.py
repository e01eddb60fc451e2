"""Open questions about a whole corpus: users x tasks x questions over its description (`build open-questions`).

This is the procedure of LightRAG (Guo et al., 2024, after Edge et al., 2024), by which TH-RAG made 125 questions per
domain of UltraDomain (appendix B): five users, five tasks each, five questions each. A model describes the corpus from
excerpts, names users, then their tasks, then the questions of each task. Drawn excerpts and a call per user and per
task are our choices. There are no gold answers: a judge compares the answers of two systems. The prompts are
`tripletune/prompts/data/open_*.md`, in our words.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from tripletune.core.calls import LLMClient, Sampling, UnusableReply
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.concurrency import all_of
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import corpus_file, read_corpus
from tripletune.core.files import check_new, json_line, new_file
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import run_program
from tripletune.data_builders.datasets import listed
from tripletune.llm.backends import LLMOptions, add_chat_model, open_client
from tripletune.llm.question_client import PromptSet, load_prompts
from tripletune.llm.replies import ask
from tripletune.llm.reply_json import find_json, without_thoughts

logger = logging.getLogger(__name__)
T = TypeVar("T")
DESCRIBE, USERS, TASKS, QUESTIONS = "open.describe", "open.users", "open.tasks", "open.questions"
_ROLES = (DESCRIBE, USERS, TASKS, QUESTIONS)
_MAX_TOKENS = {DESCRIBE: 512, USERS: 1024, TASKS: 1024, QUESTIONS: 1024}
MISSING = "questions missing, since a reply could not be read or repeated others"
load_open_prompts = partial(load_prompts, tuple(role.replace(".", "_") for role in _ROLES), room="data")


@dataclass(frozen=True, slots=True)
class OpenOptions(CheckedOptions):
    """What questions to make; the defaults are the paper's 5 x 5 x 5."""

    corpus: str = field(metadata={"help": "passages: JSON lines, or the folder of `build passages`"})
    output: str = field(metadata={"help": "JSON-lines file of questions to write; an existing file is replaced"})
    users: int = setting(5, "kinds of users", at_least=1)
    tasks: int = setting(5, "tasks per user", at_least=1)
    questions: int = setting(5, "questions per task", at_least=1)
    excerpts: int = setting(
        40, "passages, drawn from all over the corpus, that the description is made from", at_least=1
    )
    excerpt_characters: int = setting(500, "maximum characters of a drawn passage", at_least=1)
    seed: int = setting(0, "seed of the draw")
    prompts: str | None = setting(None, "folder of custom prompts: any of open_{describe,users,tasks,questions}.md")


@dataclass(frozen=True, slots=True)
class TaskQuestions:
    """A task of a user, and its questions."""

    user: str
    task: str
    questions: Sequence[str]


class OpenBuild:
    """Asks the model for description, users, tasks and questions."""

    def __init__(self, options: OpenOptions, client: LLMClient, sampling: Sampling) -> None:
        self._options = options
        self._client = client
        self._sampling = sampling
        self._prompts: PromptSet = load_open_prompts(options.prompts)

    async def run(self) -> list[TaskQuestions]:
        """All tasks with their questions; a task whose reply could not be read has none."""
        excerpts = drawn_excerpts(self._options)
        description = await self._ask_teacher(
            DESCRIBE, "\n\n".join(excerpts), lambda reply: without_thoughts(reply).strip()
        )
        about = f"Collection:\n{description}"
        options = self._options
        users = await self._ask_list(USERS, f"{about}\n\nName {options.users} users.", options.users)
        turns = [f"{about}\n\nUser: {user}\n\nName {options.tasks} tasks." for user in users]
        tasks = await all_of([self._ask_list(TASKS, turn, options.tasks) for turn in turns])
        pairs = []
        for user, tasks_of_user in zip(users, tasks, strict=True):
            pairs += [(user, task) for task in tasks_of_user]
        return list(await all_of([self._ask_questions(about, user, task) for user, task in pairs]))

    async def _ask_questions(self, about: str, user: str, task: str) -> TaskQuestions:
        """The questions of a task; none if the reply stays unusable, which costs a task and not the build."""
        number = self._options.questions
        turn = f"{about}\n\nUser: {user}\n\nTask: {task}\n\nWrite {number} questions."
        try:
            return TaskQuestions(user, task, await self._ask_list(QUESTIONS, turn, number))
        except UnusableReply as error:
            logger.warning("no questions for the task %r: %s", task, error.explanation)
            return TaskQuestions(user, task, ())

    async def _ask_list(self, role: str, turn: str, number: int) -> list[str]:
        """Ask for a list of this many texts; see `read_list`."""
        return await self._ask_teacher(role, turn, partial(read_list, number=number))

    async def _ask_teacher(self, role: str, turn: str, parse: Callable[[str], T]) -> T:
        """Send a user turn under the prompt of a role; return what `parse` makes of the reply.

        Raises:
            UnusableReply: The reply, and the one after a repair turn, can't be parsed.
        """
        chat = self._prompts.chat(role.replace(".", "_"), turn)
        sampling = replace(self._sampling, max_tokens=_MAX_TOKENS[role])
        return await ask(self._client, chat, parse, role=role, sampling=sampling)


def drawn_excerpts(options: OpenOptions) -> list[str]:
    """Beginnings of passages, drawn from the whole corpus in one pass, in the corpus's order (reservoir sampling)."""
    draw = random.Random(options.seed)
    drawn: dict[int, tuple[int, str]] = {}
    for number, passage in enumerate(read_corpus(options.corpus)):
        place = number if number < options.excerpts else draw.randrange(number + 1)
        if place < options.excerpts:
            drawn[place] = (number, passage.content[: options.excerpt_characters])
    return [text for _, text in sorted(drawn.values())]


def read_list(reply: str, number: int) -> list[str]:
    """The first `number` distinct texts of a reply's JSON array.

    Raises:
        UnusableReply: There is no array of texts, or it has fewer.
    """
    form = f"one JSON array of {number} texts and nothing else"
    items = find_json(reply, list, advice=f"Write {form}.")
    texts: dict[str, str] = {}
    for item in items:
        if isinstance(item, str) and item.strip():
            texts.setdefault(normalize_answer(item), " ".join(item.split()))
    if len(texts) < number:
        raise UnusableReply("too_few", f"The reply has {len(texts)} different texts instead of {number}: write {form}.")
    return list(texts.values())[:number]


def build_open_questions(options: OpenOptions, client: LLMClient, sampling: Sampling) -> Counter[str]:
    """Write the questions, each text once; return the counts."""
    counts: Counter[str] = Counter(questions=0)
    seen: set[str] = set()
    asked = asyncio.run(_run_and_close(OpenBuild(options, client, sampling), client))
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8") as file:
        for task in asked:
            for question in task.questions:
                key = normalize_answer(question)
                if key in seen:
                    continue
                seen.add(key)
                row = {"id": f"open-{len(seen):03}", "question": question, "user": task.user, "task": task.task}
                file.write(json_line(row))
        counts["questions"] = len(seen)
        counts[MISSING] = options.users * options.tasks * options.questions - len(seen)
        if not seen:
            raise ValueError(f"{options.corpus}: the teacher gave no question; `ledger peek` shows its replies")
    return +counts


async def _run_and_close(build: OpenBuild, client: LLMClient) -> list[TaskQuestions]:
    """Run a build, and close the client also after an error."""
    try:
        return await build.run()
    finally:
        await client.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build open-questions",
        description="Make open questions about a whole corpus: users x tasks x questions, without gold answers.",
        example="tripletune build open-questions --corpus agriculture.jsonl --llm openai:MODEL --output open.jsonl",
    )
    add_arguments(parser, OpenOptions)
    add_chat_model(parser.add_argument_group("teacher"))
    parsed = parser.parse_args(arguments)
    stopped = "interrupted; replies received so far are in the ledger, run the command again to continue"
    return run_program(lambda: _run_command(parsed), stopped=stopped)


def _run_command(parsed: argparse.Namespace) -> None:
    """Run a parsed command; the ledger lies beside the output, so that a stopped run continues without paying twice."""
    options = from_arguments(OpenOptions, parsed)
    ledger = parsed.teacher_ledger or f"{options.output}.ledger.sqlite"
    llm = from_arguments(LLMOptions, parsed, "teacher", ledger=ledger)
    check_new(options.output, [corpus_file(options.corpus), ledger])
    counts = build_open_questions(options, open_client(llm), llm.sampling(1))
    logger.info("%s: %s", options.output, listed(counts))


if __name__ == "__main__":
    sys.exit(main())
