"""Settings that compared runs must share, the runs' differences in them, and all other settings, in words.

Scores compare systems only if all else is equal. Three things may differ: settings that a system does not use (a system
without search has no retriever), options that only one system has, and the passages per round that a system's paper
fixes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, combinations, product
from typing import Any, NamedTuple

from tripletune.core.files import few, flatten
from tripletune.core.options import not_one_of
from tripletune.eval.report.runs import Run
from tripletune.eval.results import ORACLE, RunSettings
from tripletune.rag.chat_generator import READER
from tripletune.rag.systems import find_system, system_names

_OWN_CONTEXTS = "contexts of the questions"
# The calls of a system that write its answer; "answer" also has roles such as "cirag.answer.triples".
_ANSWERING = ("answer", "act", "follow_up")
# Settings in which seeds of one system may differ: seeds, and names and weights of the trained model.
_SEEDS = re.compile(r"(.+[._])?(seed|weights)|control_run|prompt_embeds|model|(model|planner|integrator)\.spec")
# Settings whose values are digests of files, which a reader knows by their names.
_FILES = ("data", "corpus", "triples")
_DIGEST = re.compile(r"\b(\w{12})\w{52}\b")


@dataclass(slots=True, kw_only=True)
class SharedSettings:
    """The settings that compared runs must share; None if the system does not use one or an older run did not note it.

    Attributes:
        data: Digest of the questions; `limit` is their number.
        task: Name, reader and question template of the task.
        corpus: Digest of the passages.
        retriever: With the kind of its index.
        encoder: With its weights, prompts and similarity.
        top_k: Passages per round; each system may also have the value of its paper.
        triples: Digest of the triples, or their extractor; with the digest of the names that are read in them, if any.
        gold: Where the gold passages are from.
        model: The models that plan and answer, by role.
        sampling: How they draw, without seeds.
        reader: "paper", or the common reader with its limit and prompt.
        max_answer_tokens: Maximum tokens of an answer.
    """

    data: str | list[str] | None = None
    limit: int | None = None
    task: dict[str, str] | None = None
    corpus: str | None = None
    retriever: dict[str, str] | None = None
    encoder: dict[str, str] | None = None
    top_k: int | None = None
    triples: str | Mapping[str, Any] | None = None
    gold: str | None = None
    model: dict[str, Any] | None = None
    sampling: list[float] | None = None
    reader: str | Mapping[str, Any] | None = None
    max_answer_tokens: int | None = None


# The names of these settings, in the order in which they are shown and for `--across`.
EQUAL = tuple(item.name for item in fields(SharedSettings))


def shared_settings(run: Run) -> SharedSettings:
    """The settings of a run that compared runs must share.

    What the system does not use stays None, also if an option names it: a run that searches nothing has no corpus that
    could differ. Contexts of the questions are a corpus of their own, though no digest names them.
    """
    settings = run.settings
    limit = settings.limit if run.about.questions is None else run.about.questions
    shared = SharedSettings(data=settings.data, limit=limit)
    if not settings.system:
        return shared
    task = settings.task
    shared.task = _without_empty(name=task.name, reader=task.reader, template=task.template)
    if settings.retriever:
        shared.corpus = settings.corpus or _OWN_CONTEXTS
        shared.retriever = _without_empty(
            retriever=settings.retriever, vectors=settings.vectors, language=settings.language
        )
        shared.top_k = settings.options.get("top_k")
    if settings.encoder:
        shared.encoder = _without_empty(
            encoder=settings.encoder,
            encoder_weights=settings.encoder_weights,
            query_prompt=settings.query_prompt,
            text_prompt=settings.text_prompt,
            similarity=settings.similarity,
        )
    shared.triples = settings.triples
    if settings.entities:
        # Other names are other facts.
        shared.triples = {"triples": settings.triples, "entities": f"entities {settings.entities}"}
    shared.gold = run.gold or settings.gold
    shared.model = _models_by_role(settings) or None
    shared.sampling = _sampling_without_seeds(settings) or None
    shared.reader = _reader_setting(settings)
    shared.max_answer_tokens = settings.options.get("max_answer_tokens")
    return shared


def _without_empty(**texts: str | None) -> dict[str, str]:
    """The named texts, without those that are None or empty: what a run does not use is no setting of it."""
    return {name: value for name, value in texts.items() if value}


def _models_by_role(settings: RunSettings) -> dict[str, Any]:
    """The models that plan and answer, by role; models for a system's other roles are part of that system.

    A model for one role of a system counts only if it writes the answer and the system has its own reader: with the
    common reader, the model of role "answer" is compared, and a model for "t2rag.resolve" is what T2RAG adds.
    """
    models: dict[str, Any] = {}
    if settings.model is not None:
        models["model"] = settings.model.to_json()
    if settings.planner is not None:
        models["planner"] = settings.planner.to_json()
    if settings.teacher is not None:
        teacher = settings.teacher
        models["teacher"] = teacher.to_json() if teacher.weights else teacher.model
    systems = system_names()
    for role, model in settings.llm.items():
        # A system's name alone stands for all its roles.
        owner, _, call = role.partition(".")
        is_reader = (call or "answer").split(".")[0] in _ANSWERING and not _has_common_reader(settings)
        if owner not in systems or (owner == settings.system and is_reader):
            models[role.removeprefix(f"{owner}.")] = model.to_json()
    return models


def _sampling_without_seeds(settings: RunSettings) -> list[float]:
    """Temperature and top_p of the chat model, then those of the Graph-LLM if they differ; seeds may differ.

    A Graph-LLM takes the likeliest token, or with a seed draws at temperature 1.
    """
    chat_model = []
    if settings.sampling is not None:
        chat_model = [settings.sampling.temperature, settings.sampling.top_p]
    if settings.model is None and settings.planner is None:
        return chat_model
    temperature = 0.0 if settings.student_seed is None else 1.0
    graph_llm = [temperature, 1.0]
    if chat_model == graph_llm:
        return chat_model
    return chat_model + graph_llm


def _has_common_reader(settings: RunSettings) -> bool:
    """Whether the answer is written by the reader that all systems share, instead of the reader of the paper."""
    return settings.options.get("reader") == "common"


def _reader_setting(settings: RunSettings) -> str | Mapping[str, Any]:
    """The common reader with its limit and prompt; "paper" for the reader of the system's paper, as in older runs."""
    if not _has_common_reader(settings):
        return "paper"
    reader = {name: settings.options[name] for name in ("reader", "reader_tokens") if name in settings.options}
    if READER in settings.files:
        reader[READER] = settings.files[READER]
    return reader


