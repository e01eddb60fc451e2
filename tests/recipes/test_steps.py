"""A recipe of commands continues where it was."""

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
