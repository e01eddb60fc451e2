"""Reinforcement learning in the loop: what a row holds, rewards, which runs the divergence counts in, exact resume."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from trl import GRPOTrainer

from tests.cli import read_lines
from tripletune.core.calls import CallError
from tripletune.core.config import load_config
from tripletune.core.data.triples import Triple
from tripletune.core.options import ConfigError
from tripletune.core.sqlite import UnusableFile
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval.suites.questions import QuestionSuite
from tripletune.models.loading import load_causal_lm
from tripletune.models.local.chat import ChatEncoder
from tripletune.rag.systems.cirag.integration import Decision, Round, decision_text, messages_of
from tripletune.train import train
from tripletune.train.tasks.grpo import GrpoConfig, GrpoTask, load_teacher
from tripletune.train.trl_trainers import grpo

FACTS = (Triple("Ada", "saw", "Kelm"), Triple("Bo", "saw", "Ada"))
FIRST, LAST = Decision("One.", FACTS[:1], "Who is Bo?"), Decision("All.", FACTS[1:], "")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_world(WorldOptions(seed=5, train=0, validation=0, test=5, common_knowledge=0), folder)
    (folder / "prompts").mkdir()
    (folder / "prompts" / "cirag_integrate.md").write_text("Go.")
    return folder


@pytest.fixture
def make(world, tiny_llama, tmp_path):
    def make(overrides=None):
        loop = {
            "task": "hotpotqa", "data": f"{world}/test.jsonl", "corpus": f"{world}/test.corpus.jsonl", "top_k": 1,
            "triples": f"{world}/test.triples.jsonl", "oracle": f"{world}/test", "extraction": "store", "rerank": False,
            "candidates": 2, "max_integration_tokens": 6, "repairs": 0, "prompts": f"{world}/prompts",
        }  # fmt: skip
        values = {
            "output_dir": str(tmp_path / "run"), "model.base": str(tiny_llama), "model.dtype": "float32",
            "model.lora_rank": 4, "model.lora_dropout": 0.1, "data.loop": loop, "data.max_tokens": 1024,
            "train.learning_rate": 0.01, "train.bf16": "false", "train.batch_size": 2, "train.runs": 2,
            "train.gradient_accumulation": 2, "train.max_steps": 4, "train.save_steps": 2, "train.kl": 0.1,
        }  # fmt: skip
        return GrpoTask(load_config(GrpoConfig, None, values | (overrides or {})))

    return make


def asked(llama, *replies):
    """An integrator that was asked with these turns and has written these replies, with this end token or cut off."""
    tokenizer = AutoTokenizer.from_pretrained(llama)

    async def reply(request):
        _, text, request.end = left.pop(0)
        request.tokens += tokenizer(text)["input_ids"]
        seen.append(tokenizer.decode(request.prompt))

    left, seen = list(replies), list[str]()
    one = grpo.Episode(reply, ChatEncoder(tokenizer, "tiny"), 2048, 1.0, 0)

    async def run():
        for turns, _, _ in replies:
            await one.chat(turns, role="cirag.integrate")

    asyncio.run(run())
    one.finish(2, 2048)
    # What the student has read is what the loop shows, token for token.
    assert seen == [one._chat.render(turns) for turns, _, _ in replies]
    return one, tokenizer


def turns(*history):
    return messages_of("Go.", "Whom did Ada see?", FACTS, history)


def written(one, tokenizer):
    assert len(one.completion) == len(one.mask)
    return str(tokenizer.decode([token for token, own in zip(one.completion, one.mask) if own]))


def test_a_run_is_one_row_that_learns_what_the_student_wrote(tiny_llama):
    first, last = decision_text(FIRST), decision_text(LAST)
    going_on = turns(Round(FACTS, FIRST))
    one, tokenizer = asked(tiny_llama, (turns(), first, 2), (going_on, last, 2))
    assert not one.cut
    assert one.count_tokens(turns()) == len(one.prompt), "what the loop's max_prompt_tokens counts"
    assert written(one, tokenizer) == f"{first}<|im_end|>{last}<|im_end|>"
    whole = one._chat.render([*going_on, {"role": "assistant", "content": last}], reply=False)
    assert tokenizer.decode(one.prompt + one.completion) == whole.rstrip("\n")
    # The loop drops an invented triple, so the second prompt does not go on after the first reply.
    repaired = first.replace('["Ada"', '["Cy", "saw", "Bo"], ["Ada"')
    one, tokenizer = asked(tiny_llama, (turns(), repaired, 2), (going_on, last, 2))
    assert one.cut
    assert written(one, tokenizer) == f"{repaired}<|im_end|>"
    # A reply that was cut off has not written its end.
    one, tokenizer = asked(tiny_llama, (turns(), first, None), (going_on, last, None))
    assert written(one, tokenizer) == first + last
    assert len(one.completion) > sum(one.mask)
    # Nor has a reply that ended with another token than the template's (Gemma and Phi have two) written the template's.
    one, tokenizer = asked(tiny_llama, (turns(), first, 0), (going_on, last, 0))
    assert written(one, tokenizer) == f"{first}{last}<|endoftext|>"


def test_a_run_whose_first_call_fails_is_a_row_without_anything_to_learn(tiny_llama):
    one = grpo.Episode(None, ChatEncoder(AutoTokenizer.from_pretrained(tiny_llama), "tiny"), 8, 1.0, 0)
    one.finish(2, 64)
    assert (one.prompt, one.completion, one.mask) == ([2], [2], [0])


def test_parts_of_the_reward():
    notes = {"core_passages": ["a", "x"], "rounds": [{"faults": []}, {"faults": ["loose_marker"]}]}
    row: dict[str, Any] = {"scores": {"f1": 0.5}, "supporting": ["a", "b"], "error": ""}
    row["trace"] = {"details": notes, "steps": [{}, {}]}
    assert grpo.reward_parts(row) == {"answer": 0.5, "recall": 0.5, "format": 0.5, "searches": 2.0}


@pytest.mark.parametrize("broken", [1, 2])
def test_a_run_that_an_outage_ended_teaches_nothing(broken, make, monkeypatch, tmp_path):
    """Of two runs of a question, the reader of `broken` fails."""
    ask, score, calls = QuestionSuite.ask, QuestionSuite.score, itertools.count()

    async def fails(self, batch):
        found = await ask(self, batch)
        if next(calls) % 2 < broken:
            raise CallError("reader: HTTP 400")
        return found

    def answered(self, item, reply):
        row = score(self, item, reply)
        row.scores = {"f1": float(not row.error)}
        return row

    monkeypatch.setattr(QuestionSuite, "ask", fails)
    monkeypatch.setattr(QuestionSuite, "score", answered)
    task = make({"train.kl": 0, "train.max_steps": 1, "train.gradient_accumulation": 1})
    if broken == 2:
        with pytest.raises(CallError, match=r"all runs of a rollout failed.*CallError: reader: HTTP 400"):
            train(task)
        assert not (tmp_path / "run" / "final").exists()
        return
    train(task)
    (rewards,), (losses,) = (rows(task, name) for name in ("rewards.jsonl", "losses.jsonl"))
    # The other run is the only one of its group, so it is neither better nor worse than another run.
    assert (rewards["failed"], rewards["answer"], losses["grad_norm"]) == (0.5, 1.0, 0.0)


def by_length(row):
    """In place of rewards, which are 0 for all that a random model writes."""
    reply = row["trace"]["actions"][0]["reply"]
    return {"answer": float(len(reply) % 2), "recall": len(reply) / 9, "format": 0.0, "searches": 1.0}


def rows(task, name):
    return read_lines(Path(task.config.output_dir) / name, "seconds")


@pytest.mark.parametrize(("together", "rolled_out"), [(1, [1, 2, 3, 4]), (2, [1, 3])])
def test_a_resumed_run_is_the_uninterrupted_run(make, tmp_path, monkeypatch, killed_behind, together, rolled_out):
    monkeypatch.setattr(grpo, "reward_parts", by_length)
    same = {"train.kl_on": "failed", "train.rollout_steps": together}
    whole = make({"output_dir": str(tmp_path / "whole"), **same})
    train(whole)
    with pytest.raises(UnusableFile, match="closed"):
        whole.suite.clients[0].ledger.get("")

    settings = {"output_dir": str(tmp_path / "parts"), **same}
    with killed_behind(3):
        train(make(settings))
    parts = make(settings)
    train(parts)
    found = rows(whole, "rewards.jsonl")
    assert [row["step"] for row in found if row["reward"] is not None] == rolled_out
    assert len({row["reward"] for row in found}) > 1
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert max(row["kl"] for row in found) > 0 == found[0]["kl"]
    for name in ("losses.jsonl", "rewards.jsonl"):
        assert rows(parts, name) == rows(whole, name)
    one, other = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(weight.any() for name, weight in one.items() if "lora_B" in name)
    final = tmp_path / "whole" / "final"
    assert not (final / "ref").exists()
    assert json.loads((final / "student.json").read_text())["task"] == "cirag.integrate"
    assert (final / "prompt.md").read_text() == "Go.\n"


@pytest.mark.parametrize("start", ["model.adapter", "model.base"])
def test_a_student_at_the_start_is_its_own_reference(start, make, adapted, monkeypatch):
    """An adapter with dropout, and all weights of a model with an adapter."""
    monkeypatch.setattr(grpo, "reward_parts", by_length)
    task = make({start: str(adapted), "model.tune": "lora" if start == "model.adapter" else "all",
                 "model.lora_alpha": 8, "model.lora_targets": ["q_proj", "v_proj"]})  # fmt: skip
    train(task)
    first, *others = (row["kl"] for row in rows(task, "rewards.jsonl"))
    assert max(others) > 1e-6 > abs(first)


def test_what_is_computed_at_written_tokens_alone_is_what_trl_computes(make):
    task = make({"model.lora_dropout": 0.0})
    task.begin()
    trainer = task.trainer()
    ids, written = (
        torch.randint(4, 300, (4, 12)),
        torch.tensor([[0, 1, 0, 1, 1, 0], [1] * 6, [0] * 6, [1, 0, 0, 0, 0, 0]]),
    )
    attention = torch.ones_like(ids)
    attention[1, :3] = 0
    # Their prompts begin alike.
    ids[2:, :6], ids[1, 3:6] = ids[0, :6].clone(), ids[0, :3].clone()
    trainer._batch = {"tool_mask": written, "completion_mask": torch.ones_like(written)}
    given = trainer.model, ids, attention, 6
    found = trainer._get_per_token_logps_and_entropies(*given, compute_entropy=True)
    wanted = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *given, compute_entropy=True)
    trainer._written = written
    in_parts = trainer._get_per_token_logps_and_entropies(*given, batch_size=3)
    for ours, others, theirs in zip(found[:2], in_parts[:2], wanted[:2]):
        assert torch.allclose(ours, theirs * written, atol=1e-5)
        assert torch.allclose(others, ours, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corpus": None}, "needs a corpus"),
        ({"system": "ras"}, "leave out system: CIRAG's integrator is the student"),
        ({"candidats": 3}, r"a run of cirag has no option 'candidats' \(did you mean candidates\?"),
    ],
)
def test_a_loop_that_no_student_can_be_trained_in(change, message, make):
    loop = make().config.data.loop | change
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        _ = make({"data.loop": loop}).sources


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl": 0, "kl_on": "failed"}, r"train\.kl_on has no effect without kl"),
        ({"kl": 0, "teacher": "x"}, r"train\.teacher has no effect without kl"),
        (
            {"eval_steps": 5, "eval_generate_records": 8},
            r"eval_steps: train grpo does not .*\n.*eval_generate_records: ",
        ),
    ],
)
def test_settings_without_effect_are_refused(change, message, make):
    with pytest.raises(ConfigError, match=message):
        make({f"train.{name}": value for name, value in change.items()})


def test_groups_that_do_not_fill_a_rollout_are_refused_before_anything_is_loaded(make):
    with pytest.raises(ValueError, match=r"4 runs are made together .* must be a multiple of train\.runs 3"):
        train(make({"train.runs": 3, "model.base": "pypi:nothing"}), dry_run=True)


def test_a_teacher_shares_the_vocabulary(tiny_llama, tiny_model):
    student, tokenizer = load_causal_lm(tiny_llama, torch.float32)
    config = GrpoConfig()
    config.train.teacher = str(tiny_model("qwen2"))
    teacher = load_teacher(config, student, tokenizer)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    student.config.vocab_size += 64
    with pytest.raises(ValueError, match="output layers are padded differently"):
        load_teacher(config, student, tokenizer)
    tokenizer.add_tokens(["<|new|>"])
    with pytest.raises(ValueError, match=r"do not share a vocabulary \(384 and 385 tokens, 0 of"):
        load_teacher(config, student, tokenizer)
