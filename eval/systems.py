"""The options of `tripletune eval run`, the chat models that they name, and the settings that results depend on.

`--teacher`, `--teacher-model` and related options name the chat model that answers all prompts. `--integrator SPEC`
names a local model, such as a distilled student, for CIRAG's integration phase. `--oracle DIR/SPLIT` is a teacher that
knows the facts of a fictional world.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tripletune.core.calls import LLMClient, RoleClients
from tripletune.core.command_line import CommandParser, add_arguments, add_short_flags
from tripletune.core.files import file_digest
from tripletune.core.options import ConfigError, convert, load_config, no_option, rare, setting
from tripletune.eval import task_names
from tripletune.eval.controls import Control
from tripletune.eval.costs import PRICE_HELP
from tripletune.eval.suites import SuiteOptions
from tripletune.llm.backends import LLMOptions, open_client, read_spec
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient
from tripletune.llm.question_client import load_prompts
from tripletune.models.loading import model_fingerprint, resolve, usual_dtype
from tripletune.models.run_folders import PROMPT_FILE
from tripletune.rag.answering import SystemOptions, model_spec, system_problems
from tripletune.rag.extractor import TEACHER_PROMPT
from tripletune.rag.search.options import TEACHER, SearchOptions
from tripletune.rag.systems import SHORT, LoopOptions, System, find_system, system_names
from tripletune.rag.systems.cirag import PROMPT_NAMES
from tripletune.rag.systems.cirag.integration import INTEGRATION_PROMPT
from tripletune.rag.triple_store import TripleStore, is_store

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
class QuestionOptions(SuiteOptions, SystemOptions):
    """Options of `tripletune eval run`."""

    system: str = setting(dataclasses.MISSING, f"one or several systems: {', '.join(system_names())}", also="systems")
    task: str = setting(
        dataclasses.MISSING, f"benchmarks, separated by commas: {', '.join(task_names())}, or a YAML file", also="tasks"
    )
    data: str = setting(dataclasses.MISSING, "question file or hub id, in which {task} stands for the task's name")
    retry_errors: bool = rare(False, "ask the failed questions of an earlier run again")
    concurrency: int = setting(64, "questions asked at once", at_least=1)
    gold: str | None = setting(
        None, "gold links of --corpus, from `build corpus` (default: from the questions' contexts)"
    )
    answers: str | None = setting(None, "with --system answers: another program's answers as JSON lines of id, answer")
    set: list[str] = setting([], SET_HELP)
    llm: list[str] = setting([], LLM_HELP)
    price: list[str] = setting([], PRICE_HELP)
    control: Control | None = rare(None, "control: let --model read this instead of the loop's facts")
    control_run: str | None = rare(None, "with control=other_…: the same run without control, with the other facts")
    integrator: str | None = setting(None, "with --system cirag: local model that integrates, instead of the teacher")
    oracle: str | None = setting(None, "use a perfect teacher: DIR/SPLIT of a `build world` folder")


# The groups of options in `--help`.
_FIRST = ("system", "task", "data", "model", "output")
_GROUPS: dict[str, tuple[str, ...]] = {
    "the run": ("limit", "concurrency", "overwrite", "retry_errors", "max_failed", "answers"),
    "retrieval": (*(item.name for item in dataclasses.fields(SearchOptions) if item.name != "overwrite"), "gold"),
    "the loop": ("control", "control_run"),
    "models": (
        *("untrained", "planner_model", "batch_size", "dtype", "prompt_embeds", "ledger"),
        *("integrator", "student_seed", "oracle"),
    ),
}


def add_run_arguments(parser: CommandParser) -> None:
    """Add the options of `tripletune eval run` and of the teacher to a parser."""
    add_arguments(parser, QuestionOptions, only=_FIRST)
    for title, names in _GROUPS.items():
        add_arguments(parser.add_argument_group(title), QuestionOptions, only=names)
    add_short_flags(parser.add_argument_group("options of the system", SHORT), LoopOptions)
    parser.others = SET_HELP
    group = parser.add_argument_group("chat models")
    group.add_argument("--llm", action="append", default=[], metavar="MODEL", help=LLM_HELP)
    group.add_argument("--price", action="append", default=[], metavar="IN,OUT", help=PRICE_HELP)
    add_arguments(group, LLMOptions, "teacher")


def read_options(values: Mapping[str, Any]) -> tuple[QuestionOptions, LLMOptions | None]:
    """Read the options and the chat model of a run from values by name, such as a section of a YAML file.

    Names are fields of `QuestionOptions`, options of the system, and `teacher`, a mapping of `LLMOptions`.
    """
    teacher = values.get("teacher")
    needed = ("system", "task", "data", "output")
    if missing := [name for name in needed if values.get(name) is None]:
        raise ValueError(f"not set: {', '.join(missing)}")
    known = [item.name for item in dataclasses.fields(QuestionOptions)]
    for system in convert(values["system"], list[str]):
        known += [item.name for item in dataclasses.fields(find_system(system).options)]
    for name in values:
        if name.rpartition(".")[2] not in (*known, "teacher"):
            raise ValueError(no_option(f"a run of {values['system']}", name, [*known, "teacher"]))
    options = asdict(QuestionOptions.of(**{name: value for name, value in values.items() if name != "teacher"}))
    try:
        return load_config(QuestionOptions, None, options), teacher and load_config(LLMOptions, None, teacher)
    except ConfigError as error:
        raise ConfigError("; ".join(str(error).split("\n  - ")[1:])) from None


def run_problems(options: QuestionOptions, system: System, loop: Any, teacher: LLMOptions | None) -> list[str]:
    """Options that do not fit the system, one sentence each."""
    found, uses = [], f"--system {system.name}"
    if bool(options.answers) != (system.name == "answers"):
        found.append(f"--answers FILE and --system answers need each other; this is {uses}")
    if options.integrator and system.name != "cirag":
        found.append(f"--integrator is for --system cirag, not for {system.name}")
    if options.student_seed is not None and not (options.integrator or options.model or options.planner_model):
        found.append("student_seed is the seed of --integrator or --model: name one of them")
    if options.control and not (options.model or options.planner_model):
        found.append("control changes what a Graph-LLM reads: name the Graph-LLM with --model")
    if (options.control in ("other_facts", "other_graph")) != bool(options.control_run):
        found.append("control_run (the run without control) is for control=other_facts or other_graph, which need it")
    if options.control_run and getattr(loop, "evidence", "") == "text":
        found.append("control_run exchanges only triples: leave out --evidence text")
    if options.retry_errors and options.overwrite:
        found.append("retry_errors: without effect, since --overwrite asks every question again; leave one of them out")
    if system.needs_gold and options.gold and not options.corpus:
        found.append(f"{uses} reads the passages that --gold names: give the corpus of these passages with --corpus")
    return system_problems(options, system, loop, teacher) + found


def model_settings(options: QuestionOptions, teacher: LLMOptions | None) -> dict[str, Any]:
    """The models' settings that change results; address and concurrency of calls do not."""
    # A teacher plans or answers if no Graph-LLM is named for it.
    planner = options.planner_model or (None if teacher else options.model)
    settings: dict[str, Any] = {"dtype": usual_dtype(options.dtype)} if options.model or planner else {}
    for role, spec in (("model", options.model), ("planner", planner)):
        if spec:
            resolved = model_spec(spec, options.untrained)
            settings[role] = {"spec": resolved, "weights": model_fingerprint(resolved)}
    if options.student_seed is not None:
        settings["student_seed"] = options.student_seed
    if options.prompt_embeds is not None:
        settings["prompt_embeds"] = options.prompt_embeds.partition("@")[0]
    if teacher is None:
        return settings
    settings["sampling"] = [teacher.temperature, teacher.top_p, teacher.seed]
    if options.oracle:
        settings["teacher"] = f"oracle:{Path(options.oracle)}"
    else:
        settings |= chat_model(teacher, "teacher")
    if options.llm:
        settings["llm"] = {role: chat_model(one) for role, one in chat_models(options.llm, teacher).items() if role}
    if options.integrator:
        weights = model_fingerprint(options.integrator)
        settings["integrator"] = {"spec": options.integrator, "weights": weights, "dtype": usual_dtype(teacher.dtype)}
    return settings


