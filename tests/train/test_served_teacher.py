"""A teacher on a server: what is asked, what is read, what is refused, and a run whose ledger keeps the scores."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli import read_lines
from tests.llm.server import MockServer, Reply
from tripletune.core.calls import SetupError
from tripletune.train import train
from tripletune.train.trl_trainers.other_family import sampled_divergence
from tripletune.train.trl_trainers.served_teacher import ServedTeacher

pytest.importorskip("aiohttp")


class Scorer:
    """vLLM's completions endpoint on a tiny model: with `echo`, the log-probabilities of the prompt and one token."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def log_probs(self, ids):
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [float(logits[place, token]) for place, token in enumerate(ids[1:])]

    def __call__(self, body):
        assert (body["model"], body["echo"], body["logprobs"], body["max_tokens"]) == ("teacher", True, 1, 1)
        ids = body["prompt"]
        texts = [self.tokenizer.decode([token]) for token in [*ids, 9]]
        scores = {"tokens": texts, "token_logprobs": [None, *self.log_probs(ids), -0.5]}
        return Reply(raw=json.dumps({"choices": [{"text": "".join(texts), "logprobs": scores}]}))


@pytest.fixture
def scorer(other_family):
    return Scorer(other_family)


def served(server, folder, tokenizer):
    return ServedTeacher("teacher", server.url, folder, tokenizer)


def test_the_scores_are_those_of_the_reply(scorer, tmp_path):
    prompts, replies = [[2, 8, 9], [2, 30]], [[20, 21, 4], [40, 4]]
    expected = [scorer.log_probs([2, 8, 9, 20, 21, 4])[2:], scorer.log_probs([2, 30, 40, 4])[1:]]
    with MockServer(scorer) as server:
        teacher = served(server, tmp_path, scorer.tokenizer)
        found = teacher.score(prompts, replies)
        again = teacher.score(prompts, replies)
    assert found == [pytest.approx(expected[0]), pytest.approx(expected[1])]
    assert again == found
    assert len(server.bodies) == 2, "the second time the ledger answers"


def test_several_servers_share_the_replies(scorer, tmp_path):
    with MockServer(scorer, delay=0.05) as one, MockServer(scorer, delay=0.05) as other:
        teacher = ServedTeacher("teacher", f"{one.url}, {other.url}", tmp_path, scorer.tokenizer)
        found = teacher.score([[2, 8]] * 4, [[token, 4] for token in range(20, 24)])
        assert (len(one.bodies), len(other.bodies)) == (2, 2)
    assert found[3] == pytest.approx(scorer.log_probs([2, 8, 23, 4])[1:])


def without_echo(body):
    """What llama.cpp's server sends: the log-probability of the one token that it wrote."""
    scores = {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": []}]}
    return Reply(raw=json.dumps({"choices": [{"text": "a", "logprobs": scores}]}))


def test_a_server_without_scores_of_prompts_is_refused(scorer, tmp_path):
    with MockServer(without_echo) as server:
        teacher = served(server, tmp_path, scorer.tokenizer)
        with pytest.raises(SetupError, match="gave log-probabilities of 0 of 3 prompt tokens; serve the teacher with"):
            teacher.score([[2, 8]], [[9, 4]])
    # Nothing wrong is kept: the right server is asked again.
    with MockServer(scorer) as server:
        assert len(served(server, tmp_path, scorer.tokenizer).score([[2, 8]], [[9, 4]])[0]) == 2


def test_a_server_with_another_tokenizer_is_refused(scorer, tokenizer, tmp_path):
    ids = tokenizer("Who is Ada Lovelace?")["input_ids"]
    with (
        MockServer(scorer) as server,
        pytest.raises(SetupError, match=r"has another tokenizer than train\.teacher_tokenizer"),
    ):
        served(server, tmp_path, tokenizer).score([ids[:2]], [ids[2:]])


def test_a_prompt_that_is_too_long_is_counted(scorer, tmp_path):
    def reply(body):
        if len(body["prompt"]) > 3:
            return Reply(status=400, message="maximum context length is 3 tokens")
        return scorer(body)

    with MockServer(reply) as server:
        teacher = served(server, tmp_path, scorer.tokenizer)
        assert [scores is None for scores in teacher.score([[2, 8], [2]], [[9, 4], [9, 4]])] == [True, False]


def test_a_run_and_its_continuation(scorer, make_task, other_family, tmp_path, killed_behind):
    def settings(name, url):
        return {
            "output_dir": str(tmp_path / name), "train.teacher": f"openai:teacher@{url}",
            "train.teacher_tokenizer": str(other_family), "train.gradient_accumulation": 1, "train.max_steps": 3,
            "train.save_steps": 2, "train.max_reply_tokens": 12,
        }  # fmt: skip

    with MockServer(scorer) as server:
        train(make_task("cirag_on_policy", settings("whole", server.url)))
        asked = len(server.bodies)
        with killed_behind(3):
            train(make_task("cirag_on_policy", settings("parts", server.url)))
        before = len(server.bodies)
        train(make_task("cirag_on_policy", settings("parts", server.url)))
    # The third step was scored before the kill; the last evaluation was not.
    assert before - asked < asked
    assert len(server.bodies) - before < asked
    for name in ("losses.jsonl", "rewards.jsonl"):
        assert read_lines(tmp_path / "parts" / name, "seconds") == read_lines(tmp_path / "whole" / name, "seconds")


def test_every_span_is_estimated_by_what_was_written(scorer, begin_task, other_family, monkeypatch):
    with MockServer(scorer) as server:
        settings = {
            "train.teacher": f"openai:teacher@{server.url}", "train.teacher_tokenizer": str(other_family),
            "model.lora_dropout": 0.0,
        }  # fmt: skip
        task = begin_task("cirag_on_policy", settings)
        trainer = task.trainer()
        ids = [*task.processor("Ada Lovelace was born in")["input_ids"], task.processor.eos_token_id]
        monkeypatch.setattr(trainer, "_generate_single_turn", lambda prompts, *_, **__: [ids for _ in prompts])
        inputs = trainer._generate_and_score_completions([{"prompt": [5, 6], "teacher_prompt": [2, 8, 9]}])
    loss, _, _ = trainer._compute_loss(trainer.model, inputs, torch.tensor(1.0))
    aligned = inputs["teacher"][0].aligned
    with torch.no_grad():
        logits = trainer.model(torch.tensor([[5, 6, *ids]])).logits[0, 1:-1].log_softmax(-1)
    student = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    teacher = torch.tensor(scorer.log_probs([2, 8, 9, *aligned.teacher_ids])[2:])
    assert len(aligned.spans) > 3
    assert float(loss) == pytest.approx(float(sampled_divergence(student, teacher, aligned.spans)), rel=1e-4)
