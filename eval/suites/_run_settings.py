"""What the rows of an evaluation depend on: models, files and options, for `settings.json`.

A folder continues only with equal settings, and only runs with comparable settings are compared. So a setting is the
content (a digest, or a fingerprint of weights) where a name would not tell two contents apart. What only changes the
speed, such as batch size and concurrency, is no setting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from tripletune.core.data.jsonl import record_files
from tripletune.core.data.passages import corpus_file
from tripletune.core.data.words import AUTO
from tripletune.core.files import file_digest
from tripletune.core.options import CheckedOptions, choices_of
from tripletune.core.plugins import text_files
from tripletune.eval import Task, code_of_task
from tripletune.eval.results import ORACLE, ChatModel, LocalModel, RunSettings, SamplingSettings
from tripletune.eval.systems import QuestionOptions, chat_models_by_role
from tripletune.llm.backends import LLMOptions
from tripletune.llm.prices import BATCH
from tripletune.llm.question_client import load_prompts
from tripletune.models.fingerprints import encoder_fingerprint, model_fingerprint
from tripletune.models.run_folders import Training, training_of
from tripletune.models.specs import resolve, usual_dtype
from tripletune.rag.chat_generator import COMMON_READER
from tripletune.rag.extractor import TEACHER_PROMPT
from tripletune.rag.graph_models import folder_or_base_model
from tripletune.rag.results import RESULTS
from tripletune.rag.search.embedding import encoder_name
from tripletune.rag.search.opened import extracts_in_loop
from tripletune.rag.search.options import TEACHER, SearchOptions
from tripletune.rag.served_extractor import is_served, served_settings
from tripletune.rag.systems import System, code_of_system
from tripletune.rag.trained import overridden_options
from tripletune.rag.triple_store import TripleStore, is_store
from tripletune.rag.triples.names import read_names
from tripletune.rag.triples.vocabulary import read_vocabulary

# Options that folders of earlier versions lack; at their default they change nothing, so such a folder is continued.
_NEWER = ("stop", "abstain", "confidence", "answer_samples", "logprobs")


def run_settings(
    options: QuestionOptions, task: Task, system: System, loop: CheckedOptions, teacher: LLMOptions | None
) -> RunSettings:
    """All settings that change a result; batch size and concurrency do not.

    A setting that the system does not use stays None, so that two runs are not told apart by an encoder that neither
    reads: see `_file_settings`, `_search_settings` and `model_settings`.

    Args:
        loop: The options of the system.
        teacher: The chat model; None for a system that calls none.
    """
    calls_no_model = system.model == "none"
    files = _digests_of_files(options.system, system, loop, has_prompts=bool(teacher) or calls_no_model)
    return replace(
        model_settings(options, teacher),
        system=options.system,
        task=task,
        limit=options.limit,
        control=options.control,
        options=_system_options(loop),
        overrides=overridden_options(system, options, loop),
        files=files | code_of_task(task),
        **_file_settings(options, system, loop),
        **_search_settings(options, system, loop),
    )


def _file_settings(options: QuestionOptions, system: System, loop: CheckedOptions) -> dict[str, Any]:
    """The fields of `RunSettings` that identify data, by name, without files that the system does not read.

    The corpus counts where the system searches it, or where a system without a model names its passages by ids; triples
    and their names where the system reads triples, or names also where it extracts its own.
    """
    settings: dict[str, Any] = {"data": _data_digest(options.data)}
    if options.corpus and (system.needs_corpus(loop) or system.model == "none"):
        settings["corpus"] = file_digest(corpus_file(options.corpus))
    if system.needs_triples(loop):
        settings["triples"] = _triples_setting(options)
    if options.control_run:
        settings["control_run"] = file_digest(Path(options.control_run) / RESULTS)
    if options.entities and (system.needs_triples(loop) or system.own_triples):
        settings["entities"] = read_names(options.entities).digest or None
    if options.gold:
        settings["gold"] = file_digest(options.gold)
    return settings


def _search_settings(options: QuestionOptions, system: System, loop: CheckedOptions) -> dict[str, Any]:
    """The fields of `RunSettings` on the search, by name; none for a system that searches no corpus.

    Those of the encoder are left out for BM25 alone, unless the system ranks again with an encoder; a language is left
    out for dense search, since only BM25 cuts texts into words.
    """
    if not system.needs_corpus(loop):
        return {}
    settings: dict[str, Any] = {"retriever": options.retriever}
    if options.retriever != "dense" and options.language != AUTO:
        settings["language"] = options.language
    if options.retriever != "bm25" or system.needs_reranker(loop):
        settings["encoder"] = encoder_name(options.encoder) if options.encoder else None
        settings["encoder_weights"] = encoder_fingerprint(str(options.encoder)) or None
        settings["query_prompt"] = options.query_prompt
        settings["text_prompt"] = options.text_prompt
        settings["similarity"] = options.similarity
        settings["vectors"] = options.vectors if options.vectors != "flat" else None
    return settings


def model_settings(options: QuestionOptions, teacher: LLMOptions | None) -> RunSettings:
    """Settings with the models that change results; address and concurrency of calls do not.

    Fingerprints of weights are noted beside names, because a folder can be trained again under its name.
    """
    # A teacher plans or answers if no Graph-LLM is named for it.
    planner = options.planner_model or (None if teacher else options.model)
    has_graph_llm = bool(options.model or planner)
    settings = RunSettings(
        dtype=usual_dtype(options.dtype) if has_graph_llm else None,
        model=_local_graph_llm(options.model, options.untrained),
        planner=_local_graph_llm(planner, options.untrained),
        student_seed=options.student_seed,
        # Without the server's address.
        prompt_embeds=options.prompt_embeds and options.prompt_embeds.rpartition("@")[0],
    )
    if teacher is None:
        return settings
    integrator = None
    if options.integrator:
        weights = model_fingerprint(options.integrator)
        integrator = LocalModel(options.integrator, weights, usual_dtype(teacher.dtype))
    models = chat_models_by_role(options.llm, teacher)
    return replace(
        settings,
        sampling=SamplingSettings(teacher.temperature, teacher.top_p, teacher.seed),
        teacher=ChatModel(f"{ORACLE}{Path(options.oracle)}") if options.oracle else chat_model_setting(teacher),
        llm={role: chat_model_setting(model) for role, model in models.items() if role},
        integrator=integrator,
    )


def _system_options(loop: CheckedOptions) -> dict[str, Any]:
    """The options of a system by name, for `settings.json`; those of `_NEWER` only if they are not at their default."""
    options = asdict(loop)
    for item in fields(loop):
        if item.name in _NEWER and options[item.name] == item.default:
            del options[item.name]
    return options


def trainings_of(options: QuestionOptions) -> dict[str, Training]:
    """How the models of this machine were trained, by role; models without the settings of their run are left out.

    The error of a model that is not there comes when it is opened.
    """
    trainings = {}
    for role, spec in (
        ("model", options.model),
        ("planner", options.planner_model),
        ("integrator", options.integrator),
    ):
        training = None
        if spec and not options.untrained:
            with suppress(OSError, ValueError):
                training = training_of(resolve(spec))
        if training is not None:
            trainings[role] = training
    return trainings


def _digests_of_files(name: str, system: System, loop: CheckedOptions, has_prompts: bool) -> dict[str, str]:
    """Digests by file of what changes a system's results: its prompts, and its code if it is not one of ours.

    A system that does not declare its files may read any of those that its options name, and the shared reader's.

    Args:
        has_prompts: Whether the declared files are read: with a chat model, or by a system without a model.
    """
    digests = code_of_system(name, declared=system.files is not None)
    if system.files is None:
        digests |= _digests_of_named_files(loop)
        if has_prompts:
            digests |= load_prompts(COMMON_READER).digests()
    elif has_prompts:
        digests |= system.files(loop)
    return digests


def _digests_of_named_files(loop: CheckedOptions) -> dict[str, str]:
    """Digests of the files that options name, and of the text files in folders that they name.

    A text option may be a path or any other text, and only the file system tells; one with fixed choices is never a
    path, even if a file of that name lies in the working folder.
    """
    hints = get_type_hints(type(loop))
    digests: dict[str, str] = {}
    for item in fields(loop):
        value = getattr(loop, item.name)
        if not isinstance(value, str) or not value or choices_of(item, hints[item.name]):
            continue
        named = Path(value)
        if named.is_file():
            digests[item.name] = file_digest(named)
        elif named.is_dir():
            for path in text_files(named):
                digests[f"{item.name}/{path.relative_to(named).as_posix()}"] = file_digest(path)
    return digests


def _triples_setting(options: QuestionOptions) -> str | dict[str, Any]:
    """The extractor, if triples are made in the loop, else the file or store of triples."""
    if options.extractor and extracts_in_loop(options):
        extractor = extractor_settings(options)
        if not options.keep_unsupported:
            # Runs of earlier versions kept them, and their settings do not say so.
            extractor["unsupported"] = "dropped"
        return extractor
    return triples_settings(str(options.triples), options.extractor)


def _data_digest(data: str) -> str:
    """The digest of a file, digests of a folder's files, or the hub id, of which no file is at hand."""
    path = Path(data)
    if path.is_file():
        return file_digest(path)
    digests = [file_digest(file) for file in sorted(path.rglob("*")) if file.is_file()]
    return ",".join(digests) or data


