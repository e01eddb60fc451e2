r"""Reinforcement learning of CIRAG's integrator, a trained student, inside its loop (an option beyond the papers).

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/grpo.py \
        --config recipes/configs/smollm2_135m_grpo_cpu.yaml
"""

import sys

from tripletune.train import main

# The steps are those of `train.fit`, with the task's own trainer.
if __name__ == "__main__":
    sys.exit(main("grpo", __doc__ or ""))
