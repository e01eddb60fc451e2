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
from tripletune.core.data.records import corpus_file
from tripletune.core.data.words import AUTO
from tripletune.core.files import file_digest
from tripletune.core.options import CheckedOptions, ConfigError, convert, load_config, no_option, rare, setting
from tripletune.core.program import CommandParser, add_arguments, add_short_flags
from tripletune.eval import Task, task_names
from tripletune.eval.controls import Control
from tripletune.eval.costs import PRICE_HELP
from tripletune.eval.results import ChatModel, LocalModel, RunSettings, SamplingSettings
from tripletune.eval.suites import SuiteOptions
from tripletune.llm.backends import LLMOptions, open_client, read_spec
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient
from tripletune.llm.question_client import load_prompts
from tripletune.models.loading import encoder_fingerprint, model_fingerprint, resolve, usual_dtype
from tripletune.models.run_folders import PROMPT_FILE
from tripletune.rag.answering import SystemOptions, model_spec, system_problems
from tripletune.rag.extractor import TEACHER_PROMPT
from tripletune.rag.results import RESULTS
from tripletune.rag.search.options import TEACHER, SearchOptions, extracts
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
        return options, load_config(LLMOptions, None, teacher) if teacher else None
    except ConfigError as error:
        # Without the first line, which names a file of options.
        raise ConfigError("; ".join(str(error).split("\n  - ")[1:])) from None


def run_problems(
    options: QuestionOptions, system: System, loop: CheckedOptions, teacher: LLMOptions | None
) -> list[str]:
    """Options that do not fit the system, one sentence each; `loop` has the options of the system."""
    problems = system_problems(options, system, loop, teacher)
    uses = f"--system {system.name}"
    if bool(options.answers) != (system.name == "answers"):
        problems.append(f"--answers FILE and --system answers need each other; this is {uses}")
    if options.integrator and system.name != "cirag":
        problems.append(f"--integrator is for --system cirag, not for {system.name}")
    if options.student_seed is not None and not (options.integrator or options.model or options.planner_model):
        problems.append("student_seed is the seed of --integrator or --model: name one of them")
    if options.retry_errors and options.overwrite:
        problems.append(
            "retry_errors: without effect, since --overwrite asks every question again; leave one of them out"
        )
    if system.needs_gold and options.gold and not options.corpus:
        problems.append(f"{uses} reads the passages that --gold names: give the corpus of these passages with --corpus")
    return problems + _control_problems(options, loop)


def _control_problems(options: QuestionOptions, loop: CheckedOptions) -> list[str]:
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


def model_settings(options: QuestionOptions, teacher: LLMOptions | None) -> RunSettings:
    """Settings with the models that change results; address and concurrency of calls do not."""
    # A teacher plans or answers if no Graph-LLM is named for it.
    planner = options.planner_model or (None if teacher else options.model)
    has_graph_llm = bool(options.model or planner)
    settings = RunSettings(
        dtype=usual_dtype(options.dtype) if has_graph_llm else None,
        model=_graph_llm(options.model, options.untrained),
        planner=_graph_llm(planner, options.untrained),
        student_seed=options.student_seed,
        # Without the server's address.
        prompt_embeds=options.prompt_embeds and options.prompt_embeds.partition("@")[0],
    )
    if teacher is None:
        return settings
    integrator = None
    if options.integrator:
        weights = model_fingerprint(options.integrator)
        integrator = LocalModel(options.integrator, weights, usual_dtype(teacher.dtype))
    models = chat_models(options.llm, teacher)
    return replace(
        settings,
        sampling=SamplingSettings(teacher.temperature, teacher.top_p, teacher.seed),
        teacher=ChatModel(f"oracle:{Path(options.oracle)}") if options.oracle else chat_model(teacher),
        llm={role: chat_model(model) for role, model in models.items() if role},
        integrator=integrator,
    )


