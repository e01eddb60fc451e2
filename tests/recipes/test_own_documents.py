from tripletune.recipes.own_documents import run


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
