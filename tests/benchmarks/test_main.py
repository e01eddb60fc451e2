"""The benchmarks' harness, and every case at its smallest that needs no model."""

import json

import pytest

from benchmarks import Way, in_fresh_process, resident, take_turns
from benchmarks.__main__ import cases, main


def test_ways_take_turns_and_medians_count():
    order = []
    ways = [
        Way(name, lambda name=name: order.append(name) or 1.0, lambda name=name: order.append(f"warm {name}"))
        for name in "ABC"
    ]
    take_turns(ways, repeats=3)
    assert order == ["warm A", "warm B", "warm C", *"ABC", *"BCA", *"CAB"]
    ways[0].seconds = [3.0, 1.0, 2.0]
    row = ways[0].row("questions", questions=4)
    assert (row["seconds"], row["passes_seconds"], row["questions_per_second"]) == (2.0, [3.0, 1.0, 2.0], 2.0)
    assert row["peak_bytes"] > 10_000_000


def test_a_fresh_process_has_a_peak_of_its_own():
    held = bytearray(300_000_000)
    assert in_fresh_process(resident, "VmHWM") < len(held)


@pytest.mark.parametrize(
    "words",
    [
        ["waiting", "--questions", "3", "--call", "0", "--search", "0", "--repeats", "1"],
        ["build_subq", "--questions", "40"],
        ["rescore", "--records", "20", "--repeats", "1"],
        ["vector_index", "--rows", "300", "--queries", "3"],
    ],
    ids=lambda words: words[0],
)
def test_a_case_prints_its_table_and_writes_every_figure(words, tmp_path, capsys):
    assert main([*words, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / f"{words[0]}.json").read_text())
    assert found["options"]["seed"] == 7
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert resident("VmRSS") is None or all(row["peak_bytes"] > 0 for row in found["rows"])
    shown = capsys.readouterr().out
    assert all(row["name"] in shown for row in found["rows"])


def test_bad_input_is_one_line(capsys):
    assert main(["loop", "--questions", "0", "--batch-size", "0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "questions" in said
    assert "batch_size" in said
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in cases())
