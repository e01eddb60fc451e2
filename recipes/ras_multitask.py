"""Train the RAS Graph-LLM on planning and answering records (RAS, sections 3.4 and D.2).

    # two CPU cores, 20 minutes for 200 questions, on records of `tripletune data …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/ras_multitask.py \
        --config recipes/configs/smollm2_135m_ras_cpu.yaml --data.train runs/subq

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/ras_multitask.py --config recipes/configs/llama2_7b_ras_paper.yaml

Any field can be set on the command line (`--train.learning_rate 3e-4`); `--dry-run` shows what would happen. A run
that was stopped, by whatever means, goes on when the same command is given again.
"""

from __future__ import annotations

import logging
import sys

from tripletune.train.config import ConfigError, RunConfig, parse_command_line


def main(config: RunConfig, dry_run: bool = False) -> None:
    """Data, model, trainer, save."""
    from accelerate import DistributedType, PartialState
    from transformers.utils import logging as transformers_logging

    from tripletune.train.dry_run import report
    from tripletune.train.engine import GraphLLMTrainer, newest_checkpoint
    from tripletune.train.run import check_inputs, load_data, load_model, save_result, sources
    from tripletune.train.same_run import check_same_run
    from tripletune.train.tracking import check_tracking

    state = PartialState(cpu=not _has_gpu())
    quiet = logging.WARNING if not state.is_main_process else logging.INFO
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=quiet, force=True)
    for name in ("httpx", "sentence_transformers", "datasets", "accelerate"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    how = "" if state.distributed_type is DistributedType.NO else f", {state.distributed_type.value}"
    logging.info("%d process(es) on %s%s", state.num_processes, state.device, how)

    check_inputs(config)
    if state.is_main_process and not dry_run:
        check_tracking(config.report_to)
    data_digest = sources(config)[0].digest()
    checkpoint = newest_checkpoint(config.output_dir) if config.resume else None
    if checkpoint is not None and not dry_run:
        # Before the model is loaded, and before anything of the earlier start is written over.
        check_same_run(config, data_digest)
    model, processor = load_model(config)
    # The first process tokenises and embeds; the others find the files when it is done.
    with state.main_process_first():
        data = load_data(config, processor)
    if dry_run:
        if state.is_main_process:
            print(report(config, model, processor, data))
        return

    trainer = GraphLLMTrainer(
        model, config, processor, data.table, data.train, data.validation, data.validation_records
    )
    if checkpoint is not None:
        logging.info("going on from %s", checkpoint)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    logging.info("training %s parameters on %d records", f"{trained:,}", len(data.train))

    seconds = trainer.train_as_run(checkpoint, data_digest)
    metrics = trainer.evaluate() if data.validation is not None else {}
    folder = save_result(trainer, config, data, metrics, seconds)
    logging.info("trained for %d s; the result is in %s", seconds, folder)
    for name in sorted(metrics):
        logging.info("%s = %.4g", name, metrics[name])


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    try:
        main(*parse_command_line(RunConfig, __doc__ or ""))
    except (ConfigError, OSError, ValueError) as error:
        logging.debug("details", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the newest checkpoint", file=sys.stderr)
        sys.exit(130)
