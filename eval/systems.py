"""The options of `tripletune eval run`: the chat models that they name, and the part of each of several runs.

`--teacher`, `--teacher-model` and related options name the chat model that answers all prompts. `--integrator SPEC`
names a local model, such as a distilled student, for CIRAG's integration phase. `--oracle DIR/SPLIT` is a teacher that
knows the facts of a fictional world.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from tripletune.core.calls import LLMClient, RoleClients
from tripletune.core.command_line import CommandParser, add_arguments
from tripletune.core.config import load_config
from tripletune.core.options import CheckedOptions, ConfigError, convert, no_option, not_one_of, rare, setting
from tripletune.eval import about_tasks, task_names
from tripletune.eval.suites import SuiteOptions
from tripletune.llm.backends import LLMOptions, open_client, read_spec
from tripletune.rag.costs import PRICE_HELP
from tripletune.rag.search.options import SearchOptions
from tripletune.rag.system_options import (
    ManyQuestionsOptions,
    SystemOptions,
    add_options_of_systems,
    options_for,
    system_problems,
)
from tripletune.rag.systems import System, find_system, system_names

# What a model reads in a loop instead of the facts that the loop found; see `eval.controls`.
Control = Literal["no_facts", "other_facts", "other_graph"]
# The model name in `LLMOptions` that have no model, only other options.
UNNAMED = "unnamed"
SET_HELP = (
    "an option of the system, for example candidates=50 or granularities=triples,passages; with several systems, "
    "cirag.candidates=50 is for one of them; repeatable"
)
LLM_HELP = (
    "chat model for all calls or for one role, [ROLE=]BACKEND:MODEL[@URL,URL], for example openai:gpt-4o-mini or "
    "t2rag.resolve=hf:runs/student; several URLs share the calls; repeatable"
)


@dataclass(kw_only=True)
class QuestionOptions(SuiteOptions, ManyQuestionsOptions, SystemOptions):
    """Options of `tripletune eval run`."""

    system: str = setting(
        dataclasses.MISSING, f"one or several systems: {', '.join(system_names())}", also="systems", several=True
    )
    task: str = setting(
        dataclasses.MISSING,
        f"benchmarks, separated by commas: {', '.join(task_names())}, or a YAML file",
        also="tasks",
        several=True,
    )
    data: str = setting(
        dataclasses.MISSING,
        "question file or hub id; with --systems or --tasks of several names, {task} stands for the task's name",
    )
    retry_errors: bool = rare(False, "ask the failed questions of an earlier run again")
    gold: str | None = setting(
        None, "gold links of --corpus, from `build corpus` (default: from the questions' contexts)"
    )
    answers: str | None = setting(
        None, "with --system answers: another program's answers, or rankings, as JSON lines of id, answer, passages"
    )
    set: list[str] = setting([], SET_HELP)
    llm: list[str] = setting([], LLM_HELP)
    price: list[str] = setting([], PRICE_HELP)
    control: Control | None = rare(None, "control: let --model read this instead of the loop's facts")
    control_run: str | None = rare(None, "with control=other_…: the same run without control, with the other facts")
    oracle: str | None = setting(None, "use a perfect teacher: DIR/SPLIT of a `build world` folder")


# Options in which {task} stands for the name of the task.
_OF_TASK = ("data", "corpus", "triples", "gold", "index", "answers")
# The groups of options in `--help`.
_FIRST = ("system", "task", "data", "model", "output")
_SEARCH = [field.name for field in dataclasses.fields(SearchOptions) if field.name != "overwrite"]
_GROUPS: dict[str, Sequence[str]] = {
    "the run": ("limit", "concurrency", "overwrite", "retry_errors", "max_failed", "answers"),
    "retrieval": (*_SEARCH, "gold"),
    "the loop": ("control", "control_run"),
    "models": (
        "untrained",
        "planner_model",
        "batch_size",
        "dtype",
        "prompt_embeds",
        "ledger",
        "integrator",
        "student_seed",
        "oracle",
    ),
}


def add_run_arguments(parser: CommandParser) -> None:
    """Add the options of `tripletune eval run` and of the teacher to a parser."""
    add_arguments(parser, QuestionOptions, only=_FIRST)
    for title, names in _GROUPS.items():
        add_arguments(parser.add_argument_group(title), QuestionOptions, only=names)
    parser.explained["tasks, for --task:"] = about_tasks
    add_options_of_systems(parser)
    parser.others = SET_HELP
    group = parser.add_argument_group("chat models")
    group.add_argument("--llm", action="append", default=[], metavar="MODEL", help=LLM_HELP)
    group.add_argument("--price", action="append", default=[], metavar="IN,OUT", help=PRICE_HELP)
    add_arguments(group, LLMOptions, "teacher")


class RunCommand:
    """What `tripletune eval run --help` shows.

    It is apart from the suite, which imports indexes and clients. Those take longer than the help itself.
    """

    about: ClassVar[str] = (
        "Run a system on the questions of a task (`tripletune eval run`), with answers, traces and cost."
    )
    example: ClassVar[str] = (
        "--system ras --task hotpotqa --data test.jsonl --model runs/ras/final --output runs/eval/ras"
    )

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        """Add the options of the run, of all systems and of the chat models."""
        add_run_arguments(parser)


class RunOptions(NamedTuple):
    """The options of a run, and its chat model; None for a run without one."""

    options: QuestionOptions
    teacher: LLMOptions | None


def read_options(values: Mapping[str, Any]) -> RunOptions:
    """Read the options and the chat model of a run from values by name, such as a section of a YAML file.

    Names are fields of `QuestionOptions`, options of the system, and `teacher`, a mapping of `LLMOptions`.
    """
    missing = [name for name in ("system", "task", "data", "output") if values.get(name) is None]
    if missing:
        raise ValueError(f"not set: {', '.join(missing)}")
    names = [field.name for field in dataclasses.fields(QuestionOptions)]
    for system in convert(values["system"], list[str]):
        names += [field.name for field in dataclasses.fields(find_system(system).options)]
    names.append("teacher")
    for name in values:
        # An option of one system is "cirag.candidates".
        if name.rpartition(".")[2] not in names:
            raise ValueError(no_option(f"a run of {values['system']}", name, names))
    of_run = {name: value for name, value in values.items() if name != "teacher"}
    teacher = values.get("teacher")
    try:
        options = load_config(QuestionOptions, None, asdict(QuestionOptions.of(**of_run)))
        return RunOptions(options, load_config(LLMOptions, None, teacher) if teacher else None)
    except ConfigError as error:
        # Without the first line, which names a file of options.
        raise ConfigError("; ".join(str(error).split("\n  - ")[1:])) from None


def run_problems(
    options: QuestionOptions, system: System, loop: CheckedOptions, teacher: LLMOptions | None
) -> list[str]:
    """Options that do not fit the system, one sentence each; `loop` has the options of the system.

    Options that would have no effect are problems, too: a user who sets them expects one.
    """
    problems = system_problems(options, system, loop, teacher)
    uses = f"--system {system.name}"
    if bool(options.answers) != (system.name == "answers"):
        problems.append(f"--answers FILE and --system answers need each other; this is {uses}")
    if options.retry_errors and options.overwrite:
        problems.append(
            "retry_errors: without effect, since --overwrite asks every question again; leave one of them out"
        )
    if system.needs_gold and options.gold and not options.corpus:
        problems.append(f"{uses} reads the passages that --gold names: give the corpus of these passages with --corpus")
    return problems + _control_problems(options, loop)


def _control_problems(options: QuestionOptions, loop: CheckedOptions) -> list[str]:
    """Problems with `control`, which needs a Graph-LLM, and with `control_run`, which has the other facts.

    A control that cannot change what the model reads would give the scores of the run itself, and look like a finding.
    """
    problems = []
    if options.control and not (options.model or options.planner_model):
        problems.append("control changes what a Graph-LLM reads: name the Graph-LLM with --model")
    needs_facts = options.control in ("other_facts", "other_graph")
    if needs_facts != bool(options.control_run):
        problems.append(
            "control_run (the run without control) is for control=other_facts or other_graph, which need it"
        )
    if options.control_run and getattr(loop, "evidence", "") == "text":
        problems.append("control_run exchanges only triples: leave out --evidence text")
    return problems


def chat_models_by_role(specs: Sequence[str], teacher: LLMOptions) -> dict[str, LLMOptions]:
    """Chat models by role, from `ROLE=BACKEND:MODEL` or `BACKEND:MODEL`, each optionally with `@URL` or `@URL,URL`.

    A model without a role is under ""; all other settings are those of `teacher`.
    """
    models: dict[str, LLMOptions] = {}
    for spec in specs:
        role, fields = read_spec(spec)
        models[role] = replace(teacher, **fields)  # type: ignore[arg-type]
    return models


def open_chat_model(options: LLMOptions, oracle: str | None = None, specs: Sequence[str] = ()) -> LLMClient:
    """Open the client of a chat model, or of the oracle that knows the facts of the world DIR/SPLIT.

    Args:
        specs: Chat models for single roles; see `chat_models_by_role`.
    """
    client = _open_oracle(oracle, str(options.ledger)) if oracle else open_client(options)
    of_roles = {role: open_chat_model(model) for role, model in chat_models_by_role(specs, options).items() if role}
    if not of_roles:
        return client
    return RoleClients(client, of_roles)


def _open_oracle(world: str, ledger: str) -> LLMClient:
    """The client of an oracle, from DIR/SPLIT; a ledger keeps its calls, so that they are counted like a model's."""
    from tripletune.data_builders.world.oracle import WorldOracle
    from tripletune.llm.ledger import Ledger
    from tripletune.llm.ledger_client import LedgerClient

    folder, _, split = world.rstrip("/").rpartition("/")
    client = LedgerClient(WorldOracle.open(folder or ".", split), Ledger(ledger))
    # A role without a reply fails only the systems that ask it.
    client.ends_run = False
    return client


