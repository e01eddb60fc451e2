"""`tripletune eval report`: reads results folders, writes page, plots and figures as one folder, in one step."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.eval.report.build import build_report
from tripletune.eval.report.pages import page_of
from tripletune.eval.report.read import read_folder

logger = logging.getLogger(__name__)

PAGE, FIGURES = "report.md", "report.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the command its options."""
    add = parser.add_argument
    add("folders", nargs="+", metavar="[NAME=]DIR",
        help="output folders of `run`, and of other commands that leave a metrics.json; the first run of a task is the "
        "one that the others are compared with")  # fmt: skip
    add("--output", required=True, metavar="DIR", help="folder of the report; an older report there is replaced")
    add("--no-plots", action="store_true", help="tables alone")


def report(args: argparse.Namespace, console: Console) -> int:
    """Write a report.

    Returns:
        0.

    Raises:
        FileNotFoundError: a folder is not there.
        ValueError: a folder holds no results, or is named twice; or plots are wanted and matplotlib is missing.
        FileExistsError: the output folder holds something else than a report.
    """
    write_report(args.folders, args.output, not args.no_plots)
    found = json.loads((Path(args.output) / FIGURES).read_text(encoding="utf-8"))
    for sentence in found["missing"]:
        logger.warning("%s", sentence.replace("`", ""))
    plots = sum(1 for _ in Path(args.output).glob("*.png"))
    runs = sum(len(group["runs"]) for group in found["groups"]) + len(found["others"])
    console.print(f"{Path(args.output) / PAGE}: {runs} results, {plots} plots", markup=False)
    return 0


def write_report(folders: list[str], output: str | Path, plots: bool = True) -> None:
    """Write page, figures and plots; the same results give the same bytes.

    Args:
        folders: Results folders, or NAME=FOLDER.
        output: The folder of the report.
        plots: Whether to draw.

    Raises:
        See `report`.
    """
    output = Path(output)
    _check_output(output)
    found = [read_folder(spec) for spec in folders]
    places = [Path(one.folder).resolve() for one in found]
    twice = next((one.folder for one, place in zip(found, places) if places.count(place) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is named twice: name every folder once")
    figures = build_report(found)
    told: list[dict[str, str]] = []
    files: dict[str, bytes] = {}
    if plots:
        from tripletune.eval.report.plots import draw

        told, files = draw(figures)
    files[PAGE] = page_of(figures, told).encode()
    files[FIGURES] = (json.dumps(figures, ensure_ascii=False, indent=1) + "\n").encode()
    _write(output, files)


def _write(output: Path, files: Mapping[str, bytes]) -> None:
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in files.items():
        (partial / name).write_bytes(content)
    if output.exists():
        shutil.rmtree(output)
    os.replace(partial, output)


def _check_output(output: Path) -> None:
    if output.is_file():
        raise FileExistsError(f"--output {output} is a file: name a folder")
    names: list[Any] = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    foreign = [name for name in names if name not in (PAGE, FIGURES) and not name.endswith(".png")]
    if foreign or (names and FIGURES not in names):
        raise FileExistsError(
            f"--output {output} holds other files ({', '.join(foreign or names)[:80]}): name a new folder, or one with "
            "an older report"
        )