class TwoValues(NamedTuple):
    """The values of a setting in two runs, as JSON values."""

    first: Any
    second: Any


def differing_settings(first: Run, second: Run, across: Collection[str] = ()) -> dict[str, TwoValues]:
    """The settings of `EQUAL`, without `across`, in which two runs differ, with both values.

    This decides which runs may be compared: `eval compare` refuses those that differ, and `eval report` puts them into
    different groups.

    A setting that one of the runs does not have does not differ, since it is part of the other run's system. Different
    `top_k` do not differ if each system has the value of its paper, since papers fix it as part of the system.
    """
    of_first = shared_settings(first)
    of_second = shared_settings(second)
    differing = {}
    for name in EQUAL:
        values = TwoValues(getattr(of_first, name), getattr(of_second, name))
        if name in across or values.first is None or values.second is None:
            continue
        if _comparable_value(values.first) != _comparable_value(values.second):
            differing[name] = values
    if "model" in differing and same_training(first, second):
        # Seeds of one training are one system.
        del differing["model"]
    if "top_k" in differing and _has_papers_top_k(first) and _has_papers_top_k(second):
        del differing["top_k"]
    return differing


def same_training(first: Run, second: Run) -> bool:
    """Whether two runs have models that were trained alike, apart from the seed, as far as both runs noted it."""
    configs = []
    for run in (first, second):
        configs.append({role: training.config for role, training in run.about.trainings.items()})
    return bool(configs[0]) and configs[0] == configs[1]


