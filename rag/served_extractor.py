"""A trained extractor on a server, which reads passages in the loop: `--extractor openai:NAME@URL`.

RAS serves its text-to-triples model with vLLM (section 3.2, table 3). The model gets the instruction of its training,
as a model on this machine does, and not the prompt of a chat model that was never trained to extract.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tripletune.core.data.pairs import load_instruction
from tripletune.core.options import CheckedOptions, set_values, setting
from tripletune.llm.backends import LLMOptions, backend_names, load_backend, open_client, read_spec
from tripletune.models.run_folders import PROMPT_FILE
from tripletune.rag.extractor import LOCAL_TOKENS, TextExtractor


@dataclass(frozen=True, slots=True)
class ServedOptions(CheckedOptions):
    """Options of a trained extractor on a server."""

    prompt: str | None = setting(
        None, "file with the instruction of its training, or its export, run or merged folder (default: ours)"
    )
    max_tokens: int = setting(LOCAL_TOKENS, "maximum tokens of a reply", at_least=1)
    vocabulary: str | None = setting(None, "file of `rag vocabulary`: its predicates replace those of the replies")
    outside: Literal["keep", "drop"] = setting(
        "keep", "keep triples whose predicate the vocabulary lacks, or drop them", needs="vocabulary"
    )
    concurrency: int = setting(64, "passages read at once", at_least=1)
    api_key_env: str | None = setting(None, "environment variable with the server's key (default: the backend's)")

    @property
    def instruction(self) -> str:
        """The instruction of the prompt file, of a model's folder, or the default of training."""
        if self.prompt is None:
            return load_instruction()
        file = Path(self.prompt)
        if file.is_dir():
            file = file / PROMPT_FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"extractor_set prompt={self.prompt}: there is no {file}; give the {PROMPT_FILE} that "
                "`train text-to-triples` writes beside the weights"
            )
        return load_instruction(file)


def is_served(spec: str) -> bool:
    """Whether an extractor is named as `BACKEND:MODEL[@URL]`, where the backend calls a server."""
    backend, colon, _ = spec.partition(":")
    return bool(colon) and backend in backend_names() and not load_backend(backend).local


class ServedSettings(NamedTuple):
    """How a server is called, and how the extractor behind it reads a passage."""

    client: LLMOptions
    extractor: ServedOptions


def served_settings(spec: str, assignments: tuple[str, ...]) -> ServedSettings:
    """The options of the server's client and of the extractor, from `--extractor` and `extractor_set`.

    Raises:
        ValueError: An assignment names no option, or its value does not fit; all problems are named.
    """
    values, problems = set_values(ServedOptions, assignments, "--extractor")
    if problems:
        raise ValueError("; ".join(problems))
    own = ServedOptions(**values)
    _, names = read_spec(spec)
    client = LLMOptions(
        backend=str(names["backend"]),
        model=str(names["model"]),
        url=names["url"],
        concurrency=own.concurrency,
        api_key_env=own.api_key_env,
    )
    return ServedSettings(client, own)


def open_served_extractor(spec: str, assignments: tuple[str, ...] = ()) -> TextExtractor:
    """Open the client of a trained extractor on a server; its replies are kept by the store of triples."""
    options, own = served_settings(spec, assignments)
    return TextExtractor(
        open_client(options),
        own.instruction,
        sampling=options.sampling(own.max_tokens),
        concurrency=own.concurrency,
        name=options.ledger_name,
        vocabulary=own.vocabulary,
        drop_outside=own.outside == "drop",
    )
