"""The peers of the benchmarks of training: their clock, their LoRA, and the rows and arguments that they get."""

import torch
from transformers import TrainerControl

from benchmarks import peers
from tripletune.train.settings import RunConfig


def test_the_clock_counts_steps_keeps_first_losses_and_stops_after_its_limit(monkeypatch):
    times = iter([10.0, 12.0, 15.0, 20.0])
    monkeypatch.setattr(peers.time, "perf_counter", lambda: next(times))
    clock = peers.Clock(limit=4.0)
    control = TrainerControl()
    clock.on_epoch_begin()
    clock.on_step_end(None, None, control)
    assert not control.should_training_stop
    clock.on_log(None, None, control, {"loss": 2.5})
    clock.on_step_end(None, None, control)
    assert (clock.steps, clock.seconds) == ([2.0, 3.0], 5.0)
    assert control.should_training_stop, "five seconds are more than the limit"
    clock.on_epoch_begin()
    clock.on_log(None, None, control, {"loss": 1.0})
    assert (clock.steps, clock.losses) == ([], [2.5])


class Adapted(torch.nn.Module):
    """A model with one adapted layer, whose names begin as a wrapper calls it."""

    def __init__(self, prefix, value):
        super().__init__()
        layer = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(1, 1), "base": torch.nn.Linear(1, 1)})
        self.add_module(prefix, torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}))
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, value)


def test_a_peer_gets_the_lora_of_our_model_and_nothing_else():
    peer = Adapted("inner", 1.0)
    values = peers.adapter_values(Adapted("model", 5.0))
    assert sorted(values) == ["layers.0.lora_A.bias", "layers.0.lora_A.weight"]
    peers.copy_into_adapter(peer, values)
    assert {name.split(".")[3]: value.item() for name, value in peer.named_parameters()} == {"lora_A": 5.0, "base": 1.0}


class Task:
    """A task of three rows, whose sampler reads the last one first."""

    train = tuple({"input_ids": [number], "labels": [-100], "length": 1} for number in range(3))

    def rows_per_step(self, processes):
        return processes

    def sampler(self, rows, per_step):
        return reversed(range(len(rows)))


def test_a_peer_reads_our_rows_in_our_order():
    rows = peers.rows_in_our_order(Task())
    assert [row["input_ids"] for row in rows] == [[2], [1], [0]]
    assert set(rows[0]) == {"input_ids", "labels"}


def test_a_peers_arguments_are_those_of_the_run_unless_a_setting_replaces_them():
    config = RunConfig(output_dir="runs/x", seed=5)
    config.train.batch_size = 3
    arguments = peers.arguments_of(config, logging_steps=7)
    assert (arguments["output_dir"], arguments["seed"], arguments["per_device_train_batch_size"]) == (
        "runs/x/peer",
        5,
        3,
    )
    assert (arguments["logging_steps"], arguments["warmup_steps"]) == (7, config.train.warmup_ratio)
