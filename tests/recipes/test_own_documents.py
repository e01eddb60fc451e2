import os

from tripletune.models.options import to_yaml
from tripletune.recipes.own_documents import RoadConfig, run


def test_a_dry_run_shows_the_commands_and_what_the_chat_model_costs(tmp_path, capfd):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "kelm.md").write_text("# Kelm\n\nKelm Bridge crosses the Lune. Ivo Rand built it.\n")
    words = ["--documents", str(tmp_path / "docs"), "--output_dir", str(tmp_path / "mine")]
    assert run([*words, "--llm", "openai:none@http://127.0.0.1:9/v1", "--dry-run", "--price", "1,2"]) == 0
    said = capfd.readouterr().out
    for program in ("build questions", "build subq", "accelerate launch", "checkpoints export"):
        assert program in said
    assert "1 documents: 1 new" in said
    assert "extract.triples" in said
    assert not (tmp_path / "mine" / "ledger.sqlite").exists()
    assert run(words) == 2, "no chat model is named"


def test_finished_steps_of_other_settings_or_documents_are_refused(tmp_path, capfd):
    page, home = tmp_path / "docs" / "kelm.md", tmp_path / "mine"
    for place in (page.parent, home / "questions"):
        place.mkdir(parents=True)
    page.write_text("# Kelm\n\nKelm Bridge crosses the Lune.\n")
    words = ["--documents", str(page.parent), "--llm", "openai:none", "--output_dir", str(home)]
    config = RoadConfig(str(home), [str(page.parent)], "openai:none", count=100)
    (home / "config.yaml").write_text(to_yaml(config))
    questions = home / "questions" / "README.md"
    questions.write_text("made")
    os.utime(questions, (1, 1))
    assert run(words) == 2
    assert "other values of count, the documents' files: give another --output_dir" in capfd.readouterr().err
    assert "count: 100" in (home / "config.yaml").read_text()
