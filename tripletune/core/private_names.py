"""The names of other libraries that this project uses although their documentation does not promise them, by use.

`core.libraries` checks and takes them. `tests/core/test_libraries.py` finds a private name in the code that is not
listed here, and a listed one that no code uses. What is documented does not belong here. Each library in `USES` has an
upper bound in pyproject.toml.
"""

from __future__ import annotations

from typing import NamedTuple

PYTHON = "python"
# Names of packages on PyPI that differ from the name of the import.
_PACKAGES = {
    "argparse": PYTHON,
    "faiss": "faiss-cpu",
    "sentence_transformers": "sentence-transformers",
    "torch_geometric": "torch-geometric",
}


class Private(NamedTuple):
    """One name of another library that its documentation does not promise.

    Attributes:
        name: `module:Class.member`; `module:function(a|b)`, of which one argument must exist; or
            `module:Class@attribute`, which the methods of a class set or read.
        why: What it is used for.
        without: What would happen without it, if `check_use` did not stop the program.
        seen: The versions that have the name, where not all tested versions have it.
    """

    name: str
    why: str
    without: str
    seen: str = ""

    @property
    def library(self) -> str:
        """The name of the library on PyPI."""
        package = self.name.partition(":")[0].partition(".")[0]
        return _PACKAGES.get(package, package)


