r"""Reinforcement learning of CIRAG's integrator inside its loop, from a distilled student (an option beyond the paper).

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/grpo.py \
        --config recipes/configs/smollm2_135m_grpo_cpu.yaml
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    sys.exit(main("grpo", __doc__ or ""))
