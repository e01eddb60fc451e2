r"""Train the RAS Graph-LLM on planning and answering records (RAS, sections 3.4 and D.2).

    # two CPU cores, 20 minutes for 200 questions, on records of `tripletune build subq …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/ras_multitask.py \
        --config recipes/configs/smollm2_135m_ras_cpu.yaml --data.train runs/subq

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/ras_multitask.py --config recipes/configs/llama2_7b_ras_paper.yaml

Any field can be set on the command line (`--train.learning_rate 3e-4`); `--dry-run` shows what would happen. A run
that was stopped continues when the same command is given again.
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    sys.exit(main("ras", __doc__ or ""))