CACHE_ARGUMENT = "transformers:GenerationMixin.prepare_inputs_for_generation(cache|past_key_values)"
_SUPPORTS = [
    Private(
        f"transformers:PreTrainedModel.{name}",
        "says which attention kernels a model supports",
        "a Graph-LLM gets the slow eager attention, or `model.attention: blocks` meets a model without support for it",
    )
    for name in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
]
# The names by use. The error says "NAME is missing, which USE needs".
USES: dict[str, list[Private]] = {
    "decoding": [
        Private(
            CACHE_ARGUMENT,
            "the argument with which the forward of every model takes its cache",
            "a model ignores the cache, and each new token is computed without the earlier tokens",
            "cache in 5.24.0, past_key_values in 5.23.0",
        ),
        Private(
            "transformers:DynamicCache(config)",
            "makes the layers of a cache that fit the layers of a model",
            "models with windows or states are decoded as if every layer kept all tokens",
        ),
        Private(
            "transformers.cache_utils:Cache(layers)",
            "a cache that reads and writes our buffers",
            "prompts are not read into the running batch",
        ),
        Private(
            "transformers.cache_utils:Cache.is_linear",
            "tells layers that only have a state from layers that keep keys and values",
            "a state-space model is taken for a model with attention",
        ),
        Private("transformers.cache_utils:Cache@layers", "kinds of a model's layers", "continuous batches never start"),
        Private(
            "transformers.cache_utils:DynamicLayer.update",
            "overridden: keys and values are kept in the buffers of the batch",
            "the buffers stay empty, and replies are wrong",
        ),
        Private(
            "transformers.cache_utils:DynamicLayer.get_seq_length",
            "overridden: number of tokens in the buffers, for the attention mask",
            "the attention mask has a wrong width",
        ),
        Private(
            "transformers.cache_utils:DynamicLayer@is_initialized",
            "set, because the buffers exist before the first token",
            "transformers replaces the buffers with empty ones",
        ),
    ],
    "the Graph-LLM": [
        *_SUPPORTS,
        Private(
            "transformers:PreTrainedConfig._attn_implementation",
            "the attention kernel of the language model, which a composite configuration resets",
            "old families such as GPT-J get no causal mask",
        ),
        Private(
            "transformers:PreTrainedModel.get_correct_attn_implementation",
            "the fastest attention kernel that a family supports",
            "families without scaled_dot_product_attention can't be loaded as a Graph-LLM",
        ),
        Private(
            "transformers:PreTrainedModel._init_weights",
            "overridden: every part initialises itself",
            "a loaded language model gets random weights",
        ),
        Private(
            "transformers:PreTrainedModel._no_split_modules",
            "layers that FSDP and device maps keep in one piece",
            "a layer is split between devices",
        ),
        Private(
            "peft.utils.constants:DUMMY_TARGET_MODULES",
            "PEFT's name for an adapter without adapter layers, for graph-token tuning",
            "PEFT looks for a layer of this name and fails",
        ),
        Private(
            "peft:LoraModel@is_loaded_in_4bit",
            "PEFT reads it from the model to choose adapter layers for 4-bit weights",
            "LoRA on a Graph-LLM in nf4 multiplies packed 4-bit weights as if they were numbers",
        ),
    ],
    "attention in blocks": [
        *_SUPPORTS,
        Private(
            "torch:_softmax_backward_data",
            "the gradient of softmax in one pass over memory",
            "training with `model.attention: blocks` fails at its first backward pass",
        ),
    ],
    "dtype auto": [
        Private(
            "torch:ops.mkldnn._is_mkldnn_bf16_supported",
            "whether the CPU multiplies bfloat16 natively",
            "a CPU without it computes in bfloat16, several times slower than in float32",
        ),
    ],
    "sentence encoders": [
        Private(
            "sentence_transformers.base.modules:Transformer@modality_config",
            "whether an encoder puts its texts through a chat template",
            "control tokens in a passage end a turn of the chat",
        ),
        Private(
            "sentence_transformers.base.modules:Transformer@processing_kwargs",
            "makes the chat template read control tokens as text",
            "control tokens in a passage end a turn of the chat",
        ),
    ],
    "BM25": [
        Private(
            "bm25s:BM25.get_tokens_ids",
            "the numbers of a query's terms in the vocabulary",
            "queries with unknown words fail",
        ),
        Private("bm25s:BM25@scores", "the scores of a stored index", "no index can be searched"),
        Private("bm25s.stopwords:STOPWORDS_EN", "the English stop words of an index", "other words are left out"),
    ],
    "HNSW and IVF": [
        Private(
            "faiss:IO_FLAG_MMAP_IFC",
            "reads a graph or lists from their file without loading them into memory",
            "the index of a large corpus does not fit into memory",
        ),
    ],
    "the benchmark of G-Retriever": [
        Private(
            "torch_geometric.llm.models:LLM._get_embeds",
            "overridden: G-Retriever reads our tokens instead of its own prompts",
            "G-Retriever trains on other tokens than our model",
        ),
        Private(
            "torch_geometric.llm.models:LLM._pad_embeds",
            "G-Retriever's own padding of a batch",
            "the benchmark cannot make a batch for G-Retriever",
        ),
    ],
    "language detection": [
        Private("py3langid.langid:MODEL_FILE", "the detector's own model", "no detector with probabilities"),
        Private(
            "py3langid.langid:LanguageIdentifier.labels",
            "the languages that the detector knows",
            "a language with no stemmer and no stop words is refused",
        ),
    ],
    "serve": [
        Private(
            "uvicorn:Server.handle_exit",
            "overridden: running questions end before the server stops",
            "a signal cuts the running questions off",
        ),
        Private("uvicorn:Server@should_exit", "stops the server", "the server never stops"),
        Private("uvicorn:Server@force_exit", "stops the server without waiting", "a second signal has no effect"),
        Private(
            "starlette.responses:StreamingResponse.stream_response",
            "sends a stream without watching the connection, since the service does",
            "a client that hangs up is noticed twice, and its question goes on",
        ),
        Private(
            "starlette.responses:StreamingResponse@body_iterator",
            "closes the stream of events when the response has ended",
            "questions of clients that hung up keep their places",
        ),
    ],
    "training": [
        *(
            Private(f"transformers:Trainer.{name}", f"overridden or called: {why}", without)
            for name, why, without in (
                ("_prepare_for_training", "checks that the launcher wrapped the model as its settings say",
                 "a run that should be sharded trains unsharded without a word"),
                ("_get_train_sampler", "order of the rows by seed and epoch", "a resumed run sees other rows"),
                ("_run_epoch(epoch)", "the epoch of the sampler", "every epoch has the order of the first"),
                ("_save_checkpoint", "random states are the same after a checkpoint",
                 "a run with checkpoints differs from a run without"),
                ("_load_best_model", "weights of the best step", "the last step is saved as the best"),
                ("_get_num_items_in_batch", "divides the loss by the weights of the whole optimiser step",
                 "weighted tokens count as 1"),
                ("_get_grad_norm", "logs the gradient norm of every step", "losses.jsonl has no norms"),
                ("_evaluate", "chooses the best step after each evaluation, and stops early", "patience has no effect"),
                ("_determine_best_metric", "the best step is saved whenever it is evaluated",
                 "the best step can't be loaded"),
                ("_save", "writes the task's files beside the weights", "a checkpoint has no tokenizer and settings"),
                ("_prepare_inputs", "batches on the device", "an evaluation runs on the wrong device"),
                ("compute_loss_context_manager", "autocast of evaluations", "evaluations run in another precision"),
            )
        ),
        Private("transformers.trainer_callback:CallbackHandler.call_event",
                "wrapped: callbacks must not change the random states of training",
                "a run that reports to a tracker differs from a run that does not"),
        Private("transformers:TrainerState.compute_steps", "the current intervals of logs, evaluations and checkpoints",
                "a resumed run keeps the intervals of the first run"),
        Private("transformers.trainer_utils:seed_worker", "the seeds of the processes that load rows",
                "two processes draw other random numbers than one"),
        Private("transformers.trainer:TRAINING_ARGS_NAME", "the pickle of a checkpoint, which is deleted",
                "checkpoints and exports hold a pickle"),
        Private("peft.helpers:disable_input_dtype_casting", "no cast to float32 and back in each adapter layer",
                "training in bfloat16 is slower"),
    ],
    "settings of training": [
        Private("transformers.optimization:TYPE_TO_SCHEDULER_FUNCTION", "the arguments of each learning-rate schedule",
                "train.scheduler_arguments are not checked"),
        Private("transformers.training_args:OptimizerNames", "the names of the optimisers",
                "train.optimizer is not checked"),
        Private("transformers:TrainingArguments.default_optim", "the optimiser if none is set",
                "train.optimizer must be set"),
    ],
    "trackers": [
        Private("transformers.integrations:INTEGRATION_TO_CALLBACK", "the callback of each tracker",
                "a tracker that is not installed is noticed only after the model is loaded"),
        Private("transformers.integrations:rewrite_logs", "the names of scalars in W&B",
                "lines of an offline run that was killed get other names"),
        Private("transformers.integrations:WandbCallback@_log_model", "set to false: no upload by the callback",
                "W&B gets a pickle, and a model without its prompt and tokenizer"),
        Private("transformers.integrations.integration_utils:WandbLogModel.FALSE", "the value of `_log_model`",
                "W&B gets a pickle, and a model without its prompt and tokenizer"),
    ],
    "trainers of TRL": [
        Private("trl.trainer.utils:FusedCausalLMOutput", "the output of a forward that computes log-probabilities",
                "TRL's losses find no log-probabilities"),
        Private("trl.trainer.utils:add_fused_lm_head", "log-probabilities of GRPO's reference model",
                "GRPO has no reference model"),
        *(
            Private(f"trl:{name}", f"overridden or called: {why}", without)
            for name, why, without in (
                ("DPOTrainer._send_telemetry", "no telemetry", "TRL reports each run to its server"),
                ("DPOTrainer._prepare_dataset", "the rows are tokens already", "TRL looks for texts in the rows"),
                ("DPOTrainer@_metrics", "means of an evaluation", "evaluations lack the rewards"),
                ("DistillationTrainer._send_telemetry", "no telemetry", "TRL reports each run to its server"),
                ("DistillationTrainer._tokenize_prompts", "the prompts are tokens already",
                 "TRL puts another chat template around the prompts"),
                ("DistillationTrainer._generate_single_turn", "samples without dropout",
                 "replies are sampled with dropout"),
                ("DistillationTrainer._generate_and_score_completions", "reports a student whose logits are not finite",
                 "the run ends with an error of torch"),
                ("DistillationTrainer._compute_loss", "the loss of a teacher with another vocabulary",
                 "a student learns nothing from such a teacher"),
                ("DistillationTrainer@_metrics", "shares of what a teacher can't score",
                 "rewards.jsonl lacks these shares"),
                ("DistillationTrainer@teacher_model", "a teacher with another vocabulary", "the teacher is not found"),
                ("GRPOTrainer._send_telemetry", "no telemetry", "TRL reports each run to its server"),
                ("GRPOTrainer._generate_and_score_completions", "stops where all runs of a rollout fail",
                 "a run learns from failed runs"),
                ("GRPOTrainer._get_per_token_logps_and_entropies(compute_entropy)",
                 "log-probabilities of the written tokens alone", "a step on a CPU takes several times as long"),
                ("GRPOTrainer._log_metric", "counts of cut and failed runs", "rewards.jsonl lacks these counts"),
                ("GRPOTrainer@_metrics", "share of failed runs", "a rollout in which all runs fail is not noticed"),
                ("GRPOTrainer@ref_model", "the reference model", "the divergence is not computed"),
                ("GRPOTrainer@beta", "weight of the divergence", "the divergence is not computed"),
            )
        ),
    ],
    "data sets of the hub": [
        Private("datasets:Dataset@_fingerprint", "the content of a data set, for the cache of tokens and resume",
                "a run continues on data that changed"),
        Private("datasets.builder:BuilderConfig.data_files", "the files of a folder of data, for their digest",
                "a run continues on data that changed"),
    ],
    "ZeRO": [
        Private("deepspeed.runtime.zero.partition_parameters:Init@ds_id", "marks weights that ZeRO-3 has sharded",
                "processes decode apart from each other and wait for ever"),
    ],
    "GGUF": [
        Private("transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS", "the frequencies of Llama 3's positions",
                "long prompts get wrong positions in llama.cpp"),
    ],
    "command lines": [
        Private(f"argparse:{name}", "moves the most used options to the start of the help", "--help fails")
        for name in ("ArgumentParser@_mutually_exclusive_groups", "ArgumentParser@_action_groups",
                     "ArgumentParser@_group_actions", "ArgumentParser._get_formatter")
    ] + [
        Private("argparse:ArgumentParser@_option_string_actions", "suggests the nearest option", "a wrong word fails"),
        Private("argparse:ArgumentParser@_actions", "the options of docs/reference", "the pages are not made"),
        Private("argparse:_SubParsersAction", "the commands of docs/reference", "the pages are not made"),
        Private("argparse:HelpFormatter._format_args", "the values of docs/reference", "the pages are not made"),
        Private("argparse:HelpFormatter._expand_help", "the texts of docs/reference", "the pages are not made"),
    ],
}  # fmt: skip
