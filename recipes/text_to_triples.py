r"""Train a text-to-triples model, the f_t2t of RAS (sections 3.2 and D.1): a decoder or an encoder-decoder.

    # two CPU cores, on pairs of `tripletune build pairs …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/text_to_triples.py \
        --config recipes/configs/smollm2_135m_t2t_cpu.yaml --data.train runs/t2t_mixed

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/text_to_triples.py --config recipes/configs/flan_t5_large_t2t_paper_text.yaml

Any field can be set on the command line (`--train.learning_rate 3e-4`); `--dry-run` shows what would happen. A run
that was stopped continues when the same command is given again.
"""

import sys

from tripletune.train import main

if __name__ == "__main__":
    sys.exit(main("text_to_triples", __doc__ or ""))
