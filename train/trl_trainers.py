"""TRL's trainers, with this engine's data order, logs and resume.

`DPOTrainer` trains a text model or a Graph-LLM on two given replies per prompt. The other two trainers sample from the
student: `DistillationTrainer` samples replies to prompts, and `GRPOTrainer` runs of a loop. CIRAG's chat only grows, so
a run is one row: the first prompt, the student's replies, which are learned, and the loop's turns, which are not
learned. If a prompt does not continue the previous prompt and reply (the loop repaired the reply), the row ends there
and counts as cut.

Checkpoints lie only between two rollouts. The seed of a reply depends on run, step, row and call, so a resumed run
samples the same replies.

Shapes: B rows, P tokens of the longest prompt, C tokens of the longest reply.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from trl import DistillationConfig, DistillationTrainer, DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from tripletune.core import libraries
from tripletune.core.calls import CallError, Completion, LLMClient, Message, Sampling
from tripletune.core.data.questions import Question
from tripletune.core.data.records import IGNORED
from tripletune.eval.suites import ask_items, close_clients
from tripletune.models.local import Draw, Request
from tripletune.models.local.chat import ChatEncoder, eos_token_ids
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.service import DecodingService
from tripletune.models.losses import evaluating
from tripletune.train.batches import pad_batch, pair_batch
from tripletune.train.engine import EngineMixin, shared_arguments
from tripletune.train.resume import StepLog

libraries.check_use("trainers of TRL")
FusedCausalLMOutput = libraries.take("trl.trainer.utils:FusedCausalLMOutput")
add_fused_lm_head = libraries.take("trl.trainer.utils:add_fused_lm_head")
REWARDS = "rewards.jsonl"
PARTS = ("answer", "recall", "format", "searches")
# Our names of what `rewards.jsonl` holds, with TRL's names.
_LOGGED = {name: f"rewards/{name}/mean" for name in PARTS} | {
    "reward": "reward", "reward_std": "reward_std", "tokens": "completions/mean_length", "kl": "kl",
    "entropy": "entropy", "cut": "cut", "failed": "failed",
}  # fmt: skip


class TrlMixin(EngineMixin):
    """The common part of all TRL trainers, as their first base class."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        self._batch = super()._prepare_inputs(inputs)
        return self._batch

    def _as_cast(self, model: Any) -> AbstractContextManager[None]:
        # TRL's generation and hidden states bypass the forward that accelerate wraps in autocast.
        return nullcontext()

    def tokens_of(self, inputs: Any) -> int:
        """Tokens of the prompts and of the replies generated for them."""
        return int(self._batch["prompt_ids"].numel() + self._batch["completion_ids"].numel())

    def label_tokens(self, inputs: Any) -> torch.Tensor:
        return inputs["completion_mask"].sum()

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        except RuntimeError as error:
            # The errors of torch and of `models.local.choose` if no token can be sampled.
            if not re.search("probability tensor|not finite", str(error)):
                raise
            self.losses.end(self.state, self.state.global_step)
        return output

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        # A copy of the initial adapter, which TRL makes again at each start.
        shutil.rmtree(Path(output_dir or self.args.output_dir) / "ref", ignore_errors=True)

    def _send_telemetry(self) -> None:
        """Send no telemetry."""


class RewardLog(StepLog):
    """`rewards.jsonl`: the means of TRL's metrics since the last line, under our names."""

    def __init__(self, task: Any, names: Mapping[str, str]) -> None:
        super().__init__(Path(task.config.output_dir) / REWARDS)
        self.names = names

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "entropy" in logs:
            self.append([{"step": state.global_step} | {own: logs.get(name) for own, name in self.names.items()}])


