r"""Reinforcement learning of CIRAG's integrator, a trained student, inside its loop (an option beyond the papers).

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/grpo.py \
        --config recipes/configs/smollm2_135m_grpo_cpu.yaml

Its steps are those of `cirag_on_policy.py`.
"""

import sys

from tripletune.recipes.cirag_on_policy import run
from tripletune.train import main

if __name__ == "__main__":
    sys.exit(main("grpo", __doc__ or "", run=run))
