r"""Train a decoder or an encoder-decoder to write the triples of a text, the f_t2t of RAS (sections 3.2 and D.1).

    # two CPU cores, on pairs of `tripletune build pairs …`
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/text_to_triples.py \
        --config recipes/configs/smollm2_135m_t2t_cpu.yaml --data.train runs/t2t_mixed

    # GPUs, the paper's settings
    accelerate launch --quiet recipes/text_to_triples.py --config recipes/configs/flan_t5_large_t2t_paper_text.yaml

Options, dry run and resume are those of `ras_multitask.py`.
"""

import sys
from pathlib import Path

from tripletune.train import main
from tripletune.train.tasks.text_to_triples import PairTask


def run(task: PairTask, checkpoint: Path | None) -> None:
    """Rows -> model -> engine -> save."""
    from tripletune.train.engine import Engine

    model = task.open_model()
    # A decoder's rows are extraction's chats with labels at the triples; an encoder-decoder's are source and target.
    rows, validation = task.open_rows()
    engine = Engine(model, rows, task.collator(), task.config, validation=validation, task=task)
    engine.run(checkpoint)
    engine.save_result()


if __name__ == "__main__":
    sys.exit(main("text_to_triples", __doc__ or "", run=run))