def chat_model(options: LLMOptions, name: str = "model") -> dict[str, Any]:
    """The settings that identify the chat model: its name, and a fingerprint of local weights."""
    weights = {f"{name}_weights": model_fingerprint(options.model)} if options.is_local else {}
    return {name: options.ledger_name, **weights}


def chat_models(specs: Sequence[str], teacher: LLMOptions) -> dict[str, LLMOptions]:
    """Chat models by role, from `ROLE=BACKEND:MODEL` or `BACKEND:MODEL`, each optionally with `@URL` or `@URL,URL`.

    A model without a role is under ""; all other settings are those of `teacher`.
    """
    found: dict[str, LLMOptions] = {}
    for spec in specs:
        role, fields = read_spec(spec)
        found[role] = replace(teacher, **fields)  # type: ignore[arg-type]
    return found


def open_chat_model(options: LLMOptions, oracle: str | None = None, specs: Sequence[str] = ()) -> LLMClient:
    """Open the client of a chat model, or of the oracle that knows the facts of the world DIR/SPLIT."""
    if oracle:
        from tripletune.data_builders.world.oracle import WorldOracle

        folder, _, split = oracle.rstrip("/").rpartition("/")
        client = LedgerClient(WorldOracle.open(folder or ".", split), Ledger(str(options.ledger)))
    else:
        client = open_client(options)
    roles = {role: open_chat_model(one) for role, one in chat_models(specs, options).items() if role}
    return RoleClients(client, roles) if roles else client