def run_settings(
    options: QuestionOptions, task: Task, system: System, loop: Any, teacher: LLMOptions | None
) -> RunSettings:
    """All settings that change a result; batch size and concurrency do not.

    Args:
        loop: The options of the system.
        teacher: The chat model; None for a system that calls none.
    """
    retrieves = system.needs_corpus(loop)
    embeds = retrieves and (options.retriever != "bm25" or system.needs_reranker(loop))
    reads_corpus = retrieves or bool(options.answers)
    settings = replace(
        model_settings(options, teacher),
        system=options.system,
        task=task,
        data=_data_digest(options.data),
        limit=options.limit,
        control=options.control,
        corpus=file_digest(corpus_file(options.corpus)) if options.corpus and reads_corpus else None,
        triples=_triples_of(options) if system.needs_triples(loop) else None,
        options=asdict(loop),
    )
    if teacher or system.model == "none":
        settings = replace(settings, files=dict(system.files(loop)))
    if options.control_run:
        settings = replace(settings, control_run=file_digest(Path(options.control_run) / RESULTS))
    if options.gold:
        settings = replace(settings, gold=file_digest(options.gold))
    if retrieves:
        settings = replace(settings, retriever=options.retriever)
        # Only BM25 cuts texts into words.
        if options.retriever != "dense" and options.language != AUTO:
            settings = replace(settings, language=options.language)
    if embeds:
        settings = replace(
            settings,
            encoder=options.encoder,
            encoder_weights=encoder_fingerprint(str(options.encoder)) or None,
            query_prompt=options.query_prompt,
            text_prompt=options.text_prompt,
            similarity=options.similarity,
            vectors=options.vectors if options.vectors != "flat" else None,
        )
    return settings


def _triples_of(options: QuestionOptions) -> str | dict[str, Any]:
    if options.extractor and extracts(options):
        return extractor_settings(options)
    return triples_settings(str(options.triples), options.extractor)


def _data_digest(data: str) -> str:
    """The digest of a file, digests of a folder's files, or the hub id."""
    path = Path(data)
    if path.is_file():
        return file_digest(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return ",".join(file_digest(file) for file in files) or data


def _graph_llm(spec: str | None, untrained: bool) -> LocalModel | None:
    if not spec:
        return None
    folder = model_spec(spec, untrained)
    return LocalModel(folder, model_fingerprint(folder))


def chat_model(options: LLMOptions) -> ChatModel:
    """What identifies a chat model: its name, and a fingerprint of local weights."""
    weights = model_fingerprint(options.model) if options.is_local else None
    return ChatModel(options.ledger_name, weights)


def chat_models(specs: Sequence[str], teacher: LLMOptions) -> dict[str, LLMOptions]:
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
        specs: Chat models for single roles; see `chat_models`.
    """
    client = _open_oracle(oracle, str(options.ledger)) if oracle else open_client(options)
    of_roles = {role: open_chat_model(model) for role, model in chat_models(specs, options).items() if role}
    if not of_roles:
        return client
    return RoleClients(client, of_roles)


def _open_oracle(world: str, ledger: str) -> LLMClient:
    from tripletune.data_builders.world.oracle import WorldOracle

    folder, _, split = world.rstrip("/").rpartition("/")
    return LedgerClient(WorldOracle.open(folder or ".", split), Ledger(ledger))


def other_prompt(integrator: str, prompts: str | None) -> str | None:
    """The warning that the loop's prompt differs from the prompt in the student's training; None if they are equal."""
    learned = Path(resolve(integrator)) / PROMPT_FILE
    asked = load_prompts(PROMPT_NAMES, prompts).texts[INTEGRATION_PROMPT]
    if not learned.is_file() or asked.strip() == learned.read_text(encoding="utf-8").strip():
        return None
    used = f"the prompt of {prompts}" if prompts else "our prompt"
    return (
        f"{integrator} was trained with the prompt in {learned}, but the loop uses {used}: expect worse decisions. "
        f"Copy that prompt into a folder as {INTEGRATION_PROMPT}.md and add --set prompts=FOLDER"
    )


def extractor_settings(options: SearchOptions) -> dict[str, Any]:
    """Settings of an extractor in the loop that change results (`rag.search.options.extracts`)."""
    if options.extractor == TEACHER:
        return {"extractor": TEACHER, "prompt": file_digest(TEACHER_PROMPT)}
    set_options = sorted(options.extractor_set)
    dtype = None
    for assignment in set_options:
        name, _, value = assignment.partition("=")
        if name == "dtype":
            dtype = value
    return {
        "extractor": options.extractor,
        "weights": model_fingerprint(str(options.extractor)),
        "dtype": usual_dtype(dtype),
        "set": set_options,
    }


def triples_settings(source: str, extractor: str | None = None) -> str | dict[str, Any]:
    """Settings that identify the triples of a file, or of a store, whose bytes can change while its triples do not."""
    if not is_store(source):
        if extractor is not None:
            raise ValueError(f"--extractor {extractor}: {source} is not an extraction store, so it has no extractors")
        return file_digest(source)
    with closing(TripleStore(source, create=False)) as store:
        chosen = store.choose(extractor)
        return {
            "model": chosen.model,
            "prompt": chosen.prompt,
            "passages": chosen.passages,
            "digest": store.digest(chosen.id),
        }
