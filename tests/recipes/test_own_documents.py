import os
import re
import shlex

import pytest

from tests import cli
from tests.cli import read_lines, write_lines
from tripletune.recipes import _steps
from tripletune.recipes.own_documents import OwnDocumentsConfig, own_documents_steps, run


def test_a_dry_run_shows_the_commands_and_what_the_chat_model_costs(tmp_path, monkeypatch, capfd):
    # Outside the clone, where the package's launcher and recipe are.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "kelm.md").write_text("# Kelm\n\nKelm Bridge crosses the Lune. Ivo Rand built it.\n")
    words = ["--documents", str(tmp_path / "docs"), "--output_dir", str(tmp_path / "mine")]
    assert run([*words, "--llm", "openai:none@http://127.0.0.1:9/v1", "--dry-run", "--price", "1,2"]) == 0
    said = capfd.readouterr().out
    for program in ("build questions", "build subq", "accelerate launch", "checkpoints export"):
        assert program in said
    launcher, recipe = re.search(r"--config_file (\S+) (\S+)", said).groups()
    assert os.path.isfile(launcher)
    assert os.path.isfile(recipe)
    assert "1 documents: 1 new" in said
    assert "extract.triples" in said
    assert not (tmp_path / "mine").exists(), "a dry run leaves nothing behind"
    assert run(words) == 2, "no chat model is named"


