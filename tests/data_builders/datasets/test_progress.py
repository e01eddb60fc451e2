import logging

from tripletune.data_builders.datasets import progress as module
from tripletune.data_builders.datasets.progress import logged, progress


def test_a_line_is_logged_whenever_the_time_is_up(caplog):
    caplog.set_level(logging.INFO)
    times = iter([0, 10, 70, 120, 140])
    assert list(logged("abcd", "hotpotqa", "questions", 60, lambda: next(times))) == list("abcd")
    assert [record.getMessage() for record in caplog.records] == [
        "hotpotqa: 2 questions so far",
        "hotpotqa: 4 questions so far",
    ]


def test_there_is_a_bar_on_a_terminal_alone(monkeypatch, capsys):
    assert list(progress(range(3), "name")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True)
    assert list(progress(range(3), "name")) == [0, 1, 2]
    assert "name" in capsys.readouterr().err
