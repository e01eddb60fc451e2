r"""Distil CIRAG's teacher into a small integrator: LoRA on the teacher's trajectories (CIRAG, sections 3.5 and B.4).

    # two CPU cores, on trajectories of `tripletune build trajectories …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/cirag_distill.py \
        --config recipes/configs/smollm2_135m_cirag_cpu.yaml --data.train runs/cirag/trajectories

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/cirag_distill.py --config recipes/configs/qwen25_7b_cirag_paper.yaml

Options, dry run and resume are those of `ras_multitask.py`.
"""

import sys
from pathlib import Path

from tripletune.train import main
from tripletune.train.tasks.cirag_distill import StudentTask


def run(task: StudentTask, checkpoint: Path | None) -> None:
    """Rows -> model -> engine -> save."""
    from tripletune.train.engine import Engine

    model = task.open_model()
    # A trajectory is one sequence; only the teacher's decisions in it are learned.
    rows, validation = task.open_rows()
    # With `train.preference` it is TRL's trainer, else transformers' trainer with our data order.
    engine = task.trainer() or Engine(model, rows, task.collator(), task.config, validation=validation, task=task)
    engine.run(checkpoint)
    engine.save_result()


if __name__ == "__main__":
    sys.exit(main("cirag_distill", __doc__ or "", run=run))
