import pytest

from tests.cli import write_lines
from tripletune.eval.__main__ import main
from tripletune.eval.report.curve import draw_curve, panels_of, read_curve


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    write_lines(
        folder / "losses.jsonl", [{"step": n, "loss": 3 / n, "tokens": 10, "seconds": 0.1} for n in range(1, 301)]
    )
    scores = {"rougeL": 0.25, "exact/micro/f1": 0.2, "normalised/micro/f1": 0.667, "malformed_output": 0.1}
    write_lines(
        folder / "evaluations.jsonl", [{"step": n, "epoch": n / 100, "loss": 2 / n, **scores} for n in (100, 200, 300)]
    )
    return folder


def test_the_curve_is_drawn_and_told(run, capsys):
    assert main(["curve", str(run)]) == 0
    picture = (run / "learning_curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "66.7" in shown, "normalised F1 of the last step"
    assert "malformed_output" in shown
    (run / "checkpoint-100").mkdir()
    assert main(["curve", str(run / "checkpoint-100"), "--output", str(run / "again.png")]) == 0
    assert (run / "again.png").read_bytes() == picture, "the same curve gives the same bytes"


def test_what_is_drawn(run):
    losses, evaluations = read_curve(run)
    assert (len(losses), len(evaluations)) == (300, 3)
    assert panels_of(evaluations) == {
        "ROUGE": {"rougeL": "ROUGE-L"},
        "triple F1": {"exact/micro/f1": "exact", "normalised/micro/f1": "normalised"},
    }
    assert draw_curve(losses, evaluations[:1]) != draw_curve(losses, evaluations)


def test_a_run_under_way_or_of_another_kind(run, capsys):
    with (run / "losses.jsonl").open("a") as file:
        file.write('{"step": 301, "lo')
    (run / "evaluations.jsonl").unlink()
    assert main(["curve", str(run)]) == 0
    assert "no evaluation yet" in capsys.readouterr().out
    assert len(read_curve(run)[0]) == 300
    assert main(["curve", str(run), "--output", "curve.pdf"]) == 2
    assert "must end in .png" in capsys.readouterr().err
    write_lines(run / "evaluations.jsonl", [{"step": 5, "loss": 1.0, "core_f1": 0.5, "stop_accuracy": 0.9}])
    assert list(panels_of(read_curve(run)[1])) == ["scores"]
    scores = {
        "planning/action_accuracy_by_history/3": 0.5,
        "planning/subquery_f1_with_history": 0.4,
        "answering/f1": 0.9,
    }
    assert list(panels_of([{"step": 5, **scores}])) == ["planning", "answering"], "a Graph-LLM: its main scores alone"
    assert list(panels_of([{"step": 5, "rewards/accuracies": 1.0, "logps/chosen": -9.0}])) == ["pairs"]
    (run / "losses.jsonl").unlink()
    assert draw_curve(*read_curve(run)).startswith(b"\x89PNG")


def test_rewards_are_drawn_beside_the_loss(run):
    plain = draw_curve(*read_curve(run))
    rows = [{"step": n, "reward": n / 300, "tokens": 90.0, "kl": None, "entropy": 0.1} for n in range(1, 300, 4)]
    write_lines(run / "rewards.jsonl", rows)
    losses, evaluations = read_curve(run)
    assert [len([row for row in losses if name in row]) for name in ("loss", "reward", "tokens")] == [300, 75, 75]
    drawn = draw_curve(losses, evaluations)
    assert width(drawn) == width(plain) * 3 // 2, "loss, reward and tokens; no divergence was logged"


def width(picture):
    return int.from_bytes(picture[16:20], "big")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: [file.unlink() for file in folder.iterdir()], "holds no losses.jsonl and no evaluations.jsonl"),
        (lambda folder: [file.write_text("") for file in folder.iterdir()], "has done no step yet"),
    ],
)
def test_bad_runs_are_one_line(run, error_of, change, message):
    change(run)
    assert main(["curve", str(run)]) == 2
    assert message in error_of()
