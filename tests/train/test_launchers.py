"""One process, DDP, ZeRO-2, ZeRO-3 and FSDP2 are one run: two processes on CPUs, in one start of Python."""

import importlib.util
import json
import os
import re
import shutil
import socket

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file

from tests.cli import read_lines
from tests.conftest import GRAPH_WIDTHS, RUN, _writer
from tests.recipes.command_lines import ROOT, run
from tests.train.launched import CHUNK, PART_BYTES, digest_of_replies
from tripletune.models.run_folders import weight_files
from tripletune.train import main, train
from tripletune.train.resume import check_same_run, save_run_settings

pytestmark = pytest.mark.slow
ACCELERATE = ROOT / "recipes" / "accelerate"
ZERO = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
# Runs of DDP begin where one process has saved, and one process goes on where they have.
WAYS = [
    "one_then_two", "two_then_one", "fsdp2", "fsdp2_all",
    *(pytest.param(way, marks=ZERO) for way in ("zero2", "zero3", "zero2_all")),
]  # fmt: skip
# Pairs of runs whose last step of an epoch has one pair or three instead of four.
EPOCH_ROWS = (9, 11)
# The same step on one process and on two.
HALF = {"train.batch_size": 1, "train.records_per_step": 4}


def environment(name):
    """The variables that `accelerate launch --config_file` sets, of those that say how to train."""
    args = launch_command_parser().parse_args(["--config_file", str(ACCELERATE / f"{name}.yaml"), "script.py"])
    args = _validate_launch_command(args)[0]
    args.deepspeed_fields_from_accelerate_config = ""
    found = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    kept = {"ACCELERATE_DYNAMO_BACKEND", "OMP_NUM_THREADS"}
    return {
        key: value
        for key, value in found.items()
        if key.startswith(("ACCELERATE_", "FSDP_")) and key not in kept and os.environ.get(key) != value
    }