def _has_papers_top_k(run: Run) -> bool:
    """Whether a run takes as many passages per round as its system's paper, so that only its system sets it."""
    return run.settings.options.get("top_k") == defaults_of(run).get("top_k")


def read_across_names(across: str | None) -> list[str]:
    """The names in the text of `--across`, each one of `EQUAL`; a misspelled name would have no effect."""
    names = [name.strip().replace("-", "_") for name in (across or "").split(",") if name.strip()]
    for name in names:
        if name not in EQUAL:
            raise ValueError(not_one_of("--across", name, EQUAL))
    return names


def check_comparable(groups: Sequence[Sequence[Run]], across: Collection[str]) -> None:
    """Raise `ValueError` for runs that differ in settings that must be equal, and for groups that are not seeds.

    All seeds of one group are compared with all of the other, since one of them may have been run with another corpus.
    """
    for runs in groups:
        _check_seeds(runs)
    for seeds, other_seeds in combinations(groups, 2):
        for first, second in product(seeds, other_seeds):
            differing = differing_settings(first, second, across)
            if differing:
                raise ValueError(
                    f"{first.folder} and {second.folder} differ in {_differing_in_words(differing)}, so their scores "
                    f"do not compare only systems; to compare these settings, pass --across {','.join(differing)}"
                )


def trained_weights(run: Run) -> tuple[str | None, ...]:
    """Fingerprints of the run's trained models: of all weights that another training seed would have made different."""
    settings = run.settings
    models = (settings.model, settings.planner, settings.integrator)
    return tuple(None if model is None else model.weights for model in models)


def places_of_same_models(first: Sequence[Run], second: Sequence[Run]) -> list[int] | None:
    """For each run of `first`, the index in `second` of the run with the same trained models.

    None unless the runs are of the same trained models, each of them once in `first` and once in `second`.
    """
    places = {trained_weights(run): place for place, run in enumerate(second)}
    models = [trained_weights(run) for run in first]
    if len(models) != len(second) or set(models) != places.keys() or len(places) != len(second):
        return None
    return [places[model] for model in models]


def _differing_in_words(differing: Mapping[str, TwoValues]) -> str:
    """The settings of `differing_settings` with both values, for a message."""
    sentences = []
    for name, values in differing.items():
        sentences.append(f"{name} ({setting_in_words(values.first)} and {setting_in_words(values.second)})")
    return few(sentences, len(EQUAL))


def _check_seeds(runs: Sequence[Run]) -> None:
    """Raise `ValueError` if runs of one group differ in more than their seeds, or if two have equal seeds."""
    differing = _differences_beyond_seeds(runs)
    if differing:
        folders = ",".join(run.folder for run in runs)
        raise ValueError(f"{folders}: name seeds of one system, not runs that differ in {few(differing)}")
    for first, second in combinations(runs, 2):
        if _have_equal_seeds(first, second):
            raise ValueError(
                f"{first.folder} and {second.folder} are not two seeds: their seeds and all other settings are equal. "
                "Name one of them, or train or run with another seed"
            )


def _have_equal_seeds(first: Run, second: Run) -> bool:
    """Whether two runs of one system have the same seeds, of their trainings and of what they drew.

    Without a seed, a chat model above temperature 0 draws other replies in each run.
    """
    sampling = first.settings.sampling
    draws_unseeded = sampling is not None and sampling.temperature > 0 and sampling.seed is None
    return not draws_unseeded and _seeds_and_weights(first) == _seeds_and_weights(second)


