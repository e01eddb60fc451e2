"""Calls and encoding on workers of Ray give the rows of one machine; skipped where Ray is not installed."""

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytest.importorskip("aiohttp")
pytest.importorskip("aiohttp")

from tests.data_builders.rows import shards
from tests.data_builders.subq_replies import WorldTeacher
from tests.llm.server import MockServer
from tripletune.data_builders.subq.__main__ import main as build
from tripletune.recipes.ray_corpus import main


@pytest.mark.slow
def test_labels_are_those_of_one_machine_and_no_call_is_made_twice(tmp_path):
    teacher = WorldTeacher(tmp_path, train=12)
    teacher.wrong = 0.25
    with MockServer(teacher.reply) as first, MockServer(teacher.reply) as second, MockServer(teacher.reply) as alone:

        def command(output, url):
            given = ["--source", f"hotpotqa:{tmp_path / 'questions.jsonl'}", "--output", str(tmp_path / output)]
            return [*given, "--teacher", "openai", "--teacher-model", "m", "--teacher-url", url]

        assert build(command("alone", alone.url)) == 0
        shared = ["subq", "--workers", "1", "--block", "4", "--replies", str(tmp_path / "replies.sqlite")]
        ray = [*shared, *command("ray", f"{first.url},{second.url}")]
        assert main(ray) == 0
        answered = [server.count("answered") for server in (first, second)]
        # Nothing is left to do, so Ray is not even started.
        assert main([*ray, "--overwrite"]) == 0
        assert [server.count("answered") for server in (first, second)] == answered
    assert shards(tmp_path / "ray") == shards(tmp_path / "alone")
    assert all(answered)
    assert answered[0] + answered[1] == alone.count("answered")


def test_an_index_of_words_needs_no_workers(capsys):
    assert main(["index", "--corpus", "c", "--index", "i"]) == 2
    assert "--retriever dense" in capsys.readouterr().err
