"""The benchmarks' harness."""

import json

from benchmarks import Options, Result, Way, _figure_cell, take_turns
from benchmarks.__main__ import Case, find_cases, main


def test_ways_take_turns_and_medians_count():
    order: list[str] = []

    def way(name):
        return Way(name, lambda: order.append(name) or 1.0, warm_up=name != "C")

    ways = [way(name) for name in "ABC"]
    take_turns(ways, repeats=3)
    assert order == ["A", "B", *"ABC", *"BCA", *"CAB"]
    ways[0].seconds = [3.0, 1.0, 2.0]
    row = ways[0].row("questions", questions=4)
    assert (row["seconds"], row["passes_seconds"], row["questions_per_second"]) == (2.0, [3.0, 1.0, 2.0], 2.0)
    assert row["peak_bytes"] > 10_000_000


def test_a_case_prints_its_table_and_writes_every_figure(tmp_path, capsys, monkeypatch):
    def case(options):
        """Counts nothing."""
        way = Way("nothing", lambda: 1.0)
        take_turns([way], options.repeats)
        return Result("nothing", "name seconds peak_bytes", [way.row()])

    monkeypatch.setattr("benchmarks.__main__.find_cases", lambda: {"case": Case(case, Options)})
    assert main(["case", "--repeats", "1", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "case.json").read_text())
    assert found["options"] == {"repeats": 1, "seed": 7, "output": str(tmp_path)}
    assert all(row["seconds"] > 0 for row in found["rows"])
    shown = capsys.readouterr().out
    assert all(row["name"] in shown for row in found["rows"])


def test_bad_input_is_one_line(capsys):
    assert main(["loop", "--questions", "0", "--concurrency", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_helpers_that_take_options_are_no_cases():
    assert sorted(find_cases()) == [
        "bm25",
        "calls",
        "decoding",
        "embedding",
        "evidence",
        "facts",
        "gpu",
        "loop",
        "retrieval",
        "speed",
        "training_step",
        "vectors",
    ]


def test_figures_have_three_digits_and_bytes_are_gigabytes():
    shown = [_figure_cell("peak_bytes", 1_234_567_890), _figure_cell("x", 1234.5), _figure_cell("x", 0.12345)]
    assert shown == ["1.23", "1,234", "0.123"]
    assert [_figure_cell("x", None), _figure_cell("x", 12_345), _figure_cell("x", "name")] == ["-", "12,345", "name"]
