r"""Train the RAS Graph-LLM on planning and answering records (RAS, sections 3.4 and D.2).

    # two CPU cores, 6 to 13 minutes for 200 questions, on records of `tripletune build subq …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/ras_multitask.py \
        --config recipes/configs/smollm2_135m_ras_cpu.yaml --data.train runs/subq

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/ras_multitask.py --config recipes/configs/llama2_7b_ras_paper.yaml

Any field can be set on the command line (`--train.learning_rate 3e-4`). `--dry-run` shows the plan, the first row and
its loss mask. The same command continues a stopped run.
"""

import sys
from pathlib import Path

from tripletune.train import main
from tripletune.train.tasks.ras import GraphTask


def run(task: GraphTask, checkpoint: Path | None) -> None:
    """Rows -> model -> engine -> save."""
    from tripletune.train.engine import Engine

    # The language model has LoRA; graph encoder and projector are trained in full.
    model = task.open_model()
    # Prompt, label and graph of each record are tokenised once into the cache.
    rows, validation = task.open_rows()
    # The collator pads records, and batches their graphs with the vectors of node and edge texts.
    # With `train.preference` the trainer is TRL's, else transformers' with our data order.
    engine = task.trainer() or Engine(model, rows, task.collator(), task.config, validation=validation, task=task)
    engine.run(checkpoint)
    engine.save_result()


if __name__ == "__main__":
    sys.exit(main("ras", __doc__ or "", run=run))