def unknown_owners(assignments: Sequence[str]) -> list[str]:
    """Problems with assignments of `--set` such as "cirag.candidates=50" whose system does not exist."""
    systems = system_names()
    problems = []
    for assignment in assignments:
        name = assignment.split("=")[0]
        owner = name.split(".")[0]
        if "." in name and owner not in systems:
            problems.append(not_one_of("--set", owner, systems))
    return problems


def chosen_teacher(options: QuestionOptions, teacher: LLMOptions) -> LLMOptions | None:
    """The chat model of all calls without another model in `options.llm`, with its ledger; see `suites_of`.

    `--llm` does not name an oracle, so it gets a name here: a teacher without a name would mean that there is none.
    """
    chosen = chat_models_by_role(options.llm, teacher).get("", teacher)
    if options.oracle and chosen.model != UNNAMED:
        raise ValueError(f"--system {options.system} needs one teacher: --teacher-model or --oracle, not both")
    if options.oracle:
        if chosen.temperature or chosen.seed is not None:
            raise ValueError(
                "an oracle looks its replies up, so --teacher-temperature and --teacher-seed change nothing, and runs "
                "of several seeds would be copies: leave them out"
            )
        chosen = replace(chosen, model=f"oracle {options.oracle}")
    elif chosen.model == UNNAMED:
        return None
    ledger = chosen.ledger or options.ledger or str(Path(options.output) / "ledger.sqlite")
    return replace(chosen, ledger=ledger)


def options_of_run(options: QuestionOptions, teacher: LLMOptions | None, task: str, system: str) -> RunOptions:
    """The options and the chat model of one of several runs; a run with a Graph-LLM uses it alone (see `options_for`).

    Options for one kind of system are taken away from the others, for which they would be an error. Each run has the
    folder OUTPUT/TASK/SYSTEM; `{task}` in a path stands for the name of the task.
    """
    task_name = Path(task).stem
    paths = {name: getattr(options, name) for name in _OF_TASK}
    of_task = {name: path.replace("{task}", task_name) for name, path in paths.items() if path}
    shared = replace(options, task=task, output=str(Path(options.output) / task_name / system), **of_task)
    own, chat_model = options_for(system, shared, teacher)
    if own.model:
        chat_model = None
    if chat_model is None:
        own.oracle = None
        own.llm = []
    if system != "answers":
        own.answers = None
    has_graph_llm = own.model or own.planner_model
    if (options.model or options.planner_model) and not has_graph_llm:
        own.control = None
        own.control_run = None
    return RunOptions(own, chat_model)
