"""The language models of prompt-based systems, from the command line of `tripletune eval run`.

`--teacher-backend`, `--teacher-model` and the like name the model that answers all prompts; `--integrator SPEC` puts a
local model, such as a distilled student, in its place in CIRAG's integration phase; `--oracle DIR/SPLIT` is the teacher
that knows the facts of a fictional world.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tripletune.models.files import weights_fingerprint
from tripletune.models.llm.backends.api import ledger_name
from tripletune.models.llm.client import LLMClient, Sampling
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient
from tripletune.models.llm.options import LLMOptions, from_arguments, open_client
from tripletune.models.loading import resolve
from tripletune.models.run_folders import PROMPT_FILE
from tripletune.rag.systems import System, load_prompts
from tripletune.rag.systems.cirag.options import INTEGRATION_PROMPT, PROMPT_NAMES

_LOCAL = ("hf",)
# Teacher, the model in its place in the integration phase if there is one, and how replies are drawn.
LLMs = tuple[LLMClient, LLMClient | None, Sampling]


def llm_problems(args: argparse.Namespace, system: System) -> list[str]:
    """What of the model options does not fit the system, one sentence each."""
    problems = []
    if system.model == "llm":
        if args.model or args.planner_model or args.untrained:
            problems.append(
                f"--system {system.name} prompts a language model: name it with --teacher-backend and --teacher-model, "
                "and leave out --model, --planner-model and --untrained"
            )
        if bool(args.teacher_model) == bool(args.oracle):
            problems.append(
                f"--system {system.name} needs one teacher: --teacher-model NAME, or --oracle DIR/SPLIT for a world"
            )
        if args.integrator and system.name != "cirag":
            problems.append(f"--integrator is for --system cirag, not for {system.name}")
        return problems
    if not args.model:
        problems.append(f"--system {system.name} works with a Graph-LLM: name its folder with --model")
    for flag in ("teacher_model", "integrator", "oracle"):
        if getattr(args, flag):
            name = f"--{flag.replace('_', '-')}"
            problems.append(f"{name} is for systems that prompt a language model; --system {system.name} takes --model")
    return problems


def llm_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the results depend on; where the calls run and how many at once is not among it."""
    settings: dict[str, Any] = {"sampling": [args.teacher_temperature, args.teacher_top_p, args.teacher_seed]}
    if args.oracle:
        settings["teacher"] = f"oracle:{args.oracle}"
    else:
        options = _options(args)
        kind = options.batch_layout if options.backend == "batch" else options.backend
        settings["teacher"] = ledger_name(kind, options.model, json.loads(options.extra) if options.extra else None)
        if options.backend in _LOCAL:
            settings["teacher_weights"] = weights_fingerprint(resolve(options.model))
    if args.integrator:
        settings["integrator"] = {
            "spec": args.integrator,
            "weights": weights_fingerprint(resolve(args.integrator)),
        }
    return settings


def open_llms(args: argparse.Namespace) -> LLMs:
    """Teacher, integrator and sampling; all calls go into one ledger.

    Raises:
        ValueError: a model, a key or the ledger can't be opened.
    """
    options = _options(args)
    teacher = _oracle(args, options) if args.oracle else _open(options)
    integrator = None
    if args.integrator:
        student = LLMOptions(
            backend="hf",
            model=args.integrator,
            ledger=options.ledger,
            batch_size=options.batch_size,
            dtype=options.dtype,
        )
        integrator = _open(student)
    return teacher, integrator, options.sampling(1)


def other_prompt(integrator: str, prompts: str | None) -> str | None:
    """What to say when a student is asked in other words than those it was trained with; None where it is not.

    Args:
        integrator: The student: a folder, hub id or package.
        prompts: The folder of prompts that the loop takes, None for ours.
    """
    learned = Path(resolve(integrator)) / PROMPT_FILE
    if not learned.is_file():
        return None
    asked = load_prompts(PROMPT_NAMES, prompts).texts[INTEGRATION_PROMPT]
    if asked.strip() == learned.read_text(encoding="utf-8").strip():
        return None
    return (
        f"{integrator} was trained with the prompt in {learned}, and the loop asks it with "
        f"{f'that of {prompts}' if prompts else 'ours'}: expect worse decisions. Put it into a folder as "
        f"{INTEGRATION_PROMPT}.md and add --set prompts=FOLDER"
    )


def is_batch(args: argparse.Namespace) -> bool:
    """Whether the teacher's calls are written to files."""
    return args.teacher_backend == "batch" and not args.oracle


def _options(args: argparse.Namespace) -> LLMOptions:
    """The teacher's options; its ledger stands in the output folder unless it is named."""
    chosen = argparse.Namespace(**vars(args))
    chosen.teacher_ledger = args.teacher_ledger or str(Path(args.output) / "ledger.sqlite")
    chosen.teacher_model = args.teacher_model or f"oracle {args.oracle}"
    return from_arguments(chosen, "teacher")


def _open(options: LLMOptions) -> LedgerClient:
    client = open_client(options)
    if options.backend in _LOCAL and (weights := weights_fingerprint(resolve(options.model))):
        # A folder may be trained again under its name; the ledger must not answer with the older model's replies.
        client.model = f"{client.model}@{weights}"
    return client


def _oracle(args: argparse.Namespace, options: LLMOptions) -> LedgerClient:
    from tripletune.data_builders.world.oracle import WorldOracle

    folder, _, split = args.oracle.rstrip("/").rpartition("/")
    return LedgerClient(WorldOracle.open(folder or ".", split), Ledger(str(options.ledger)))
