"""The Graph-LLM of RAS (section 3.4): `from tripletune.models.graph_llm import GraphLLM`."""

from typing import Any

_HOMES = {
    "GraphLLM": "model",
    "GraphLLMConfig": "model",
    "GraphLLMProcessor": "processor",
    "build_graph_llm": "loading",
    "load_graph_llm": "loading",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # Torch and PyG are imported when they are needed, and not for a `--help`.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
