"""A Graph-LLM that a test writes, in place of a loaded one; and what the command line prints for an error."""

import pytest


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """`serve(model)`: `--model tmp_path/model` is that object."""

    def put(model):
        monkeypatch.setattr("tripletune.rag.answering.check_model_folder", lambda spec: None)
        monkeypatch.setattr("tripletune.models.graph_llm.load_generator", lambda spec, **options: model)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text('{"model_type": "graph_llm", "base_model": "pypi:none"}')
        return model

    return put


@pytest.fixture
def error_of(capsys):
    """`error_of()`: the one line of an error."""

    def read():
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return read
