r"""Reinforcement learning of CIRAG's integrator, a trained student, inside its loop (an option beyond the papers).

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/grpo.py \
        --config recipes/configs/smollm2_135m_grpo_cpu.yaml
"""

import sys
from pathlib import Path

from tripletune.train import main
from tripletune.train.tasks.grpo import GrpoTask


def run(task: GrpoTask, checkpoint: Path | None) -> None:
    """Questions -> student -> TRL's trainer with the engine's order, logs and resume -> save."""
    from tripletune.train.trl_trainers import GrpoTrainer

    task.begin()
    engine = GrpoTrainer(task)
    engine.run(checkpoint)
    engine.save_result()


if __name__ == "__main__":
    sys.exit(main("grpo", __doc__ or "", run=run))
