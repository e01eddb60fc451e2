"""Folders of models trained on plain text: extractors (RAS, section 3.2) and students (CIRAG, section 3.5).

They hold a PEFT adapter or a whole transformers model, the tokenizer, the prompt it was trained with, and a small file
that names the task. Plain transformers and PEFT load them; `checkpoints.verify` compares them by chats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tripletune.checkpoints.replies import FORMAT, observed_reply
from tripletune.models.run_folders import PROMPT_FILE, TASK_FILES, read_json

# What an extractor and anything else is asked; nothing of it is true.
_TEXTS = {
    "with a title": "The Glass Harbour: The Glass Harbour is a novel by Ida Morn, published in 1931.",
    "without a title": "Ida Morn was born in Velsund, a town in Norlandia, where she worked as a pilot.",
    "no fact": "And so it went on, as it always had.",
}


@dataclass(frozen=True, slots=True)
class TextCase:
    """What a model is asked: the turns of a chat for decoders, a text alone for encoder-decoders."""

    messages: tuple[Mapping[str, str], ...] = ()
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """The case as it is stored."""
        return {"messages": [dict(turn) for turn in self.messages]} if self.messages else {"text": self.text}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> TextCase:
        """Read a stored case."""
        return cls(tuple(row.get("messages") or ()), row.get("text", ""))


@dataclass
class TextModel:
    """A loaded model and what it is used with.

    Attributes:
        model: In eval mode; an adapter is beside its base model, not merged.
        tokenizer: Its tokenizer.
        about: Content of the task file.
        folder: Where it lies.
    """

    model: Any
    tokenizer: Any
    about: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder of its own."""
        return bool(self.model.config.is_encoder_decoder)

    def prompt_ids(self, case: TextCase) -> list[int]:
        """The tokens the model reads."""
        from tripletune.models.llm.chat import ChatEncoder

        if not case.messages:
            return list(self.tokenizer(case.text)["input_ids"])
        return ChatEncoder(self.tokenizer, str(self.folder)).encode(case.messages)  # type: ignore[arg-type]


def task_of(folder: str | Path) -> dict[str, Any]:
    """What a model was made for: the content of `extractor.json` or `student.json`.

    Raises:
        FileNotFoundError: the folder has neither.
        ValueError: it is malformed.
    """
    name = next((name for name in TASK_FILES if (Path(folder) / name).is_file()), TASK_FILES[0])
    return read_json(Path(folder) / name)


def text_cases(folder: str | Path) -> dict[str, TextCase]:
    """The inputs a model is compared by: three texts, asked for as the model was trained."""
    prompt = Path(folder) / PROMPT_FILE
    if task_of(folder).get("encoder_decoder"):
        return {name: TextCase(text=text) for name, text in _TEXTS.items()}
    system = prompt.read_text(encoding="utf-8").strip() if prompt.is_file() else ""
    opening = [{"role": "system", "content": system}] if system else []
    return {name: TextCase((*opening, {"role": "user", "content": text})) for name, text in _TEXTS.items()}


def load_text_model(folder: str | Path) -> TextModel:
    """Load a folder in float32, on the GPU where there is one.

    Raises:
        FileNotFoundError: files are missing, or the base model is not there.
        ValueError: files are damaged, or the adapter does not fit the base model.
    """
    import torch
    from peft import PeftModel

    from tripletune.models.loading import adapter_base, load_tokenizer, load_weights

    about = task_of(folder)
    base = adapter_base(folder)
    if base is None:
        model = load_weights(folder, torch.float32)
    else:
        frozen = load_weights(base[0], torch.float32, base[1])
        try:
            model = PeftModel.from_pretrained(frozen, str(folder)).eval()
        except (RuntimeError, KeyError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ValueError(f"the adapter in {folder} does not fit {base[0]} ({reason})") from error
    if torch.cuda.is_available():
        model = model.to("cuda")
    return TextModel(model, load_tokenizer(folder), about, Path(folder))


def observe_text_model(loaded: TextModel, cases: Mapping[str, TextCase]) -> dict[str, Any]:
    """What a model says to each case: the content of `verify.json`."""
    from tripletune.models.local.decoding import end_tokens

    ends = end_tokens(loaded.model, loaded.tokenizer)
    observed = []
    for name, case in cases.items():
        ids = loaded.prompt_ids(case)
        reply = observed_reply(loaded.model, ids, ends, loaded.tokenizer.pad_token_id)
        text = loaded.tokenizer.decode(reply["reply_ids"], skip_special_tokens=True)
        observed.append({"name": name, **case.to_json(), "prompt_ids": ids, **reply, "reply": text})
    return {
        "format": FORMAT,
        "dtype": "float32",
        "device": str(loaded.model.device.type),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
        "cases": observed,
    }
