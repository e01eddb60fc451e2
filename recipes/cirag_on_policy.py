r"""Distil a teacher into CIRAG's integrator on the student's own replies (an option beyond the paper).

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/cirag_on_policy.py \
        --config recipes/configs/smollm2_135m_cirag_cpu.yaml --data.train runs/cirag/trajectories --train.teacher SPEC

The settings are those of `cirag_distill.py` and more under `train`. The teacher may be of another family, or on a
server (docs/guide/cirag.md).
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    # The steps are those of `train.fit`; the trainer is TRL's, with the engine's data order, logs and resume.
    sys.exit(main("cirag_on_policy", __doc__ or ""))
