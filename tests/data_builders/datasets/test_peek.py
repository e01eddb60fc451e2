import os
import subprocess
import sys

import pytest

from tripletune.data_builders.__main__ import main
from tripletune.data_builders.datasets.peek import LABELS, find_records, shown
from tripletune.data_builders.datasets.shards import ShardWriter
from tripletune.data_builders.datasets.stats import sample_labels
from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple
from tripletune.models.prompts.rendering import Instructions, render

HISTORY = (Step("Who wrote it?", (Triple("Dune", "author", "Frank Herbert"),)),)


@pytest.fixture
def folder(tmp_path):
    records = [
        Record("a:plan0", "a", "planning", "Where?", Action.SUBQ, (), "Who wrote it?"),
        Record("a:plan1", "a", "planning", "Where?", Action.SUFFICIENT, HISTORY),
        Record("a:answer", "a", "answering", "Where?", Action.SUFFICIENT, HISTORY, answers=("Tacoma", "Tacoma, WA")),
        Record("b:answer", "b", "answering", "When?", Action.NO_RETRIEVAL, answers=("1920",)),
    ]
    for split, group in (("train", records[:3]), ("validation", records[3:])):
        with ShardWriter(tmp_path, split) as writer:
            for record in group:
                writer.write(record)
    return tmp_path


def ids(found):
    return [record.id for _, record in found]


def test_records_are_found_by_id_question_number_label_and_split(folder):
    assert ids(find_records(folder)) == ["a:plan0"]
    assert ids(find_records(folder, identity="a:plan1")) == ["a:plan1"]
    assert ids(find_records(folder, identity="a")) == ["a:plan0", "a:plan1", "a:answer"]
    assert ids(find_records(folder, identity="a", number=2)) == ["a:plan1"]
    assert find_records(folder, number=4)[0][0] == "validation"
    assert ids(find_records(folder, split="validation")) == ["b:answer"]
    for label, identity in (
        ("subq", "a:plan0"),
        ("sufficient", "a:plan1"),
        ("answer", "a:answer"),
        ("direct_answer", "b:answer"),
    ):
        assert ids(find_records(folder, label=label)) == [identity]
    assert tuple(LABELS.values()) == sample_labels()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"identity": "c"}, "no record with id c"),
        ({"number": 5}, "no record with number 5"),
        ({"number": 0}, "counted from 1"),
        ({"label": "no_retrieval"}, "no record with label no_retrieval"),
        ({"label": "other"}, "label 'other' is not one of subq"),
        ({"split": "test"}, "no split 'test'; it has train, validation"),
    ],
)
def test_nothing_found_is_said(folder, options, message):
    with pytest.raises(ValueError, match=message):
        find_records(folder, **options)


def test_record_is_shown_as_the_model_sees_it(folder):
    (split, record), *_ = find_records(folder, label="answer")
    text = shown(record, split)
    assert f"{Instructions.load().answering}\n\n{render(record.input)}\n\n=> Tacoma" in text
    assert "q_0: 1 triples, 2 nodes" in text
    assert "gold answers: Tacoma | Tacoma, WA" in text


def test_command_prints_all_records_of_a_question(folder, capsys):
    assert main(["peek", str(folder), "--id", "a"]) == 0
    assert capsys.readouterr().out.count("=> ") == 3


def test_a_pipe_that_is_closed_early_is_no_error(folder):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "data_builders", "peek", str(folder)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