def backends_of(options: QuestionOptions, teacher: LLMOptions | None) -> dict[str, str]:
    """Kinds of the chat models' backends by role ("": all other roles), if one of them is a Batch API, else nothing.

    They are noted for prices, since a Batch API costs half; without one all is as usual.
    """
    if teacher is None:
        return {}
    kinds = {"": "oracle" if options.oracle else teacher.backend}
    for role, model in chat_models_by_role(options.llm, teacher).items():
        if role:
            kinds[role] = model.backend
    return kinds if BATCH in kinds.values() else {}


def shard_digests(data: str, split: str | None) -> list[str]:
    """The digests of a file, or of the shards of a split of a folder; another order or number is another data set."""
    return [file_digest(file) for file in record_files(data, split)]


def _local_graph_llm(spec: str | None, untrained: bool) -> LocalModel | None:
    """The folder of a Graph-LLM with the fingerprint of its weights; None if none is named."""
    if not spec:
        return None
    folder = folder_or_base_model(spec, untrained)
    return LocalModel(folder, model_fingerprint(folder))


def chat_model_setting(options: LLMOptions) -> ChatModel:
    """What identifies a chat model: its name, and a fingerprint of local weights."""
    weights = model_fingerprint(options.model) if options.is_local else None
    return ChatModel(options.ledger_name, weights)


