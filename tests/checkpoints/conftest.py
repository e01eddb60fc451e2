"""A run folder as the trainer leaves it, with an adapter that does something, and its export."""

import json
import shutil
from pathlib import Path

import pytest

CONFIG_YAML = """\
output_dir: /home/someone/secret-project/runs/h1
model:
  base: /home/someone/models/base
  lora: true
hub_token: hf_abcdefghijklmnopqrstuvwxyz
train:
  learning_rate: 0.001
"""


def train_tiny(base, encoder, folder, *, tune="lora", use_graph=True, options=None):
    """Save random trained weights as `train.engine` saves them."""
    import torch

    from tripletune.models.graph_llm import add_adapter, build_graph_llm

    torch.manual_seed(5)
    model, processor = build_graph_llm(
        str(base), encoder=str(encoder), dtype=torch.float32, use_graph=use_graph, graph_hidden_width=16,
        graph_layers=2, graph_heads=2, projector_width=16,
    )  # fmt: skip
    adapted = add_adapter(model, tune=tune, targets=("all-linear",), options=options)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            # LoRA's B starts at zero, and then there would be nothing to merge.
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    model.config.save_pretrained(folder)
    processor.save_pretrained(folder)


def add_run_files(run):
    """What a run folder holds besides weights."""
    (run / "config.yaml").write_text(CONFIG_YAML)
    about = {"command": ["train.py", "--hub_token", "hf_abcdefghijklmnopqrstuvwxyz"], "git_revision": "f00ba4"}
    (run / "environment.json").write_text(json.dumps({**about, "python": "3.11.7", "versions": {"torch": "2.13.0"}}))
    (run / "losses.jsonl").write_text('{"step": 1, "seconds": 2.0}\n{"step": 2, "seconds": 3.5}\n{"step": 3, "sec')
    (run / "cache").mkdir()
    (run / "cache" / "vectors.npy").write_bytes(b"0")
    data = {"train": {"path": "/home/someone/data/subq", "sha256": "0123abcd"}, "validation": None}
    training = {"records": 12, "steps": 3, "seconds": 7.25, "data": data, "evaluation": {"eval_loss": 1.25}}
    (run / "final" / "training.json").write_text(json.dumps(training))
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin"):
        (run / "final" / name).write_bytes(b"\x80pickle")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, tiny_model, tiny_encoder):
    """A finished run; its language model ties embeddings as SmolLM2 does. Not to be changed: see `run_copy`."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    run = tmp_path_factory.mktemp("runs") / "h1"
    train_tiny(tiny_model("smollm2"), tiny_encoder, run / "final")
    add_run_files(run)
    return run


@pytest.fixture
def run_copy(tiny_run, tmp_path):
    """A copy of the run that a test may damage."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def tiny_export(tiny_run, tmp_path_factory):
    """The export of `tiny_run`. Not to be changed: see `export_copy`."""
    from tripletune.checkpoints import export_run

    return export_run(tiny_run, tmp_path_factory.mktemp("exports") / "h1")


@pytest.fixture
def export_copy(tiny_export, tmp_path):
    """A copy of the export that a test may damage."""
    return Path(shutil.copytree(tiny_export, tmp_path / "export"))


@pytest.fixture
def same_process(monkeypatch):
    """Let `verify` load folders here: starting Python and torch anew takes seconds, and one test does it."""
    from tripletune.checkpoints import verify

    monkeypatch.setattr(
        verify,
        "observe_in_new_process",
        lambda folder, cases: verify.observe(verify.load_for_observation(folder), cases),
    )
