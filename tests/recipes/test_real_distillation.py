from pathlib import Path

from tripletune.recipes.real_distillation import run

CONFIG = Path(__file__).parents[2] / "recipes/configs/smollm2_135m_cirag_real.yaml"


def test_a_dry_run_shows_every_command(capsys):
    assert run(["--config", str(CONFIG), "--seeds", "7", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    programs = [line.split(" --")[0].removeprefix("tripletune ") for line in lines]
    exam = [*["eval run"] * 4, "eval report"]
    assert [" ".join(name.split()[:2]) for name in programs] == [
        *["ledger import", "eval run"] * 3, "build trajectories", "accelerate launch", *exam, *exam,
    ]  # fmt: skip
    assert sum("--integrator runs/real/student-7" in line for line in lines) == 2
    assert run(["--teacher", "t"]) == 2, "no sets are named"