def _seeds_and_weights(run: Run) -> dict[str, Any]:
    """What may differ between seeds, by the dotted names of its settings.

    Of a model whose training is known, the training and its seed replace the weights, which may differ between machines
    although the seeds are equal.
    """
    settings = run.settings.to_json()
    if run.settings.sampling is not None:
        settings["sampling"] = run.settings.sampling._asdict()
    values: dict[str, Any] = {}
    for name, value in flatten(settings, ".").items():
        role, _, last = name.rpartition(".")
        is_known = last == "weights" and role in run.about.trainings
        if name.endswith(("seed", "weights", "control_run")) and not is_known:
            values[name] = value
    values["trainings"] = dict(run.about.trainings)
    return values


def are_seeds(runs: Sequence[Run]) -> bool:
    """Whether runs differ in nothing but seeds and what was trained with them."""
    return not _differences_beyond_seeds(runs)


def _differences_beyond_seeds(runs: Sequence[Run]) -> list[str]:
    """The settings in which runs differ besides seeds and what was trained with them, with their values.

    The scores of seeds are averaged, and a mean over two systems or two settings would be of neither. Names of models
    may differ, since each seed of a training has a folder of its own.
    """
    # Setting -> its distinct values in words.
    words: dict[str, dict[str, None]] = {}
    flat = []
    for run in runs:
        # Of the sampling, only the seed may differ.
        settings = run.settings.to_json() | {"sampling": shared_settings(run).sampling}
        flat.append(flatten(settings, "."))
    for name in dict.fromkeys(chain(*flat)):
        words[name] = dict.fromkeys(setting_in_words(settings.get(name)) for settings in flat)
    differing = []
    for name, values in words.items():
        # A setting beside "NAME_weights" is the name of a model, such as `encoder`.
        may_differ = _SEEDS.fullmatch(name) or f"{name}_weights" in words
        # They follow from options and models; earlier revisions did not note them.
        may_differ = may_differ or name.startswith("overrides.")
        if len(values) > 1 and not may_differ:
            differing.append(f"{name} ({' and '.join(values)})")
    return differing


def setting_in_words(value: object) -> str:
    """A setting in words: digests are cut to 12 digits, and an oracle's score is not to read as a model's.

    Equal words are taken for equal settings (`_check_seeds`), so nothing that tells settings apart may be left out.
    """
    if isinstance(value, Mapping):
        # The names say little: the values tell settings apart.
        words: dict[str, None] = {}
        for name, inner in value.items():
            words[f"weights {inner}" if "weights" in name else setting_in_words(inner)] = None
        return ", ".join(words)
    if isinstance(value, (list, tuple)):
        return ",".join(map(setting_in_words, value))
    text = str(value)
    if text.startswith(ORACLE):
        return f"ORACLE {text.removeprefix('oracle:')}, which knows the facts and is not a language model"
    return _DIGEST.sub(r"\1", text)


def shared_in_words(run: Run, setting: str) -> str:
    """One of the settings `EQUAL` of a run; "" if it has none.

    A file is named and its digest added; older runs did not note the name, and contexts of the questions have none.
    """
    value = getattr(shared_settings(run), setting)
    if value is None:
        return ""
    words = setting_in_words(value)
    path = getattr(run.about, setting) if setting in _FILES else None
    if path is None or value == _OWN_CONTEXTS:
        return words
    is_digest = re.fullmatch(r"\w{12}(,\w{12})*", words)
    return f"{path} (SHA-256 {words})" if is_digest else f"{path} ({words})"


def defaults_of(run: Run) -> dict[str, Any]:
    """The defaults of the options of a run's system, which are those of the system's paper."""
    if run.system not in system_names():
        return {}
    defaults = {item.name: item.default for item in fields(find_system(run.system).options)}
    # As settings.json holds them: tuples become lists.
    return json.loads(json.dumps(defaults, default=str))


def _comparable_value(value: object) -> object:
    """A setting with digests of weights instead of model folders, since equal weights are one model wherever they lie.

    A model without a digest (a served one) is compared by its name.
    """
    if not isinstance(value, Mapping):
        return value
    weights = value.get("weights") or value.get("model_weights")
    return weights or {name: _comparable_value(inner) for name, inner in value.items()}
