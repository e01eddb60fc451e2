"""Which settings of a run are noted: only those that its system uses, so that two runs are not told apart by others."""

import pytest

from tests.cli import write_lines
from tripletune.eval.suites import _run_settings
from tripletune.eval.systems import QuestionOptions
from tripletune.rag.systems import find_system

ENCODER = {"encoder", "encoder_weights", "query_prompt", "text_prompt", "similarity", "vectors"}


def options_of(name, **changes):
    return QuestionOptions(**{"system": name, "task": "hotpotqa", "data": "d", "output": "o", **changes})


@pytest.mark.parametrize(
    ("name", "changes", "noted"),
    [
        ("no_retrieval", {"retriever": "dense"}, set()),
        ("standard", {"retriever": "bm25"}, {"retriever"}),
        ("standard", {"retriever": "bm25", "language": "de"}, {"retriever", "language"}),
        # Dense search cuts no words.
        ("standard", {"retriever": "dense", "language": "de"}, {"retriever", *ENCODER}),
        ("standard", {"retriever": "hybrid", "language": "de"}, {"retriever", "language", *ENCODER}),
        # Its passages are found by words, but its triples ranked by the encoder.
        ("cirag", {"retriever": "bm25"}, {"retriever", *ENCODER}),
    ],
)
def test_a_search_is_noted_as_far_as_the_system_uses_it(name, changes, noted):
    system = find_system(name)
    options = options_of(name, encoder="e5", **changes)
    assert set(_run_settings._search_settings(options, system, system.options())) == noted


@pytest.mark.parametrize(
    ("name", "noted"),
    [("no_retrieval", {"data"}), ("standard", {"data", "corpus"}), ("ras", {"data", "corpus", "triples"})],
)
def test_files_are_noted_that_the_system_reads(tmp_path, name, noted):
    questions = write_lines(tmp_path / "questions.jsonl", [{"id": "q", "question": "Who?", "answers": ["Ada"]}])
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"id": "p", "title": "Ada", "text": "Ada wrote."}])
    triples = write_lines(tmp_path / "triples.jsonl", [{"title": "Ada", "text": "Ada wrote.", "triples": []}])
    system = find_system(name)
    options = options_of(name, data=questions, corpus=corpus, triples=triples)
    assert set(_run_settings._file_settings(options, system, system.options())) == noted


def test_answers_of_another_program_were_made_from_the_corpus(tmp_path):
    questions = write_lines(tmp_path / "questions.jsonl", [{"id": "q", "question": "Who?", "answers": ["Ada"]}])
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"id": "p", "title": "Ada", "text": "Ada wrote."}])
    system = find_system("answers")
    options = options_of("answers", data=questions, corpus=corpus, answers="theirs.jsonl")
    assert set(_run_settings._file_settings(options, system, system.options())) == {"data", "corpus"}


def test_the_last_of_repeated_extractor_settings_is_noted(tmp_path):
    def settings(*assignments):
        return _run_settings.extractor_settings(options_of("ras", extractor=str(tmp_path), extractor_set=assignments))

    noted = settings("dtype=float32", "max_tokens=24", "dtype=bfloat16")
    # The extractor is opened with the last one, too (`core.options.set_values`).
    assert noted["dtype"] == "bfloat16"
    assert noted["set"] == ["dtype=bfloat16", "max_tokens=24"]
    assert noted == settings("max_tokens=24", "dtype=bfloat16")
    assert noted != settings("dtype=bfloat16", "max_tokens=24", "dtype=float32")
    assert settings("max-tokens=24", "max_tokens=9")["set"] == ["max_tokens=9"]
