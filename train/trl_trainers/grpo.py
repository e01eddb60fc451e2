"""Reinforcement learning with TRL's `GRPOTrainer`, whose rollouts are runs of CIRAG's loop.

CIRAG's chat only grows, so a run is one row: the first prompt, the student's replies, which are learned, and the loop's
turns, which are not learned. If a prompt does not continue the previous prompt and reply (the loop repaired the reply),
the row ends there and counts as cut.

Shapes: B rows, P tokens of the longest prompt, C tokens of the longest completion.

Tested in `tests/train/test_grpo.py`.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from trl import GRPOConfig, GRPOTrainer

from tripletune.core import libraries
from tripletune.core.calls import CallError, RepliesPending
from tripletune.core.data.questions import Question
from tripletune.core.data.records import IGNORED
from tripletune.eval.running import FailureLog, ask_items, close_clients
from tripletune.models.local.chat import ChatEncoder, eos_token_ids
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.service import DecodingService
from tripletune.models.losses import evaluating
from tripletune.train.arguments import shared_arguments
from tripletune.train.rows.batches import pad_batch
from tripletune.train.trl_trainers import RewardLog, TrlMixin, logits_at_labels
from tripletune.train.trl_trainers.episodes import PARTS, Episode, EpisodeResult, reward_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tripletune.train.evaluation import Batch
    from tripletune.train.tasks.grpo import GrpoTask

# Seeds between those of two neighbouring runs: more than a run has calls, and more than a rollout has runs.
_SEEDS_PER_RUN = 1_009
# Steps between the seeds of two training runs with neighbouring seeds: more than any run has.
_STEPS_PER_SEED = 1_000_003
# Our names of what `rewards.jsonl` holds, with TRL's names.
_LOGGED = {name: f"rewards/{name}/mean" for name in PARTS} | {
    "reward": "reward", "reward_std": "reward_std", "tokens": "completions/mean_length", "kl": "kl",
    "entropy": "entropy", "cut": "cut", "failed": "failed",
}  # fmt: skip


class _TokenStats(NamedTuple):
    """Log-probabilities and entropies of completions, (B, C) each or (C,) of one run; 0 at tokens of the loop."""

    log_probs: torch.Tensor
    entropies: torch.Tensor


class GrpoTrainer(TrlMixin, GRPOTrainer):
    """Trains a student on its own runs of the loop."""

    task: GrpoTask

    def __init__(self, task: GrpoTask) -> None:
        """Make the trainer of a task whose student and questions are loaded, and open the loop's suite."""
        train = task.config.train
        shared = shared_arguments(task.config, evaluates=False)
        super().__init__(
            model=task.model,
            reward_funcs=[_reward_function(name) for name in PARTS],
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
            add_fused_lm_head = libraries.take("trl.trainer.utils:add_fused_lm_head")
            add_fused_lm_head(task.teacher, temperature=train.temperature)
            self.beta = train.kl
            self.ref_model = self.accelerator.prepare_model(task.teacher, evaluation_mode=True)
        task.suite.open()
        # Clients belong to one event loop.
        self._runner = asyncio.Runner()
        # Errors of the loop whose traceback was shown.
        self._failures = FailureLog()
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
        """Run the loop once per prompt, which is a question as JSON; return the rows of the runs as TRL wants them.

        TRL hands only texts to a rollout function, so the whole question travels as its prompt. `parts` and `error` are
        columns that TRL passes on to the reward functions.
        """
        model = self.accelerator.unwrap_model(self.model)
        questions = [Question(**json.loads(text)) for text in prompts]
        with evaluating(model):
            runs = self._runner.run(self._run_all(model, questions))
        episodes = [run.episode for run in runs]
        results = [run.result for run in runs]
        # TRL scores the rollout before it makes a batch of it; `_get_per_token_logps_and_entropies` reads this then.
        self._written = pad_batch([episode.mask for episode in episodes], 0).to(self.accelerator.device)
        for run in runs:
            self._log_metric("cut", run.episode.cut)
            self._log_metric("failed", bool(run.result["error"]))
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.completion for episode in episodes],
            "env_mask": [episode.mask for episode in episodes],
            "logprobs": None,
            "parts": [reward_parts(result) for result in results],
            "error": [result["error"] for result in results],
        }

    async def _run_all(self, model: PreTrainedModel, questions: Sequence[Question]) -> list[EpisodeResult]:
        """Run the loop once per question, all at the same time.

        The model writes the integrator's replies. Each episode draws from a seed of its own, so a rollout does not
        depend on how the calls of several episodes were batched.

        Args:
            model: The model as it is now, in evaluation mode.
            questions: A question stands as often as it has runs.

        Returns:
            An episode with the scores of its answer per question, in their order.
        """
        config = self.task.config
        tokenizer = self.processing_class
        ends = eos_token_ids(tokenizer, model.generation_config)
        # A new service for each rollout, because a service caches keys and values of prompts.
        service = DecodingService(lambda: make_decoder(model, ends, tokenizer.pad_token_id), "student")
        context = model.config.get_text_config().max_position_embeddings
        chat = ChatEncoder(tokenizer, "student")

        async def run(number: int, question: Question) -> EpisodeResult:
            """Run the loop for a question with a suite of its own, because an episode is the row of a single run."""
            episode = Episode(service.reply, chat, context, config.train.temperature, self._seed_of(number))
            suite = copy.copy(self.task.suite)
            suite.tools = replace(suite.tools, integrator=episode)
            ((_, reply),) = await ask_items(suite, [question], self._failures)
            if isinstance(reply, RepliesPending):
                # `GrpoTask` refuses a teacher whose replies come later, so this is a fault of the teacher's client.
                raise reply
            episode.finish(tokenizer.eos_token_id, config.data.max_tokens)
            return EpisodeResult(episode, suite.score(question, reply).to_json())

        try:
            return await asyncio.gather(*[run(number, question) for number, question in enumerate(questions)])
        finally:
            await service.close()

    def _seed_of(self, number: int) -> int:
        """The seed of a run's first reply, which depends on the training run, the step, the process and the row.

        So a resumed run samples the same replies, and no two runs share a seed.
        """
        step = self.task.config.seed * _STEPS_PER_SEED + self.state.global_step
        process = step * self.args.world_size + self.args.process_index
        return (process * _SEEDS_PER_RUN + number) * _SEEDS_PER_RUN

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        """Make and score a rollout; tell which runs the divergence counts in, and stop if all have failed.

        If all runs fail, the fault lies in the loop, and training on would only pass over the remaining questions.
        """
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._metrics["train"]["failed"][-1] == 1:  # the share of failed runs on all processes
            raise CallError(
                f"all runs of a rollout failed, one of them with {inputs[0]['error']}: repair the loop's models and "
                "tools, then run the same command again, which continues from the newest checkpoint"
            )
        # Whether the divergence counts, by run; see `train.kl_on`. A run that an error ended has no answer to judge.
        counts_in_all = self.task.config.train.kl_on == "all"
        counts = []
        for run in inputs:
            is_wrong = not run["error"] and run["parts"]["answer"] < 1
            counts.append(counts_in_all or is_wrong)
        return output | {"counts": torch.tensor(counts, device=self.accelerator.device)}

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, *args: Any,
        compute_entropy: bool = False, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:  # fmt: skip
        """Log-probabilities and entropies, (B, C) each, 0 for tokens that the student did not write.

        On a GPU, TRL computes them, with its kernel if the kernel supports the model. On a CPU, TRL's way would take
        most of a step, because it computes all tokens and the student writes only one token in eight.
        """
        if input_ids.is_cuda:
            log_probs, entropies, more = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, compute_entropy=compute_entropy, **options
            )
        else:
            if compute_entropy:
                # In a training step, TRL gives a micro-batch of the rollout.
                written = self._batch["tool_mask"] * self._batch["completion_mask"]
            else:
                written = self._written
            log_probs, entropies = self._stats_of_rows(model, input_ids, attention_mask.bool(), written)
            more = None
        name = "ref_per_token_logps"
        if compute_entropy and name in self._batch:
            # If the divergence counts only in failed runs, the other runs are their own reference.
            counts = self._batch["counts"][:, None]
            self._batch[name] = torch.where(counts, self._batch[name], log_probs.detach())
        return log_probs, entropies, more

    def _stats_of_rows(
        self, model: nn.Module, input_ids: torch.Tensor, is_token: torch.Tensor, written: torch.Tensor
    ) -> _TokenStats:
        """Log-probabilities and entropies, (B, C) each, row by row.

        Args:
            input_ids: (B, P + C), prompts padded on the left and completions padded on the right.
            is_token: (B, P + C), False at padding.
            written: (B, C), 1 at tokens that the student wrote.
        """
        log_probs = []
        entropies = []
        for row, row_is_token, row_written in zip(input_ids, is_token, written, strict=True):
            row_log_probs, row_entropies = self._stats_of_run(model, row, row_is_token, row_written)
            log_probs.append(row_log_probs)
            entropies.append(row_entropies)
        return _TokenStats(torch.stack(log_probs), torch.stack(entropies))

    def _stats_of_run(
        self, model: nn.Module, ids: torch.Tensor, is_token: torch.Tensor, written: torch.Tensor
    ) -> _TokenStats:
        """Log-probabilities and entropies, (C,) each, of one run of (P + C,) tokens; 0 where nothing was written.

        Args:
            model: The model that is trained, or the reference.
            ids: Prompt and completion, (P + C,).
            is_token: Whether each place of `ids` is a token and no padding, (P + C,).
            written: Whether the model wrote each token of the completion, (C,); others are retrieved texts of later
                turns.
        """
        prompt = ids[: -len(written)]
        is_written = torch.cat([torch.zeros_like(prompt), written])
        row = ids[is_token][None]
        labels = row.masked_fill(is_written[is_token][None] == 0, IGNORED)
        with self.accelerator.autocast():
            logits = model(input_ids=row, labels=labels).logits
        is_label = labels[:, 1:] != IGNORED
        # With labels, the model computes only the logits of label tokens (`models.losses.learn_labels_only`).
        logits = logits_at_labels(logits, is_label).float() / self.temperature
        all_log_probs = logits.log_softmax(-1)
        log_probs = all_log_probs.gather(1, labels[:, 1:][is_label][:, None])[:, 0]
        fixed = all_log_probs.detach()
        entropies = -(fixed.exp() * fixed).sum(-1)
        return _TokenStats(_at_written(log_probs, written), _at_written(entropies, written))


def _at_written(values: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Put the values of the written tokens at their places: (C,), 0 elsewhere."""
    return values.new_zeros(written.shape).masked_scatter(written == 1, values)


def _reward_function(name: str) -> Callable[..., list[float | None]]:
    """Return a reward function for TRL, which knows it by its name: it picks a part of each run's rewards."""

    def reward(parts: Sequence[Mapping[str, float | None]], **_: Any) -> list[float | None]:
        """The part of each run; TRL also passes all other columns of the rows, which say nothing more."""
        return [rewards_of_run[name] for rewards_of_run in parts]

    reward.__name__ = name
    return reward
