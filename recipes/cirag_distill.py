r"""Distil CIRAG's teacher into a small integrator (CIRAG, sections 3.5 and B.4): LoRA on its trajectories.

    # two CPU cores, on trajectories of `tripletune build trajectories …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/cirag_distill.py \
        --config recipes/configs/smollm2_135m_cirag_cpu.yaml --data.train runs/cirag/trajectories

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/cirag_distill.py --config recipes/configs/qwen25_7b_cirag_paper.yaml

Any field can be set on the command line (`--data.rounds separate`); `--dry-run` shows what would happen, with the
learned tokens of a trajectory. A run that was stopped continues when the same command is given again.
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    sys.exit(main("cirag_distill", __doc__ or ""))
