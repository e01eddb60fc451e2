"""A recipe of commands continues where it was."""

import os

from tripletune.recipes import _steps


def test_a_failed_step_that_left_its_file_is_run_again(tmp_path, monkeypatch):
    codes, ran = [1, 1, 0, 0], []

    def step(command, done):
        (tmp_path / "metrics.json").touch()
        ran.append(done)
        return codes[len(ran) - 1]

    monkeypatch.setattr(_steps, "run_command", step)
    steps = [_steps.RecipeStep("Evaluate", "tripletune eval run", "metrics.json")]
    assert [_steps.run_steps(steps, tmp_path) for _ in codes] == codes
    assert ran == [False, False, False, True]


def test_a_training_that_a_signal_stopped_has_its_own_code(tmp_path, monkeypatch):
    def stopped(command, done):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "preempted.json").touch()
        return 1  # of `accelerate launch`

    monkeypatch.setattr(_steps, "run_command", stopped)
    step = _steps.RecipeStep("Train", "accelerate launch train.py", "model/final/training.json")
    assert _steps.run_steps([step], tmp_path) == 75


def test_files_of_the_package_are_found_from_any_folder(tmp_path, monkeypatch, capfd):
    command = "accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/missing.py"
    _steps.run_command(command, done=True)
    assert "--config_file recipes/accelerate/cpu.yaml" in capfd.readouterr().out, "in a clone the short path is shown"
    monkeypatch.chdir(tmp_path)
    _steps.run_command(command, done=True)
    *_, file, missing = capfd.readouterr().out.splitlines()[0].split()
    assert file.endswith("/recipes/accelerate/cpu.yaml")
    assert os.path.isfile(file)
    assert missing == "recipes/missing.py"