def other_prompt(integrator: str, prompts: str | None) -> str | None:
    """The warning that the loop's prompt differs from the prompt in the student's training; None if they are equal."""
    learned = Path(resolve(integrator)) / PROMPT_FILE
    asked = load_prompts(PROMPT_NAMES, prompts).texts[INTEGRATION_PROMPT]
    if not learned.is_file() or asked.strip() == learned.read_text(encoding="utf-8").strip():
        return None
    return (
        f"{integrator} was trained with the prompt in {learned}, but the loop uses "
        f"{f'the prompt of {prompts}' if prompts else 'our prompt'}: expect worse decisions. Copy that prompt into a "
        f"folder as {INTEGRATION_PROMPT}.md and add --set prompts=FOLDER"
    )


def extractor_settings(options: SearchOptions) -> dict[str, Any]:
    """Settings of an extractor in the loop that change results (`rag.search.extracts`)."""
    if options.extractor == TEACHER:
        return {"extractor": TEACHER, "prompt": file_digest(TEACHER_PROMPT)}
    weights, own = model_fingerprint(str(options.extractor)), sorted(options.extractor_set)
    dtype = usual_dtype(dict(one.partition("=")[::2] for one in own).get("dtype"))
    return {"extractor": options.extractor, "weights": weights, "dtype": dtype, "set": own}


def triples_settings(source: str, extractor: str | None = None) -> Any:
    """Settings that identify the triples of a file, or of a store, whose bytes can change while its triples do not."""
    if not is_store(source):
        if extractor is not None:
            raise ValueError(f"--extractor {extractor}: {source} is not an extraction store, so it has no extractors")
        return file_digest(source)
    with closing(TripleStore(source, create=False)) as store:
        chosen = store.choose(extractor)
        found = {name: getattr(chosen, name) for name in ("model", "prompt", "passages")}
        return found | {"digest": store.digest(chosen.id)}
