r"""Reinforcement learning of CIRAG's integrator, a trained student, inside its loop (an option beyond the papers).

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/grpo.py \
        --config recipes/configs/smollm2_135m_grpo_cpu.yaml
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    # Questions -> student -> TRL's trainer with the engine's order, logs and resume -> save: `train.fit`.
    sys.exit(main("grpo", __doc__ or ""))
