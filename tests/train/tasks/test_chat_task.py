"""Training on plain chats: its words are those of chats, and the loss mask is what `data.learn` says."""

import json

import pytest

from tests.cli import run, write_lines
from tripletune.core.config import load_config
from tripletune.train.tasks.chat import ChatConfig

CHATS = [
    {"messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": "First."}, {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Second."}, {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "Not learned.", "weight": 0}]}
    for number in range(10)
]  # fmt: skip


@pytest.fixture
def words(tmp_path, tiny_llama):
    """The command line of a run on chats."""
    write_lines(tmp_path / "chats.jsonl", CHATS)
    found = ["--data.train", tmp_path / "chats.jsonl", "--model.base", tiny_llama, "--output_dir", tmp_path / "run"]
    return ["chat", *found, "--train.max_steps", 1, "--train.bf16", "false", "--data.validation_share", 0.2]


@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        ("replies", ["First.<|im_end|>", "Second.<|im_end|>"]),
        ("last", ["Second.<|im_end|>"]),
        ("everything", ["Be brief.<|im_end|>", "Question N?<|im_end|>", "First.<|im_end|>", "And then?<|im_end|>",
                        "Second.<|im_end|>"]),
    ],
)  # fmt: skip
def test_what_is_learned(learn, expected, words):
    ran = run("train", *words, "--data.learn", learn, "--data.max_tokens", 512, "--dry-run")
    assert ran.code == 0, ran.err
    shown = ran.out.partition("learned tokens between ⟦ and ⟧")[2]
    learned = [piece.partition("⟧")[0] for piece in shown.split("⟦")[1:]]
    assert [text.translate(str.maketrans("0123456789", "N" * 10)) for text in learned] == expected
    replies = 8 if learn == "last" else 16
    assert f"chats 8, replies {replies}, left out as validation data 2" in ran.out
    output = ran.out.replace(str(words[2].parent), "").lower()
    for word in ("trajector", "the paper", "custom", "candidates", "max_prompt_tokens"):
        assert word not in output, word


def test_replies_that_are_too_long_are_counted_as_replies(words):
    ran = run("train", *words, "--data.max_tokens", 50, "--dry-run")
    assert "8 of 16 replies do not fit into data.max_tokens and are left out" in ran.err
    assert "replies too long" in ran.out


def test_result_and_card_are_those_of_a_chat_model(words, tmp_path):
    assert run("train", *words).code == 0
    final = tmp_path / "run" / "final"
    assert "teachers" not in json.loads((final / "training.json").read_text())
    ran = run("checkpoints", "export", tmp_path / "run", "--output", tmp_path / "export")
    assert ran.code == 0, ran.err
    card = (tmp_path / "export" / "README.md").read_text()
    assert "# Chat model: export" in card
    assert "- chat\n" in card
    for word in ("knowledge-graph", "retrieval-augmented", "trajector", "custom"):
        assert word not in card, word
    assert (tmp_path / "export" / "prompt.md").read_text() == "Be brief.\n"


def test_defaults_are_no_papers():
    config = load_config(ChatConfig, None, {"data.max_tokens": "512"})
    assert (config.model.lora_rank, config.train.learning_rate, config.data.learn) == (16, 2e-4, "replies")


def test_a_metric_that_no_evaluation_has_is_refused_by_the_dry_run(words):
    best = ["--train.best_metric", "losses", "--train.eval_steps", 1, "--data.max_tokens", 512]
    ran = run("train", *words, *best, "--dry-run")
    assert ran.code == 2
    assert "train.best_metric: 'losses' is not one of loss, f1, exact_match (did you mean loss?)" in ran.error
