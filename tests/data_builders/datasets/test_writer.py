"""One writer and one card for all kinds of rows."""

import pytest

from tests.data_builders.rows import RECORDS, ROWS, counted, write_rows
from tripletune.core.data.pairs import ExtractionPair, read_pairs, read_trajectories
from tripletune.core.data.records import Action, Record, Step, read_records
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets.kinds import KINDS
from tripletune.data_builders.datasets.writer import BuildFacts, FolderOptions, card_body, new_dataset

READERS = {"records": read_records, "pairs": read_pairs, "trajectories": read_trajectories}
FACTS = BuildFacts("T", "S.")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_come_back_and_load_dataset_sees_their_features(tmp_path, kind, format):
    import datasets

    # Records with empty lists first: the features must not be guessed from them.
    rows = sorted(ROWS[kind], key=lambda row: len(str(row)))
    folder = write_rows(tmp_path / "out", kind, {"train": rows, "test": rows[:1]}, format=format, shard_size=2)
    assert list(READERS[kind](folder, "train")) == rows
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {name: len(split) for name, split in loaded.items()} == {"train": len(rows), "test": 1}
    assert loaded["train"].features == loaded["test"].features
    assert list(loaded["train"].features) == list(KINDS[kind].layout)
    assert [KINDS[kind].read(row, "row") for row in loaded["train"]] == rows


def test_a_failure_leaves_nothing(tmp_path):
    options = FolderOptions(str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt), new_dataset(options, KINDS["records"]) as dataset:
        dataset.write(RECORDS[0], "train")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def body(facts=BuildFacts("T", "S."), kind="records", rows=None):  # noqa: B008
    return card_body(KINDS[kind], facts, counted(kind, rows))


def test_card_says_what_was_left_out_and_what_the_teacher_did():
    text = body(
        BuildFacts(
            "T", "S.", teachers={"x": "me | you"}, drops={"x": {"no reason": 7}}, files={"f": "0" * 64},
            options={"seed": 3}, repairs={"x": {"filter": 3}}, prompts={"filter.md": "a" * 64},
            models={"teacher": "big-model"}, notes=["A note."],
            calls={"filter": {"calls": 12_000, "input_tokens": 7}, "query": {"calls": 1}},
        )
    )  # fmt: skip
    for line in (
        "| x: no reason | 7 |", "| `seed` | `3` |", f"| `f` | `{'0' * 64}` |", "| train | 4 |", "me \\| you",
        "| x: filter | 3 |", f"| `filter.md` | `{'a' * 64}` |", "| teacher | big-model |", "A note.",
        "| stage | calls | input tokens |", "| filter | 12,000 | 7 |", "| query | 1 | - |",
        "white-space words (no tokenizer was given)",
    ):  # fmt: skip
        assert line in text


def test_samples_stay_inside_their_fence_and_are_cut_in_the_middle():
    triples = tuple(Triple("x" * 50, "r", str(n)) for n in range(100))
    record = Record("1", "q", "planning", "End ``` here?", Action.SUFFICIENT, (Step("q", triples),))
    shown = body(rows=[record]).split("````text\n")[1].split("\n````")[0]
    assert shown.endswith("Question: End ``` here?\n=> [SUFFICIENT]")
    assert " characters ...]" in shown
    assert len(shown) < 2200


def test_text_of_data_becomes_no_markup():
    name = "a` <script>\n# H"
    pair = ExtractionPair(name, "x \x1b[31m y", source=name)
    text = body(BuildFacts("T", "S.", issues={name: 2}, options={name: "`"}), "pairs", [pair])
    assert "`` a` <script> # H ``" in text, "the code span of an id holds"
    assert "| a\\` &lt;script&gt; # H | 2 |" in text
    assert "| `` a` <script> # H `` | `` ` `` |" in text
    assert "\n# H" not in text
    assert "\x1b" not in text