def words(values):
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_t5, tiny_encoder, records, extraction_pairs):
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("launchers")
    write = _writer(folder)
    write(records, "train", folder / "records")
    # Three evaluation batches of short and long labels for two processes.
    write(records[5:10], "validation", folder / "records")
    write(extraction_pairs, "train", folder / "pairs")
    write(extraction_pairs[:5], "validation", folder / "pairs")
    # Validation data would take their texts away.
    write(extraction_pairs, "train", folder / "only_pairs")
    shared = RUN | {"model.lora_dropout": 0.0, "train.save_total_limit": "none", "train.eval_batch_size": 2}
    ras = shared | {f"model.{name}": width for name, width in GRAPH_WIDTHS.items()} | {
        "model.base": tiny_llama, "model.encoder": tiny_encoder, "model.graph_dropout": 0.0,
        "data.train": folder / "records", "train.max_steps": 4, "train.save_steps": 1, "train.eval_steps": 2,
        "train.loss_per": "record", "train.answer_weight": 2.0,
    }  # fmt: skip
    pairs = shared | {
        "model.base": tiny_t5, "model.lora_rank": 4, "data.train": folder / "pairs", "train.max_steps": 2,
        "train.batch_size": 2, "train.gradient_accumulation": 2, "train.eval_generate_records": 0,
    }  # fmt: skip

    rows = [{"prompt": f"Who wrote book {n}?", "chosen": f"Ada {n}", "rejected": f"No one {n % 3}"} for n in range(9)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The last step of an epoch has one pair, so one of two processes has none.
    preference = shared | {
        "model.base": tiny_llama, "data.train": folder / "chats.jsonl", "data.max_tokens": 200,
        "train.preference": "sigmoid", "train.epochs": 2, "train.max_steps": "none",
        "train.gradient_accumulation": 1, "train.eval_generate_records": 0, "train.batch_size": 4,
    }  # fmt: skip
    settings = {"ras": ras, "text_to_triples": pairs, "chat": preference}

    def job(name, launcher=None, task="ras", copy="", step=0):
        # Of a copy what was done after a step is done again.
        if copy:
            later = shutil.ignore_patterns("final", *(f"checkpoint-{at}" for at in (2, 3, 4) if at > step))
            shutil.copytree(folder / copy, folder / name, ignore=later)
        more = {"output_dir": folder / name} | (
            (HALF if task == "ras" else {"train.batch_size": 1}) if launcher else {}
        )
        if task == "chat" and launcher:
            more["train.batch_size"] = 2
        if task == "text_to_triples" and name.startswith("epochs"):
            count = name.split("_")[1]
            more |= {
                "data.train": folder / "only_pairs",
                "train.max_steps": "none",
                "train.epochs": 2,
                "data.max_train_records": count,
            }
            more |= {"train.gradient_accumulation": 1, "train.batch_size": 2 if launcher else 4}
        if name.endswith("all"):
            more |= {"model.tune": "all", "train.learning_rate": 3e-3}
            more |= {"train.loss_per": "token", "train.answer_weight": 1.0}
        return [environment(launcher) if launcher else {}, task, words(settings[task] | more)]

    epochs = [job(f"epochs_{count}_one", task="text_to_triples") for count in EPOCH_ROWS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tripletune.eval.suites.records.score_predictions", digest_of_replies)
        patch.setattr("tripletune.core.data.jsonl.PART_BYTES", PART_BYTES)
        patch.setattr("tripletune.models.graph_llm.embeddings.CHUNK", CHUNK)
        alone = [job("one"), job("one_all"), job("one_t5", task="text_to_triples"), job("preference_one", task="chat")]
        for _, task, line in (*alone, *epochs):
            assert main(task, argv=line) == 0
        jobs = [job("one_then_two", "ddp", copy="one", step=1), job("t5", "ddp", "text_to_triples")]
        jobs += [job(f"epochs_{count}_two", "ddp", "text_to_triples") for count in EPOCH_ROWS]
        jobs.append(job("preference_two", "ddp", "chat"))
        ways = ["fsdp2", *(["zero2", "zero3"] if importlib.util.find_spec("deepspeed") else [])]
        for way in ways:
            # What is loaded behind ZeRO-3 in the same process is divided at once: it comes last.
            jobs += [job(way, way), *([job(f"{way}_all", way)] if way != "zero3" else [])]
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = found.getsockname()[1]
        done = run(["-m", "tests.train.launched", str(port), json.dumps(jobs, default=str)])
        (folder / "log").write_text(done.stderr)
        assert done.returncode == 0, [line for line in done.stderr.splitlines() if "Error" in line or "error:" in line]
        assert main("ras", argv=job("two_then_one", copy="one_then_two", step=3)[2]) == 0
    return folder


def lines(folder, name, key="loss"):
    return [line[key] for line in read_lines(folder / name)]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_is_the_run_of_one_process(way, folder):
    one, other = folder / ("one_all" if way.endswith("all") else "one"), folder / way
    assert lines(other, "losses.jsonl") == pytest.approx(lines(one, "losses.jsonl"), rel=1e-5)
    assert lines(other, "evaluations.jsonl") == pytest.approx(lines(one, "evaluations.jsonl"), rel=1e-5)
    for part in ("loss_planning", "loss_answering"):
        assert lines(other, "evaluations.jsonl", part) == pytest.approx(lines(one, "evaluations.jsonl", part), rel=1e-5)
    assert lines(other, "evaluations.jsonl", "replies") == lines(one, "evaluations.jsonl", "replies")
    assert len(set(lines(one, "evaluations.jsonl", "replies"))) == 2, "training changes the replies"
    weights = [load_file(weight_files(path / "final")[0]) for path in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-4


def test_two_processes_make_the_rows_and_embeddings_of_one(folder):
    one, two = ({path.relative_to(folder / name / "cache"): path.read_bytes() for ending in ("arrow", "npy")
                 for path in (folder / name / "cache").rglob(f"*.{ending}")} for name in ("one", "fsdp2"))  # fmt: skip
    assert len(one) == 5
    assert one == two


def test_the_log_names_the_wrapper_in_use(folder):
    found = re.findall(r"the module in training is an? (\w+)", (folder / "log").read_text())
    expected = ["DistributedDataParallel"] * 5 + ["FSDPPeftModel", "FSDPGraphLLM"]
    assert found == expected + ["DeepSpeedEngine"] * (len(found) - len(expected))


def test_an_encoder_decoder_trains_alike_on_two_processes(folder):
    for file in ("losses.jsonl", "evaluations.jsonl"):
        assert lines(folder / "t5", file) == pytest.approx(lines(folder / "one_t5", file), rel=1e-4)


@pytest.mark.parametrize("count", EPOCH_ROWS)
def test_no_row_counts_twice_in_the_last_step_of_an_epoch(count, folder):
    one = lines(folder / f"epochs_{count}_one", "losses.jsonl")
    assert len(one) == 6
    assert lines(folder / f"epochs_{count}_two", "losses.jsonl") == pytest.approx(one, rel=1e-5)


def test_pairs_of_replies_train_alike_on_two_processes(folder):
    one = lines(folder / "preference_one", "losses.jsonl")
    assert len(one) == 6
    assert len(set(one)) > 3
    assert lines(folder / "preference_two", "losses.jsonl") == pytest.approx(one, rel=1e-5)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (FSDP | {"FSDP_VERSION": "1"}, "the launcher.s fsdp_version is 1, but must be 2"),
        (FSDP | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, "the result would hold no weights"),
        # One process on a CPU, and accelerate says nothing.
        (FSDP, "the launcher's settings ask for FSDP2, but the module in training is a PeftModel on 1 process"),
    ],
)
def test_what_would_train_in_another_way_is_refused(variables, message, make_task, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        train(make_task("ras"))


def test_a_run_continues_as_it_was_saved(make_task, monkeypatch):
    task = make_task("ras")
    save_run_settings(task.config, task.digest)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(ValueError, match=r"with DDP or one process on 1 process\(es\), and this run uses ZeRO-3 on 1"):
        check_same_run(task.config, task.digest)
