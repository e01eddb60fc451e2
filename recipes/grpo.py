r"""Reinforcement learning of a trained student inside its loop: CIRAG's integrator, or a Graph-LLM in RAS.

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/grpo.py \
        --config recipes/configs/smollm2_135m_grpo_cpu.yaml

An option beyond the papers; `smollm2_135m_ras_grpo_cpu.yaml` is for the Graph-LLM.
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    sys.exit(main("grpo", __doc__ or ""))
