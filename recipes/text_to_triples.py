"""Train a text-to-triples model, the f_t2t of RAS (sections 3.2 and D.1): a decoder or an encoder-decoder.

    # two CPU cores, on pairs of `tripletune build pairs …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/text_to_triples.py \
        --config recipes/configs/smollm2_135m_t2t_cpu.yaml --data.train runs/t2t_mixed

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/text_to_triples.py --config recipes/configs/flan_t5_large_t2t_paper_text.yaml

Any field can be set on the command line (`--train.learning_rate 3e-4`); `--dry-run` shows what would happen. A run
that was stopped, by whatever means, goes on when the same command is given again.
"""

from __future__ import annotations

import logging
import sys

from tripletune.train.config import ConfigError, parse_command_line
from tripletune.train.extraction_config import ExtractionConfig


def main(config: ExtractionConfig, dry_run: bool = False) -> None:
    """Data, model, trainer, save."""
    from tripletune.train.extraction_run import check_pairs, load_pairs, model_files
    from tripletune.train.text_dry_run import text_report
    from tripletune.train.text_engine import make_trainer
    from tripletune.train.text_run import (
        checkpoint_to_go_on_from,
        load_text_model,
        save_text_result,
        set_up_process,
        train_to_the_end,
    )

    state = set_up_process()
    digest = check_pairs(config)
    # Before the model is loaded, and before anything of an earlier start is written over.
    checkpoint = None if dry_run else checkpoint_to_go_on_from(config, digest)
    model, tokenizer = load_text_model(config)
    # The first process tokenises; the others find the files when it is done.
    with state.main_process_first():
        data = load_pairs(config, model, tokenizer)
    if dry_run:
        if state.is_main_process:
            print(text_report(config, model, tokenizer, data.train, data.validation))
        return

    trainer = make_trainer(
        model, config, tokenizer, data.train, data.validation, data.scorer, model_files(config, model)
    )
    metrics, seconds = train_to_the_end(trainer, checkpoint, digest)
    folder = save_text_result(trainer, config, data.digests, metrics, seconds, tokenised=data.counts)
    logging.info("trained for %d s; the result is in %s", seconds, folder)
    for name in sorted(metrics):
        logging.info("%s = %.4g", name, metrics[name])


if __name__ == "__main__":
    try:
        main(*parse_command_line(ExtractionConfig, __doc__ or ""))
    except (ConfigError, OSError, ValueError, ModuleNotFoundError) as error:
        logging.debug("details", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the newest checkpoint", file=sys.stderr)
        sys.exit(130)