class PreferenceTrainer(TrlMixin, DPOTrainer):
    """Trains a model with an adapter on pairs of replies; the reference model has the initial adapter."""

    more_metrics = tuple(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins"))

    def __init__(self, task: Any) -> None:
        base, train = task.model.get_base_model(), task.config.train
        forward, shared = base.forward, shared_arguments(task.config, task.validation is not None)
        super().__init__(
            model=task.model,
            args=DPOConfig(**shared, loss_type=[train.preference], beta=train.beta, router_aux_loss_coef=0.0),
            data_collator=partial(pair_batch, task.collator()),
            train_dataset=task.train,
            eval_dataset=task.validation,
            processing_class=getattr(task.processor, "tokenizer", task.processor),
        )
        # TRL's own forward takes no graphs, and computes the logits of all tokens on a CPU.
        base.forward = with_log_probs(forward, getattr(base, "graph_encoder", torch.nn.Identity()))
        # TRL copies only parameters, but the reference also needs the graph encoder's batch statistics.
        buffers = dict(task.model.named_buffers())
        for name in (name for name in buffers if ".ref." in name):
            buffers[name].copy_(buffers[name.replace(".ref.", ".default.")])
        self.add_callback(RewardLog(task, {name: name for name in self.more_metrics}))
        self.begin_run(task)

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        # The rows are tokens already.
        return dataset

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        pairs = torch.tensor([float(self.label_tokens(one)) for one in batch_samples], device=device)
        return self.accelerator.reduce(pairs.mean(), "mean")

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
        """TRL's loss; in training, all pairs of an optimiser step have the same weight, also in a small micro-batch."""
        loss = super().compute_loss(model, inputs, *args, **options)
        return loss if num_items_in_batch is None else loss * self.label_tokens(inputs) / num_items_in_batch

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Evaluate one batch, whose size can differ between processes, so TRL must not gather its rewards."""
        self.accelerator.gather = lambda rewards: rewards
        try:
            return super().prediction_step(*args, **options)
        finally:
            del self.accelerator.gather

    def tokens_of(self, inputs: Any) -> int:
        """Tokens of both replies with their prompts, padding included."""
        return int(inputs["input_ids"].numel())

    def label_tokens(self, inputs: Any) -> torch.Tensor:
        """The number of pairs, because all pairs have the same weight in an evaluation."""
        return inputs["input_ids"].new_tensor(len(inputs["input_ids"]) // 2)


def with_log_probs(forward: Callable[..., Any], graphs: torch.nn.Module) -> Callable[..., Any]:
    """Wrap a forward to return log-probabilities and more of label tokens, (B, T - 1), as `add_fused_lm_head` does.

    The graph encoder runs in evaluation mode: dropout and batch statistics would make policy and reference differ.
    """

    @wraps(forward)
    def both(*args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **inputs)
        inputs.pop("attention_mask")  # padding stands on the right
        labels = inputs["labels"][:, 1:]
        keep = labels != IGNORED
        with evaluating(graphs):
            logits = forward(*args, **inputs).logits
        logits = (logits if logits.dim() == 2 else logits[:, :-1][keep]).float()
        logps = logits.log_softmax(-1)
        seen = logps.detach()
        found = {
            "log_probs": logps.gather(1, labels[keep][:, None])[:, 0],
            "entropy": -(seen.exp() * seen).sum(-1),
            "mean_logits": logits.detach().mean(-1),
            "is_top1": seen.argmax(-1) == labels[keep],
        }
        spread = {name: one.new_zeros(keep.shape).masked_scatter(keep, one) for name, one in found.items()}
        return FusedCausalLMOutput(**spread)

    return both


class OnPolicyTrainer(TrlMixin, DistillationTrainer):
    """Trains a student on its own replies."""

    def __init__(self, task: Any) -> None:
        train = task.config.train
        # TRL reads the column `prompt`, and would take other columns for images and the like.
        prompts = [
            None if one is None else one.select_columns(["input_ids", "length"]).rename_column("input_ids", "prompt")
            for one in (task.train, task.validation)
        ]
        super().__init__(
            model=task.model,
            teacher_model=task.teacher,
            args=DistillationConfig(
                **shared_arguments(task.config, task.validation is not None),
                beta=train.divergence,
                temperature=train.temperature,
                max_completion_length=train.max_reply_tokens,
            ),
            train_dataset=prompts[0],
            eval_dataset=prompts[1],
            processing_class=task.processor,
        )
        self.begin_run(task)

    def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        # The prompts are tokens already, made by the loop's code.
        return prompts, None, {}

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        with evaluating(self.accelerator.unwrap_model(self.model)):  # without dropout
            return super()._generate_single_turn(*args, **options)


class Episode(LLMClient):
    """The student as CIRAG's integrator in one run of the loop, and the row of that run.

    The row is `prompt`, the tokens before the first reply, and `completion` with `mask`, which is 1 for tokens that the
    student wrote. `cut` tells whether the row lacks a part of the run. The first reply has the seed `seed`, and each
    later reply the next number.
    """

    model = "student"

    def __init__(self, reply: Any, chat: ChatEncoder, context: int, temperature: float, seed: int) -> None:
        self.prompt: list[int] = []
        self.completion: list[int] = []
        self.mask: list[int] = []
        self.cut = False
        self._reply, self._chat, self._context = reply, chat, context
        self._temperature, self._seed = temperature, seed
        self._end: int | None = None
        self._text = ""

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `LLMClient.chat`. Earlier replies keep their sampled tokens."""
        text = self._chat.render(messages)
        self.cut |= not text.startswith(self._text)
        new = self._chat.tokens(text if self.cut else text[len(self._text) :])
        ids = new if self.cut else self.prompt + self.completion + new
        room = self._context - len(ids)
        if room < 1:
            raise CallError(f"{role}: the prompt has {len(ids)} tokens, and the model's context has {self._context}")
        limit = min((sampling or Sampling()).max_tokens, room)
        request = Request(ids, limit, self._chat.shared(messages, ids), Draw(self._temperature, seed=self._seed))
        self._seed += 1
        await self._reply(request)
        if not self.cut:
            self._add(new, request.tokens)
            self._end = request.end
        found = str(self._chat.tokenizer.decode(request.tokens, skip_special_tokens=True))
        self._text = text + self._chat.as_text(found)
        return request.completion(found)

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """The number of prompt tokens of a chat."""
        return len(self._chat.encode(messages))

    def finish(self, eos: int, longest: int) -> None:
        """End the row, with `eos` if the student has not, so that TRL has a token after the prompt."""
        self.prompt = self.prompt or [eos]
        self._add([eos if self._end is None else self._end], [])
        longest = max(1, longest - len(self.prompt))
        self.cut |= len(self.completion) > longest
        self.completion, self.mask = self.completion[:longest], self.mask[:longest]

    def _add(self, read: list[int], written: list[int]) -> None:
        if not self.prompt:
            self.prompt, read = read, []
        self.completion += read + written
        # The first token that the template adds is the student's own if the student ended its reply with it.
        self.mask += [int(token == self._end) for token in read[:1]] + [0] * len(read[1:]) + [1] * len(written)


def reward_parts(row: dict[str, Any]) -> Mapping[str, float | None]:
    """Return the rewards of a run, given its row of results; a failed run has none, so it has no advantage."""
    if row["error"]:
        return dict.fromkeys(PARTS)
    trace, wanted = row["trace"], set(row["supporting"])
    kept, rounds = (trace["details"].get(name, ()) for name in ("core_passages", "rounds"))
    right = [not one["faults"] for one in rounds]
    return {
        "answer": row["scores"]["f1"],
        "recall": len(wanted & set(kept)) / max(len(wanted), 1),
        "format": sum(right) / max(len(right), 1),
        "searches": float(len(trace["steps"])),
    }


class GrpoTrainer(TrlMixin, GRPOTrainer):
    """Trains a student on its own runs of the loop."""

    task: Any

    def __init__(self, task: Any) -> None:
        train = task.config.train
        shared = shared_arguments(task.config, evaluates=False)
        super().__init__(
            model=task.model,
            reward_funcs=[_reward(name) for name in PARTS],
            args=GRPOConfig(
                **shared,
                steps_per_generation=shared["gradient_accumulation_steps"] * task.together,
                num_generations=train.runs,
                max_completion_length=task.config.data.max_tokens,
                temperature=train.temperature,
                # With dropout, the log-probabilities of student, older student and reference would differ.
                disable_dropout=True,
                # With a value, TRL would make a reference itself.
                beta=train.kl if task.teacher is None else 0.0,
                reward_weights=[train.answer_reward, train.recall_reward, train.format_reward, -train.search_cost],
            ),
            train_dataset=task.train.select_columns(["prompt", "length"]),
            processing_class=task.processor,
            rollout_func=lambda prompts, _: self._roll_out(prompts),
        )
        if task.teacher is not None:
            add_fused_lm_head(task.teacher, temperature=train.temperature)
            self.beta = train.kl
            self.ref_model = self.accelerator.prepare_model(task.teacher, evaluation_mode=True)
        task.suite.open()
        # Clients belong to one event loop.
        self._runner = asyncio.Runner()
        self.add_callback(RewardLog(task, _LOGGED))
        self.begin_run(task)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and close the loop's resources; see transformers' `Trainer.train`."""
        try:
            return super().train(*args, **kwargs)
        finally:
            with self._runner:
                self._runner.run(close_clients(self.task.suite))

    def _roll_out(self, prompts: Sequence[str]) -> dict[str, Any]:
        model = self.accelerator.unwrap_model(self.model)
        with evaluating(model):
            runs, rows = self._runner.run(self._run_all(model, [Question(**json.loads(text)) for text in prompts]))
        self._written = pad_batch([one.mask for one in runs], 0).to(self.accelerator.device)
        for one, row in zip(runs, rows, strict=True):
            self._log_metric("cut", one.cut)
            self._log_metric("failed", bool(row["error"]))
        return {
            "prompt_ids": [one.prompt for one in runs],
            "completion_ids": [one.completion for one in runs],
            "env_mask": [one.mask for one in runs],
            "logprobs": None,
            "parts": [reward_parts(row) for row in rows],
            "error": [row["error"] for row in rows],
        }

    async def _run_all(self, model: Any, questions: Sequence[Question]) -> tuple[list[Episode], list[Any]]:
        config, tokenizer, here = self.task.config, self.processing_class, self.args
        ends = eos_token_ids(tokenizer, model.generation_config)
        first = ((config.seed * 1_000_003 + self.state.global_step) * here.world_size + here.process_index) * 1_009
        # A new service for each rollout, because a service caches keys and values of prompts.
        service = DecodingService(lambda: make_decoder(model, ends, tokenizer.pad_token_id), "student")

        async def run(one: Episode, question: Question) -> Any:
            suite = copy.copy(self.task.suite)
            suite.tools = replace(suite.tools, integrator=one)
            ((_, reply),) = await ask_items(suite, [question])
            one.finish(tokenizer.eos_token_id, config.data.max_tokens)
            return suite.score(question, reply)

        context = model.config.get_text_config().max_position_embeddings
        chat, temperature = ChatEncoder(tokenizer, "student"), config.train.temperature
        runs = [
            Episode(service.reply, chat, context, temperature, (first + number) * 1_009)
            for number in range(len(questions))
        ]
        try:
            return runs, await asyncio.gather(*map(run, runs, questions))
        finally:
            await service.close()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._metrics["train"]["failed"][-1] == 1:  # on all processes
            raise CallError(
                f"all runs of a rollout failed, one of them with {inputs[0]['error']}: repair the loop's models and "
                "tools, then run the same command again, which continues from the newest checkpoint"
            )
        always = self.task.config.train.kl_on == "all"
        counts = [always or (not one["error"] and one["parts"]["answer"] < 1) for one in inputs]
        return output | {"counts": torch.tensor(counts, device=self.accelerator.device)}

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, *args: Any,
        compute_entropy: bool = False, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:  # fmt: skip
        """Log-probabilities and entropies, (B, C) each, 0 for tokens that the student did not write.

        On a GPU, TRL computes them, with its kernel if the kernel supports the model. On a CPU, TRL's way would take
        most of a step, because it computes all tokens and the student writes only one token in eight.
        """
        if input_ids.is_cuda:
            options |= {"compute_entropy": compute_entropy}
            found = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **options
            )
        else:
            written = self._batch["tool_mask"] * self._batch["completion_mask"] if compute_entropy else self._written
            runs = zip(input_ids, attention_mask.bool(), written, strict=True)
            logps, entropies = zip(*(self._of_written(model, *run) for run in runs), strict=True)
            found = torch.stack(logps), torch.stack(entropies), None
        name = "ref_per_token_logps"
        if compute_entropy and name in self._batch:
            # If the divergence counts only in failed runs, the other runs are their own reference.
            self._batch[name] = torch.where(self._batch["counts"][:, None], self._batch[name], found[0].detach())
        return found

    def _of_written(
        self, model: Any, ids: torch.Tensor, inside: torch.Tensor, written: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, (C,) each, of one run of (P + C,) tokens without padding."""
        flags = torch.cat([torch.zeros_like(ids[: -len(written)]), written])
        row, kept = ids[inside][None], flags[inside][None]
        labels = row.masked_fill(kept == 0, IGNORED)
        with self.accelerator.autocast():
            logits = model(input_ids=row, labels=labels).logits
        # With labels, the model computes only the logits of label tokens (`models.losses.learn_labels_only`).
        keep = labels[:, 1:] != IGNORED
        logits = logits if logits.dim() == 2 else logits[:, :-1][keep]
        logps = (logits.float() / self.temperature).log_softmax(-1)
        own = logps.gather(1, labels[:, 1:][keep][:, None])[:, 0], -(logps.detach().exp() * logps.detach()).sum(-1)
        first, second = (one.new_zeros(written.shape).masked_scatter(written == 1, one) for one in own)
        return first, second


def _reward(name: str) -> Callable[..., list[float | None]]:
    def reward(parts: Sequence[Mapping[str, float | None]], **_: Any) -> list[float | None]:
        return [one[name] for one in parts]

    reward.__name__ = name
    return reward
