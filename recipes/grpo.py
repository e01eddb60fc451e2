r"""Train CIRAG's integrator by reinforcement learning in its loop, from a trained student (beyond the papers).

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/grpo.py \
        --config recipes/configs/smollm2_135m_grpo_cpu.yaml
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    # The steps are those of `train.fit`; the trainer is TRL's, with the engine's data order, logs and resume.
    sys.exit(main("grpo", __doc__ or ""))
