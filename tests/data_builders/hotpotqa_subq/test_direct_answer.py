import json

import pytest

from tripletune.data_builders.hotpotqa_subq.direct_answer import (
    DirectAnswerTest,
    first_line,
    is_correct,
    read_answers,
    store_answers,
)


class FakeTest(DirectAnswerTest):
    """Answers with the question itself and remembers the batches."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__("fake/model", batch_size=2)
        self.batches: list[list[str]] = []
        self.fail_at = fail_at

    def answer(self, questions):
        if self.fail_at == len(self.batches):
            raise KeyboardInterrupt
        self.batches.append(list(questions))
        return [f"re {question}" for question in questions]


QUESTIONS = [(f"id{n}", f"q{n}") for n in range(5)]


def test_killed_pass_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        store_answers(QUESTIONS, FakeTest(fail_at=1), path)
    with path.open("a") as file:
        file.write('{"question_id": "id2", "ans')
    second = FakeTest()
    assert store_answers(QUESTIONS, second, path) == 3
    assert second.batches == [["q2", "q3"], ["q4"]]
    assert read_answers(path) == {f"id{n}": f"re q{n}" for n in range(5)}
    assert store_answers(QUESTIONS, FakeTest(fail_at=0), path) == 0


def test_last_line_without_line_break_is_kept(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"question_id": "id0", "answer": "kept"}))
    store_answers(QUESTIONS[:2], FakeTest(), path)
    assert read_answers(path) == {"id0": "kept", "id1": "re q1"}


def test_answers_of_another_model_are_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"question_id": "id0", "answer": "x", "model": "other/model"}) + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl:1: this answer is from model 'other/model'"):
        store_answers(QUESTIONS, FakeTest(), path)
    assert read_answers(path) == {"id0": "x"}


def test_row_without_answer_is_named(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"question_id": "id0"}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl:1: a direct answer needs"):
        read_answers(path)


def test_answer_is_cut_at_the_line_break_and_compared_normalised():
    assert first_line("\n The Nile. \nQuestion: Which") == "The Nile."
    assert first_line("") == ""
    assert is_correct("The Nile.", ["Amazon", "nile"])
    assert not is_correct("Nile river", ["nile"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch_size": 0}, "batch_size is 0"), ({"max_new_tokens": 0}, "max_new_tokens is 0"), ({"prompt": "x"}, "no {")],
)
def test_unusable_options(options, message):
    with pytest.raises(ValueError, match=message):
        DirectAnswerTest("fake/model", **options)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = ["<pad>", "<unk>", *"abcdefghijklmnopqrstuvwxyzAQW:.,?"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_answers_do_not_depend_on_the_batch(tiny_model, monkeypatch):
    import torch

    from tripletune.models import loading as sources

    monkeypatch.setattr(sources, "best_dtype", lambda: torch.float32)
    questions = ["who is it?", "w", "a much longer question, where and when and why?"]
    one = DirectAnswerTest(tiny_model, batch_size=1, max_new_tokens=5).answer(questions)
    assert DirectAnswerTest(tiny_model, batch_size=3, max_new_tokens=5).answer(questions) == one
    assert all(one)


def test_answers_are_looked_up_in_their_file(tmp_path):
    path = tmp_path / "answers.jsonl"
    assert store_answers([*QUESTIONS[:2], QUESTIONS[0]], FakeTest(), path) == 2
    answers = read_answers(path, FakeTest().model_spec)
    assert len(answers) == 2
    assert list(answers) == ["id0", "id1"]
    assert "id1" in answers
    assert "id2" not in answers
    with pytest.raises(KeyError):
        answers["id2"]