def test_the_example_outside_the_clone_says_where_its_documents_are(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert run(["--config", "example_documents"]) == 2
    said = capfd.readouterr().err
    assert "no such file or folder: examples/documents (the example's documents are in the repository" in said
    assert "--documents FOLDER" in said
    assert run(["--documents", "gone", "--llm", "openai:m"]) == 2
    assert capfd.readouterr().err.endswith("documents: no such file or folder: gone\n")


def test_columns_are_those_of_build_passages(tmp_path):
    rows = [{"Topic": "Kelm", "Answer": "A town", "My notes": "Small"}]
    documents = write_lines(tmp_path / "rows.jsonl", rows)
    config = OwnDocumentsConfig(
        str(tmp_path), [documents], llm="openai:m", text_column=["Answer", "My notes"], title_column=["Topic"]
    )
    command = next(step.command for step in own_documents_steps(config) if " build passages " in step.command)
    assert cli.run("build passages", *shlex.split(command)[3:]).code == 0
    (passage,) = read_lines(tmp_path / "passages" / "corpus.jsonl")
    assert (passage["title"], passage["text"]) == ("rows.jsonl › Kelm", "Answer: A town; My notes: Small")


def test_the_language_reaches_every_search():
    config = OwnDocumentsConfig("mine", ["docs"], llm="openai:m", language="german")
    searches = [step.command for step in own_documents_steps(config) if " eval run " in step.command]
    assert [command.count(" --set language=german") for command in searches] == [1, 1]


def test_changed_documents_make_the_results_again(tmp_path, monkeypatch, capfd):
    page, home = tmp_path / "docs" / "kelm.md", tmp_path / "mine"
    page.parent.mkdir()
    page.write_text("Kelm Bridge crosses the Lune.")
    made = {
        "questions": ("build questions", "questions/README.md"),
        "model": ("launch --quiet", "model/final/training.json"),
        "after": ("--model", "after/metrics.json"),
    }
    ran = []
    fails = []

    def step(command, done):
        """A step that writes its result, unless it is done or fails."""
        for name, (words, file) in made.items():
            is_step = words in command and (name != "after" or command.endswith("/after"))
            if is_step and not done:
                ran.append(name)
                (home / file).parent.mkdir(parents=True, exist_ok=True)
                (home / file).write_text(page.read_text())
        return int(any(words in command for words in fails))

    monkeypatch.setattr(_steps, "run_command", step)
    words = ["--documents", str(page.parent), "--output_dir", str(home), "--llm", "openai:none"]
    assert run(words) == 0
    (home / "model" / "checkpoint").mkdir()
    (home / "index").mkdir()
    page.write_text("Kelm Bridge crosses the Eden.")

    assert run([*words, "--dry-run"]) == 2, "a dry run says what a run would refuse"
    assert "or --overwrite true to make these results again" in capfd.readouterr().err
    fails.append("rag extract")
    assert run([*words, "--overwrite", "true"]) == 1
    assert (home / "model" / "checkpoint").exists(), "a result is kept until its step runs"
    fails.clear()
    ran.clear()
    assert run(words) == 0
    assert ran == [*made], "results of the earlier documents are not taken for new ones"
    assert not (home / "model" / "checkpoint").exists()
    assert not (home / "index").exists()
    ran.clear()
    assert run(words) == 0
    assert not ran
    assert "overwrite: false" in (home / "config.yaml").read_text()


@pytest.mark.parametrize("changed", ["nothing", "times", "document", "settings", "chat model", "recipe"])
def test_finished_steps_of_other_settings_or_documents_are_refused(tmp_path, monkeypatch, capfd, changed):
    page, home, recipe = tmp_path / "docs" / "kelm.md", tmp_path / "mine", tmp_path / "train.yaml"
    page.parent.mkdir()
    page.write_text("Kelm Bridge crosses the Lune.")
    recipe.write_text("seed: 1")

    def step(command, done):
        for file in ("questions/README.md", "model/final/training.json"):
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).touch()
        return 0

    monkeypatch.setattr(_steps, "run_command", step)
    words = ["--documents", str(page.parent), "--recipe", str(recipe), "--output_dir", str(home)]
    assert run([*words, "--llm", "openai:none"]) == 0
    if changed == "times":
        os.utime(page, (1, 1))
    elif changed in ("document", "recipe"):
        stat = page.stat()
        {"document": page, "recipe": recipe}[changed].write_text("seed: 2")
        os.utime(page, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    words += ["--count", "100"] * (changed == "settings")
    kept = (home / "config.yaml").read_text()
    code = run([*words, "--llm", "openai:other" if changed == "chat model" else "openai:none"])
    assert code == 2 * (changed not in ("nothing", "times"))
    assert (home / "config.yaml").read_text() == kept, "refused settings don't replace those of the results"
    titles = {"document": "Split", "settings": "Write and check", "chat model": "Extract", "recipe": "Train"}
    assert f"input files of the step '{titles.get(changed)}" in capfd.readouterr().err or not code


def test_the_settings_that_a_recipe_keeps_can_be_given_again(tmp_path, monkeypatch):
    monkeypatch.setattr(_steps, "run_command", lambda command, done: 0)
    home = tmp_path / "mine"
    page = tmp_path / "kelm.md"
    page.write_text("Kelm Bridge crosses the Lune.")
    words = ["--documents", str(page), "--llm", "openai:none", "--model", "owner/small", "--output_dir", str(home)]
    assert run(words) == 0
    kept = (home / "config.yaml").read_text()
    assert run(["--config", str(home / "config.yaml")]) == 0
    assert (home / "config.yaml").read_text() == kept


def test_several_seeds_are_trained_and_examined_alike(tmp_path):
    config = OwnDocumentsConfig(output_dir="mine", documents=["docs"], llm="openai:m", seeds=3)
    commands = {step.title: step.command for step in own_documents_steps(config)}
    once = {step.title: step.command for step in own_documents_steps(OwnDocumentsConfig("mine", ["docs"], "openai:m"))}
    assert commands["Train"] == once["Train"], "a finished recipe of one seed continues with more"
    trainings = [words for title, words in commands.items() if title.startswith("Train")]
    assert [words.partition("--seed ")[2] for words in trainings] == ["", "101", "102"]
    assert "--output_dir mine/model-seed-102 " in trainings[2]
    exams = [words for title, words in commands.items() if title.startswith("After")]
    assert [words.partition(" --model ")[0] for words in exams] == [exams[0].partition(" --model ")[0]] * 3
    compared = commands["Compare untrained and trained model"]
    assert compared.endswith("mine/before mine/after,mine/after-seed-101,mine/after-seed-102")
