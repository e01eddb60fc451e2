"""What a hosted model costs: a dated price table, ours in `prices.yaml` or one of your own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRICES = Path(__file__).parent / "prices.yaml"
_DATED = re.compile(r"-(\d{4}-\d{2}-\d{2}|\d{8}|latest)$")


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens.

    Attributes:
        input: Tokens of the prompt.
        output: Tokens of the reply.
        source: Where the numbers were read, and of which day they are.
    """

    input: float
    output: float
    source: str

    def cost(self, input_tokens: float, output_tokens: float) -> float:
        """US dollars for so many tokens."""
        return (input_tokens * self.input + output_tokens * self.output) / 1e6


def find_price(model: str, path: str | Path | None = None, batch: bool = False) -> Price | None:
    """The price of a model; None when the table does not know it.

    Args:
        model: Its name at the provider, with or without a date at the end and "backend:" before it.
        path: A table in the layout of `prices.yaml`; None: ours.
        batch: Whether the calls go through the Batch API.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another layout.
    """
    path = Path(path or PRICES)
    table = _table(path)
    name = model.rpartition(":")[2]
    row = table["models"].get(name) or table["models"].get(_DATED.sub("", name))
    if row is None:
        return None
    factor = float(table.get("batch", 1.0)) if batch else 1.0
    day = row.get("as_of") or f"{table.get('taken', 'an unknown day')}, the page names none"
    source = f"{path.name}, {row.get('source', 'no source given')}, as of {day}"
    return Price(row["input"] * factor, row["output"] * factor, f"{source}, Batch API" if batch else source)


def _table(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise FileNotFoundError(f"no such price table: {path}")
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    models = table.get("models") if isinstance(table, dict) else None
    if not isinstance(models, dict) or not all(_is_row(row) for row in models.values()):
        raise ValueError(
            f"{path}: a price table needs 'models', each with 'input' and 'output' in dollars a million tokens"
        )
    return table


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(
        isinstance(row.get(key), (int, float)) and not isinstance(row.get(key), bool) and row[key] >= 0
        for key in ("input", "output")
    )
