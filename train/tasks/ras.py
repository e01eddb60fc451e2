"""Train the RAS Graph-LLM on planning and answering records (RAS, sections 3.4 and D.2).

Defaults are the paper's (section D.2, table 8) or, if the paper gives none, those of the authors' code. Records are
tokenised once, and every distinct node and edge string of their graphs is embedded once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from tripletune.core.data.graph_settings import GraphSettings, PromptSettings, values_of
from tripletune.core.data.records import TASKS, ModelInput, Record, check_evidence
from tripletune.models.fingerprints import encoder_fingerprint, tokenizer_fingerprint
from tripletune.train.settings import RunConfig
from tripletune.train.sources import Examples, Sources
from tripletune.train.tasks import shared_by_processes
from tripletune.train.tasks._hindsight import HindsightTask
from tripletune.train.tasks._ras_rows import (
    answer_shares,
    keys_of_question,
    loop_of_rows,
    records_of_row,
    searches_or_has_read,
)
from tripletune.train.tasks._ras_settings import GraphConfig

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel

    from tripletune.models.graph_llm import GraphLLM
    from tripletune.models.graph_llm.embeddings import EmbeddingTable
    from tripletune.models.graph_llm.processor import GraphLLMProcessor
    from tripletune.models.lora import Tune
    from tripletune.train.engine import EngineMixin
    from tripletune.train.rows.cache import Row
    from tripletune.train.rows.hindsight import TaughtQuery
    from tripletune.train.rows.hindsight_prompts import RecordHindsight
    from tripletune.train.rows.records import RecordCollator


class GraphTask(HindsightTask):
    """Trains a Graph-LLM on records."""

    Config: ClassVar[type[RunConfig]] = GraphConfig
    usage = "--config smollm2_135m_ras_cpu --model.base MODEL --data.train runs/subq"
    unit: str = "records"
    loss_parts: ClassVar[tuple[str, ...]] = TASKS
    published: ClassVar[str] = "the paper: 2 x 2, 4 GPUs (16 if per device); the authors' code: 4"
    config: GraphConfig
    processor: GraphLLMProcessor

    def __init__(self, config: GraphConfig) -> None:
        """Name the rows: in the interleaved order, a row holds all records of a question."""
        super().__init__(config)
        facts = "" if config.data.evidence == "text" else " --triples TRIPLES"
        self.next_command = f'tripletune ask "QUESTION" --model {{run}} --corpus CORPUS{facts}   (scores: eval run)'
        if config.data.prompt_order == "interleaved":
            self.unit = "questions"

    @cached_property
    def sources(self) -> Sources:
        """Records of the tasks to train; the others are skipped while reading, so one data set serves all ablations."""
        tasks = tuple(self.config.data.tasks)
        is_fixed = self.config.data.stop == "fixed"
        options: dict[str, Any] = {"selection": tasks, "name": f"records of the tasks {', '.join(tasks)}"}
        if is_fixed:
            options["selection"] = (*tasks, "no stop")
            options["name"] += ", without those that stop or answer unread"
            options["left_out"] = "left_out:_they_stop_or_answer_unread"

        def keep(record: Record) -> bool:
            """Take a record of the tasks; if the number of searches is fixed, none that decides to stop."""
            if record.task not in tasks:
                return False
            return not is_fixed or searches_or_has_read(record)

        return self.source_pair(
            records_of_row, keep=keep, keys_of=keys_of_question, pairs=self.learns_from_pairs, **options
        )

    def load(self) -> tuple[GraphLLM | PeftModel, GraphLLMProcessor]:
        """Build the Graph-LLM with its adapter; rows are joined end to end only if the model keeps them apart.

        The order matters: the adapter is put on before a trained one is taken over into it, and `end_to_end` is set
        last, because it depends on the language model's attention as it was built.
        """
        from transformers import set_seed

        from tripletune.core.data.rendering import load_instructions
        from tripletune.models.attention import lies_end_to_end
        from tripletune.models.graph_llm import add_adapter, build_graph_llm
        from tripletune.models.lora import take_over

        self.refuse_sharding()
        set_seed(self.config.seed)
        model = self.config.model
        data = self.config.data
        processor_settings = values_of(PromptSettings, data)
        for task, text in load_instructions(data.planning_prompt, data.answering_prompt).items():
            processor_settings[f"{task}_instruction"] = text
        base, processor = build_graph_llm(
            model.base,
            attention=None if model.attention == "auto" else model.attention,
            processor_settings=processor_settings,
            **model.load_arguments(),
            **values_of(GraphSettings, model),
        )
        adapted = add_adapter(base, tune=cast("Tune", model.tune), **model.lora_arguments())
        if model.adapter is not None:
            take_over(adapted, model.adapter, model.base)
        longest = data.max_input_tokens + data.max_label_tokens
        base.end_to_end = model.attention == "blocks" and lies_end_to_end(base.language_model, longest)
        return adapted, processor

    @property
    def graph_llm(self) -> GraphLLM:
        """The model without PEFT's wrapper, which only an adapted model has."""
        model = self.model
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        return cast("GraphLLM", model)

    @cached_property
    def embedding_table(self) -> EmbeddingTable | None:
        """Embeddings of all node and edge strings of both sources; None for models without graph.

        The folder's name says what the vectors depend on, so that runs share it: sources, pooling, encoder, and the
        type in which this hardware computes them, since bfloat16 vectors differ from float32 ones.
        """
        if not self.config.model.use_graph:
            return None
        from tripletune.models.graph_llm.embeddings import TABLE, EmbeddingTable
        from tripletune.models.specs import best_dtype
        from tripletune.train.rows.cache import cached_rows
        from tripletune.train.rows.records import graph_strings

        encoder = self.config.model.encoder
        pooling = self.processor.settings.graph_pooling
        sources = [source for source in self.sources if source is not None]
        strings_key = [[source.digest for source in sources], pooling]
        vectors_key = [*strings_key, encoder, encoder_fingerprint(encoder), str(best_dtype())]
        digest = hashlib.sha256(json.dumps(vectors_key).encode()).hexdigest()
        folder = self.cache / f"vectors-{digest[:16]}"
        if (folder / TABLE).exists():
            # The strings need not be collected again.
            return EmbeddingTable(folder)
        parts = []
        for source in sources:
            parts += [partial(graph_strings, part, pooling) for part in source.parts()]
        strings = cached_rows(strings_key, self.cache, parts, {"key": "int64", "text": "string"}, "strings")
        return EmbeddingTable.build(strings["text"], encoder, folder, strings.data.column("key").to_numpy())

    def rows(self, source: Examples, cache: Path) -> Dataset:
        """Tokenise a source's records; the key holds everything that changes a row, since other runs reuse the rows.

        Whoever makes rows depend on another setting adds it to the key; otherwise a run with another value would train
        on stored rows of the old one.
        """
        from tripletune.train.rows.cache import PAIR, TEACHER_IDS, TEXT, cached_rows, rows_meta
        from tripletune.train.rows.pairs import rows_of_pairs
        from tripletune.train.rows.records import encode_rows

        processor = self.processor
        # An evaluation counts all label tokens, also those that training leaves out.
        learn_copies = self.config.data.learn_copies or source is not self.sources.train
        long_labels = self.config.data.long_labels
        columns = {**TEXT, "spans": "[[int32]]"}
        if self.embedding_table is not None:
            columns |= {"nodes": "[[int64]]", "edges": "[[int64]]"}
            columns |= {"sources": "[[int32]]", "targets": "[[int32]]", "subgraph": "[[int32]]"}
        # Empty prompts show a change of the code that renders them.
        empty_prompts = [processor.prompt(ModelInput(task, "?"), self.config.data.evidence) for task in TASKS]
        settings = dataclasses.asdict(processor.settings)
        # It is measured from the rows.
        del settings["loop"]
        tokenizer = tokenizer_fingerprint(processor.tokenizer)
        key = [
            "records with counted triples",
            source.digest,
            settings,
            tokenizer,
            empty_prompts,
            learn_copies,
            long_labels,
        ]
        make: Callable[..., Iterator[Row]] = partial(
            encode_rows, processor=processor, learn_copies=learn_copies, long_labels=long_labels
        )
        # An evaluation compares losses of labels, which need no teacher.
        if self.hindsight is not None and source is self.sources.train:
            make = partial(make, hindsight=self.hindsight)
            key.append(self.hindsight.text)
            columns[TEACHER_IDS] = "[[int32]]"
        if self.learns_from_pairs:
            make = partial(rows_of_pairs, make=make)
            columns |= PAIR
        rows = cached_rows(key, cache, source.works(make), columns)
        check_evidence("data.evidence", self.config.data.evidence, rows_meta(rows), ", ".join(self.config.data.train))
        return rows

    def reason_for_no_rows(self, counts: Mapping[str, int]) -> str:
        """Say that no record has a label that is short enough, or no pair two of them."""
        from tripletune.train.rows.pairs import PAIRS_LEFT_OUT
        from tripletune.train.rows.records import RecordCount

        skipped = counts.get(RecordCount.SKIPPED_LABELS, 0)
        left_out = f"{skipped:,} records"
        if counts.get(PAIRS_LEFT_OUT):
            left_out = f"{counts[PAIRS_LEFT_OUT]:,} pairs"
        elif not skipped:
            return ""
        limit = self.config.data.max_label_tokens
        return (
            f"all {left_out} have labels of more than data.max_label_tokens {limit}, which data.long_labels skip "
            "leaves out: raise it"
        )

    def prepare(self) -> None:
        """Warm up the graph modules, on request; before the trainer wraps the model (`_graph_warmup`)."""
        steps = self.config.train.graph_warmup_steps
        if steps:
            from tripletune.train.tasks._graph_warmup import warm_up

            warm_up(self.graph_llm, self.train, self.collator(), steps, self.config.seed)

    def warnings(self) -> list[str]:
        """Warn of a prompt format of another model family, and of labels that are cut, left out or needed by the loop.

        These are no errors, since a user may want both; the run's log and `--dry-run` show them.
        """
        from tripletune.train.rows.cache import rows_meta

        warnings = []
        # A tokenizer without template gets the template of LLaMA 2.
        template = str(getattr(self.processor.tokenizer, "chat_template", None) or "[INST]")
        if self.config.data.prompt_format == "llama2" and "[INST]" not in template:
            warnings.append("data.prompt_format llama2: the base model's chat template has no [INST]; use chat")
        if not self.config.data.learn_copies and self.loop.get("first_query") == "generated":
            warnings.append(
                "data.learn_copies false: the loop of these records searches for the planner's first sub-query, which "
                "is not learned where it repeats the question; set data.learn_copies true"
            )
        limit = self.config.data.max_label_tokens
        for split, rows in (("training", self.train), ("validation", self.validation)):
            if rows is None:
                continue
            counts = rows_meta(rows)
            for kind, happened in (("truncated_labels", "were cut"), ("skipped_labels", "are left out")):
                if counts.get(kind):
                    warnings.append(
                        f"{counts[kind]:,} {split} label(s) of more than {limit} tokens {happened} (data.long_labels)"
                    )
        return warnings

    def trainer(self) -> EngineMixin | None:
        """Train on pairs with TRL, if the run has a preference loss, or with a teacher that sees later facts."""
        if self.learns_from_pairs:
            from tripletune.train.trl_trainers import PreferenceTrainer

            return PreferenceTrainer(self)
        return super().trainer()

    def hindsight_kind(self) -> type[RecordHindsight]:
        """Hindsight of records."""
        from tripletune.train.rows.hindsight_prompts import RecordHindsight

        return RecordHindsight

    def hindsight_collator(self) -> RecordCollator:
        """The collator of all rows."""
        return self.collator()

    def query_ends(self) -> list[int]:
        """The end token of labels."""
        return [self.processor.tokenizer.eos_token_id]

    def query_limit(self, query: TaughtQuery) -> int:
        """What `data.max_label_tokens` leaves after the action marker."""
        return int(self.config.data.max_label_tokens - (query.query - query.start))

    def collator(self) -> RecordCollator:
        """Make batches with the graphs' vectors and the loss weights of the settings."""
        from tripletune.train.rows.records import RecordCollator

        train = self.config.train
        return RecordCollator(
            self.processor.tokenizer.pad_token_id,
            self.embedding_table,
            action_weight=train.action_weight,
            answer_weight=train.answer_weight,
            per_record=train.loss_per == "record",
            hindsight_weight=train.hindsight_weight,
            graph_token_id=self.processor.graph_token_id,
        )

    @cached_property
    def scored(self) -> list[Record]:
        """The validation records whose replies are scored."""
        from tripletune.train.text import choose_examples

        records: Iterable[Record] = self.sources.validation or []
        return choose_examples(records, self.config.train.eval_generate_records, lambda record: record.id)

    def prompt_and_expected(self, sample: Record) -> tuple[list[int], str]:
        """The prompt as inference renders it, and the label as records store it."""
        return self.processor.prompt(sample.input, self.config.data.evidence), sample.label

    def generate_replies(self, model: PreTrainedModel) -> list[str]:
        """Generate as inference does, with the embeddings that are already computed."""
        from tripletune.llm.graph_generator import LocalGenerator

        train = self.config.train
        generator = LocalGenerator(model, self.processor, train.eval_batch_size, self.embedding_table)

        def reply(inputs: Sequence[ModelInput]) -> list[str]:
            """The replies to the inputs of this process, in their order."""
            return [completion.text for completion in generator.generate_many(inputs, train.eval_max_new_tokens)]

        return shared_by_processes(model, [record.input for record in self.scored], reply)

    def metrics(self, replies: list[str]) -> dict[str, Any]:
        """Score replies as `tripletune eval records` does, so that both report the same numbers."""
        from tripletune.eval.suites.records import score_predictions

        return score_predictions(self.scored, replies)

    def metric_names(self) -> list[str]:
        """Names of losses and scores; an evaluation has no loss of a task whose records are not trained on."""
        trained_tasks = set(self.config.data.tasks)
        if self.learns_from_pairs:
            # A pair has one loss, which is not divided between planning and answering.
            trained_tasks = set()
        absent = {f"loss_{task}" for task in TASKS if task not in trained_tasks}
        return [name for name in super().metric_names() if name not in absent]

    def count_name(self, name: str) -> str:
        """The name of a count in the output, without the counts that `loop` and the check of the evidence read."""
        if name.startswith(("steps", "first_searches")):
            return ""
        return super().count_name(name)

    @cached_property
    def loop(self) -> dict[str, Any]:
        """The options of the loop as the training data have them, which go into the processor's configuration."""
        return loop_of_rows(self.train, self.config, self.sources.train.paths)

    def save(self, folder: Path) -> None:
        """Write configuration and processor; for an adapter, PEFT writes no configuration of the model."""
        self.processor.settings.loop = self.loop
        self.model.config.save_pretrained(folder)
        self.processor.save_pretrained(folder)

    def notes(self) -> list[str]:
        """Say how much the short answers count in the loss, and whether rows are padded, which costs time.

        In a loss on pairs, all pairs count alike.
        """
        if self.learns_from_pairs:
            return []
        shares = answer_shares(self.train, self.config.train)
        lines = [
            f"loss per {self.config.train.loss_per}: answering records are {shares.of_records:.0%} of the records and "
            f"have {shares.of_weights:.0%} of the weight",
            f"the rows of a batch {self._layout_of_batches()}",
        ]
        return lines + super().notes()

    def _layout_of_batches(self) -> str:
        """How the rows of a batch lie in memory, and why they are padded if they are."""
        base = self.graph_llm
        attention = self.config.model.attention
        if attention != "blocks":
            return f"are padded: model.attention is {attention}, not blocks"
        if not base.end_to_end:
            name = type(base.language_model).__name__
            return f"are padded: {name} computes other values for joined rows"
        if not base.labels_only:
            return "are padded: the model computes the logits of all tokens"
        return "lie end to end, without padding"


TASK = GraphTask
