"""Tables separated by tabs that a program proposes and a person edits, perhaps in a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def reviewed_rows(
    path: str | Path, needed: Sequence[str], what: str, command: str
) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    """Yield each row with its place (file and line).

    Args:
        needed: The columns without which a row has no meaning.
        what: What the file holds, for the error about a missing file.
        command: The command that writes such a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A column is missing, or the file is not UTF-8 text.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such {what}: {path} (`tripletune rag {command}` writes one)")
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, delimiter="\t")
            missing = {*needed} - {*(table.fieldnames or ())}
            if missing:
                raise ValueError(
                    f"{path}: the first line must name the columns {', '.join(needed)}, separated by tabs; "
                    f"{', '.join(sorted(missing))} is missing"
                )
            for row in table:
                yield f"{path}:{table.line_num}", row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); save the table as UTF-8") from None
