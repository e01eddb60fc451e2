r"""Train a text-to-triples model, the f_t2t of RAS (sections 3.2 and D.1): a decoder or an encoder-decoder.

    # two CPU cores, on pairs of `tripletune build pairs …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/text_to_triples.py \
        --config recipes/configs/smollm2_135m_t2t_cpu.yaml --data.train runs/t2t_mixed

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/text_to_triples.py --config recipes/configs/flan_t5_large_t2t_paper_text.yaml

A pair is the chat that extraction uses, of which the triples are learned; of an encoder-decoder source and target.
Steps, options, dry run and resume: see `ras_multitask.py`.
"""

import sys

from tripletune.recipes.ras_multitask import run
from tripletune.train import main

if __name__ == "__main__":
    sys.exit(main("text_to_triples", __doc__ or "", run=run))
