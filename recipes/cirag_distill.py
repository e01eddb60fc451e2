"""Distil CIRAG's teacher into a small integrator (CIRAG, sections 3.5 and B.4): LoRA on its trajectories.

    # two CPU cores, on trajectories of `tripletune build trajectories …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/cirag_distill.py \
        --config recipes/configs/smollm2_135m_cirag_cpu.yaml --data.train runs/cirag/trajectories

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/cirag_distill.py --config recipes/configs/qwen25_7b_cirag_paper.yaml

Any field can be set on the command line (`--data.rounds separate`); `--dry-run` shows what would happen, with the
learned tokens of a trajectory. A run that was stopped, by whatever means, goes on when the same command is given again.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from tripletune.train.config import ConfigError, parse_command_line
from tripletune.train.distill_config import DistillConfig


def main(config: DistillConfig, dry_run: bool = False) -> None:
    """Data, model, trainer, save."""
    from tripletune.train.distill_data import check_trajectories, load_trajectories, teachers
    from tripletune.train.text_dry_run import text_report
    from tripletune.train.text_run import (
        checkpoint_to_go_on_from,
        load_text_model,
        save_text_result,
        set_up_process,
        train_to_the_end,
    )

    state = set_up_process()
    digest = check_trajectories(config)
    # Before the model is loaded, and before anything of an earlier start is written over.
    checkpoint = None if dry_run else checkpoint_to_go_on_from(config, digest)
    model, tokenizer = load_text_model(config)
    # The first process tokenises; the others find the files when it is done.
    with state.main_process_first():
        data = load_trajectories(config, model, tokenizer)
    if data.counts["train"].get("shortened_prompts"):
        logging.warning("some prompts were shortened: run the loop with max_prompt_tokens=%d", config.data.prompt_limit)
    if left_out := data.counts["train"].get("rounds_too_long"):
        rounds = data.counts["train"]["rounds"]
        logging.warning("%d of %d rounds do not fit into data.max_tokens and are left out", left_out, rounds)
    if dry_run:
        if state.is_main_process:
            print(text_report(config, model, tokenizer, data.train, data.validation))
        return

    trainer = _trainer(config, model, tokenizer, data)
    metrics, seconds = train_to_the_end(trainer, checkpoint, digest)
    found = teachers(data.counts["train"])
    folder = save_text_result(trainer, config, data.digests, metrics, seconds, tokenised=data.counts, teachers=found)
    logging.info("trained for %d s; the student is in %s", seconds, folder)
    for name in sorted(metrics):
        logging.info("%s = %.4g", name, metrics[name])


def _trainer(config: DistillConfig, model: Any, tokenizer: Any, data: Any) -> Any:
    from tripletune.train.distill_data import shared_prompt

    about = {
        "task": "cirag.integrate",
        "base_model": config.model.base,
        "base_revision": config.model.revision,
        "method": config.train.method,
        "max_prompt_tokens": config.data.prompt_limit,
    }
    files = {"student.json": json.dumps(about, indent=2) + "\n"}
    if prompt := shared_prompt(config):
        files["prompt.md"] = prompt + "\n"
    else:
        logging.warning("the trajectories do not have one system prompt in common, so none is saved with the student")
    rest = (config, tokenizer, data.train, data.validation, data.scorer, files)
    if config.train.method == "on_policy":
        from tripletune.train.text_rows import trl_pack_dataset

        trl_pack_dataset()  # says in a sentence what is missing
        from tripletune.train.on_policy import OnPolicyTrainer
        from tripletune.train.teacher import check_same_width, load_teacher

        teacher = load_teacher(config, tokenizer)
        check_same_width(model, teacher)
        return OnPolicyTrainer(model, teacher, *rest)
    from tripletune.train.text_engine import make_trainer

    return make_trainer(model, *rest)


if __name__ == "__main__":
    try:
        main(*parse_command_line(DistillConfig, __doc__ or ""))
    except (ConfigError, OSError, ValueError, ImportError) as error:
        logging.debug("details", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the newest checkpoint", file=sys.stderr)
        sys.exit(130)