def extractor_settings(options: SearchOptions) -> dict[str, Any]:
    """Settings of an extractor in the loop that change results (`rag.search.options.extracts`).

    The weight type is noted even if no option names it, since its default depends on the machine. The options are
    sorted, because their order changes nothing, and a run must continue when a user writes them in another one.
    """
    if options.extractor == TEACHER:
        return {"extractor": TEACHER, "prompt": file_digest(TEACHER_PROMPT)}
    if is_served(str(options.extractor)):
        client, own = served_settings(str(options.extractor), options.extractor_set)
        instruction = hashlib.sha256(own.instruction.encode()).hexdigest()
        # Without the server's address.
        settings = {"extractor": client.ledger_name, "prompt": instruction, "max_tokens": own.max_tokens}
        return settings | _vocabulary_settings(own.vocabulary, own.outside)
    assigned = _last_assignments(options.extractor_set)
    return {
        "extractor": options.extractor,
        "weights": model_fingerprint(str(options.extractor)),
        "dtype": usual_dtype(_assigned_value("dtype", assigned)),
        "set": sorted(assigned.values()),
        **_vocabulary_settings(_assigned_value("vocabulary", assigned)),
    }


def _vocabulary_settings(path: str | None, outside: str | None = None) -> dict[str, Any]:
    """What a vocabulary's file changes; nothing without one, as in settings of earlier versions.

    Args:
        outside: What happens to triples outside it, if no other setting says so.
    """
    if not path:
        return {}
    return {"vocabulary": read_vocabulary(path).digest} | ({"outside": outside} if outside else {})


def _last_assignments(assignments: Sequence[str]) -> dict[str, str]:
    """The texts `NAME=VALUE` by option name; of several for one option the last, which is the one that is used.

    Names are read as `core.options.set_values` reads them, which opens the extractor.
    """
    return {assignment.partition("=")[0].strip().replace("-", "_"): assignment for assignment in assignments}


def _assigned_value(option: str, assigned: Mapping[str, str]) -> str | None:
    """The value of an option among texts `NAME=VALUE` by name; None if it is not among them."""
    if option not in assigned:
        return None
    return assigned[option].partition("=")[2]


def triples_settings(source: str, extractor: str | None = None) -> str | dict[str, Any]:
    """Settings that identify the triples of a file, or of a store, whose bytes can change while its triples do not.

    Args:
        source: The file or store.
        extractor: The extractor (model or number) of a store that holds several.

    Raises:
        ValueError: An extractor is named for a file, or does not name one of the store's.
    """
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
