r"""Distil a teacher on this machine into CIRAG's integrator on the student's own replies (an option beyond the paper).

    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/cirag_on_policy.py \
        --config recipes/configs/smollm2_135m_cirag_cpu.yaml --data.train runs/cirag/trajectories --train.teacher SPEC

It has the settings of `cirag_distill.py` and some more under `train`; the teacher must share the student's vocabulary.
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    # Prompts -> student and teacher -> TRL's trainer with the engine's order, logs and resume -> save: `train.fit`.
    sys.exit(main("cirag_on_policy", __doc__ or ""))
