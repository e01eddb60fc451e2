"""Tiny models, tokenizers and records for every test; nothing is downloaded, everything runs on one core."""

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import pytest

from tests.cli import write_lines
from tripletune.core import plugins
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (
    "Plan the next step for the question. Reply [NO_RETRIEVAL], [SUFFICIENT] or [SUBQ] and a sub-query. "
    "Retrieved Graph Information: (S> Ada Lovelace| P> born in| O> London), (S> London| P> capital of| O> England) "
    "Question: Where was the first programmer born? Answer the question with the facts found."
)
GRAPH_WIDTHS = {"graph_hidden_width": 16, "graph_layers": 2, "graph_heads": 2, "projector_width": 16}
# No test is timed: on a busy machine a first example may take seconds.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Of every run on a tiny model.
RUN = {
    "model.dtype": "float32", "model.lora_dropout": 0.1, "train.learning_rate": 0.01, "train.bf16": "false",
    "train.logging_steps": 1, "train.eval_max_new_tokens": 4,
}  # fmt: skip


def _hide_installed_plugins():
    """Tests see the systems, tasks and so on of this tree, and of packages that a test makes."""
    all_installed = plugins._added_modules.__wrapped__
    strangers = {entry.dist.name for entries in all_installed().values() for entry in entries.values() if entry.dist}

    @functools.cache
    def installed():
        added = {}
        for package, entries in all_installed().items():
            added[package] = {
                name: entry for name, entry in entries.items() if not entry.dist or entry.dist.name not in strangers
            }
        return added

    plugins._added_modules = installed


_hide_installed_plugins()


def pytest_collection_modifyitems(items):
    """Files with slow tests begin first, so that no process has one left when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Keep torch on one thread: several test processes share the cores."""
    import torch

    torch.set_num_threads(1)


def _tokenizer():
    """A byte-level tokenizer of 384 tokens with a ChatML-like template, trained here on `TEXT`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([TEXT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=MARKERS[0], eos_token=MARKERS[2], pad_token=MARKERS[3]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(family, vocabulary):
    """The configuration of a tiny model: 2 layers, 32 numbers per token, and what is special about its family."""
    import transformers

    if family == "t5":
        return transformers.T5Config(
            vocab_size=vocabulary, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=3,
            eos_token_id=2, pad_token_id=3, initializer_factor=0.3,
        )  # fmt: skip
    common = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 3,
        # Wide weights: replies differ between inputs and no two logits are nearly equal.
        "initializer_range": 0.3,
    }
    sliding = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
    special: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
        "smollm2": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
        "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
        "gemma": (transformers.GemmaConfig, {"head_dim": 8}),
        "gemma2": (
            transformers.Gemma2Config,
            {**sliding, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0},
        ),
        "gemma3": (transformers.Gemma3TextConfig, {**sliding, "final_logit_softcapping": 3.0}),
        "granite": (transformers.GraniteConfig, {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
        # The one with learned positions, counted from the start.
        "gpt2": (transformers.GPT2Config, {}),
        "cohere": (transformers.CohereConfig, {"logit_scale": 0.25}),
        # Its attention kernel can't be set once it is built.
        "gptj": (transformers.GPTJConfig, {"rotary_dim": 4}),
        # A convolution beside an attention layer, and positions that the mask stands for.
        "lfm2": (transformers.Lfm2Config, {"layer_types": ["conv", "full_attention"]}),
        "mamba": (transformers.MambaConfig, {"state_size": 4}),
    }
    kind, more = special[family]
    return kind(**{**common, **more})


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A folder with the tiny byte-level tokenizer and its ChatML-like template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    _tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder):
    """A fresh tokenizer, so that one test's additions do not reach the next."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, tokenizer_folder):
    """Folder of a tiny language model of a family (the names in `_config`) and its tokenizer, made once a session."""
    made: dict[str, Path] = {}

    def make(family):
        if family not in made:
            import torch
            from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
            folder = tmp_path_factory.mktemp(f"model_{family}")
            kind = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
            torch.manual_seed(7)
            kind.from_config(_config(family, len(tokenizer))).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[family] = folder
        return made[family]

    return make


def _other_tokenizer():
    """A tokenizer like Gemma's, trained on `TEXT`: spaces as "▁", rare bytes as "<0x0A>", pieces of several words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace(" ", "▁")
    markers = ["<pad>", "<eos>", "<bos>", "<turn>", "<end>"]
    core.train_from_iterator(
        [TEXT] * 4, trainers.BpeTrainer(vocab_size=150, special_tokens=markers, show_progress=False)
    )
    trained = json.loads(core.to_str())["model"]
    vocabulary = trained["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    core.model = models.BPE(vocabulary, [tuple(merge) for merge in trained["merges"]], byte_fallback=True)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        additional_special_tokens=["<turn>", "<end>"],
    )  # fmt: skip
    tokenizer.chat_template = (
        "<bos>{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def other_family(tmp_path_factory):
    """Folder of a tiny Gemma 3 with a tokenizer of its own (`_other_tokenizer`)."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("other_family")
    tokenizer = _other_tokenizer()
    torch.manual_seed(5)
    config = _config("gemma3", len(tokenizer))
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 2, 1, 0
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny_model):
    """Folder of a tiny Llama with grouped-query attention, and its tokenizer."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def tiny_t5(tiny_model):
    """Folder of a tiny encoder-decoder, and its tokenizer."""
    return tiny_model("t5")


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory, tokenizer_folder):
    """A sentence-transformers folder: a tiny BERT with mean pooling, 16 numbers a vector."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    try:
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    except ImportError:
        from sentence_transformers.models import Pooling, Transformer

    core = tmp_path_factory.mktemp("bert")
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=128, pad_token_id=3, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(core)
    tokenizer.save_pretrained(core)
    SentenceTransformer(modules=[Transformer(str(core)), Pooling(16, "mean")], device="cpu").save(str(folder))
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the model hub: `hub.add("me/model", folder, "main", "v1")`."""
    from huggingface_hub import constants

    from tests.fakes import Hub

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Hub(tmp_path / "hub")


@pytest.fixture
def make_graph_llm(tiny_model, tiny_encoder):
    """Builds a small `GraphLLM` and its processor: `make_graph_llm("qwen2", graph_dropout=0.0)`."""

    def make(family="llama", **options):
        import torch

        from tripletune.models.graph_llm import build_graph_llm

        torch.manual_seed(11)
        settings = {**GRAPH_WIDTHS, "dtype": torch.float32, **options}
        return build_graph_llm(str(tiny_model(family)), encoder=str(tiny_encoder), **settings)

    return make


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """`serve(model)`: `--model tmp_path/model` is that object, a Graph-LLM that a test writes."""

    def put(model):
        monkeypatch.setattr("tripletune.rag.graph_models.check_model_folder", lambda spec: None)
        monkeypatch.setattr("tripletune.llm.graph_generator.load_generator", lambda spec, **options: model)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text('{"model_type": "graph_llm", "base_model": "pypi:none"}')
        return model

    return put


@pytest.fixture(scope="session")
def records():
    """Twelve records of four questions, both tasks, all actions, with and without graph."""
    found: list[Record] = []
    people = [("Ada Lovelace", "London", "England"), ("René Descartes", "La Haye", "France")]
    people += [("紫式部", "京都", "日本"), ("Zeno (of Elea), the younger", "Elea", "Magna Graecia")]
    for number, (name, place, land) in enumerate(people):
        question = f"In which country was {name} born?"
        first = Step(question, (Triple(name, "born in", place), Triple(name, "known for", f"work {number}")))
        second = Step(f"In which country is {place}?", (Triple(place, "located in", land),), f"{place} is in {land}.")
        key = f"q{number}"
        found += [
            Record(f"{key}-p0", key, "planning", question, Action.SUBQ, (first,), f"In which country is {place}?"),
            Record(f"{key}-p1", key, "planning", question, Action.SUFFICIENT, (first, second)),
            Record(f"{key}-a", key, "answering", question, Action.SUFFICIENT, (first, second), answers=(land,)),
        ]
    found[3] = Record("q1-n", "q1", "planning", "What is two plus two?", Action.NO_RETRIEVAL)
    found[5] = Record("q1-d", "q1", "answering", "What is two plus two?", Action.NO_RETRIEVAL, answers=("four",))
    return found


def _writer(default):
    """A function that writes rows as `<split>-00000.jsonl`, by default into this folder, and returns the folder."""

    def write(rows, split="train", folder=None):
        target = folder or default
        target.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in rows)
        (target / f"{split}-00000.jsonl").write_text("".join(lines), encoding="utf-8")
        return target

    return write


@pytest.fixture
def write_records(tmp_path):
    """Writes records as `<split>-00000.jsonl` in a folder and returns the folder."""
    return _writer(tmp_path / "records")


@pytest.fixture(scope="session")
def embeddings(tiny_encoder):
    """Node and edge vectors of the tiny encoder."""
    from tripletune.models.graph_llm.embeddings import LiveEmbeddings

    return LiveEmbeddings(str(tiny_encoder), 16)


@pytest.fixture
def make_batch(embeddings):
    """Makes forward arguments by hand: ids, mask, graphs and (with `labels`) labels, padded right or left."""

    def make(processor, records, labels=True, side="right"):
        import torch

        from tripletune.models.graph_llm.graphs import batch_graphs
        from tripletune.train.rows.batches import pad_batch

        prompts = [processor.encode_input(record.input) for record in records]
        ends = [processor.encode_label(record)[0] if labels else [] for record in records]
        lists = [[*p.input_ids, *e] for p, e in zip(prompts, ends)]
        ids, mask = pad_batch(lists, 3), pad_batch([[1] * len(row) for row in lists], 0)
        if side == "left":
            shifts = [ids.shape[1] - len(row) for row in lists]
            ids, mask = (torch.stack([row.roll(n) for row, n in zip(rows, shifts)]) for rows in (ids, mask))
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if labels:
            batch["labels"] = torch.full_like(ids, -100)
            for row, (prompt, end) in enumerate(zip(prompts, ends)):
                start = len(prompt.input_ids)
                batch["labels"][row, start : start + len(end)] = torch.tensor(end)
        if processor.settings.use_graph:
            batch["graphs"] = batch_graphs([graph for prompt in prompts for graph in prompt.graphs], embeddings.vectors)
        return batch

    return make


@pytest.fixture
def make_config(tmp_path, tiny_model, tiny_encoder, records, write_records):
    """A run on tiny models that takes a second: `make_config({"train.epochs": 2}, family="qwen2")`."""

    def make(overrides=None, family="llama"):
        from tripletune.core.config import load_config
        from tripletune.train.tasks.ras import GraphConfig

        # Training leaves out what validation holds, so these are other questions.
        held_out = [replace(record, question=f"{record.question} Held out.") for record in records[:4]]
        write_records(held_out, "validation")
        data = write_records(records)
        values = RUN | {f"model.{name}": width for name, width in GRAPH_WIDTHS.items()} | {
            "output_dir": str(tmp_path / "run"), "resume": True, "model.base": str(tiny_model(family)),
            "model.encoder": str(tiny_encoder), "model.graph_dropout": 0.3, "data.train": str(data),
            "train.epochs": 1, "train.save_steps": 1000,
        }  # fmt: skip
        return load_config(GraphConfig, None, values | (overrides or {}))

    return make


@pytest.fixture(scope="session")
def extraction_pairs():
    """Twelve text-to-triples pairs: of different lengths, with titles, without facts, in several scripts."""
    from tripletune.core.data.pairs import ExtractionPair

    names = [("Ada Lovelace", "London"), ("René Descartes", "La Haye"), ("紫式部", "京都"), ("Zeno (of Elea)", "Elea")]
    found = []
    for number in range(12):
        name, place = names[number % 4]
        facts = [Triple(name, "born in", place), Triple(name, "known for", f"work {number}")][: 1 + number % 2]
        text = f"{name} was born in {place}." + f" {name} is known for work {number}." * (number % 2)
        found.append(ExtractionPair(f"p{number}", text, name if number % 3 == 0 else "", tuple(facts), "made"))
    found[5] = ExtractionPair("p5", "Nothing is said here at all.", "", (), "made")
    return found


@pytest.fixture
def make_extraction_config(tmp_path, tiny_llama, tiny_t5, extraction_pairs):
    """A text-to-triples run on tiny models that takes a second: `make_extraction_config({...}, seq2seq=True)`."""

    def make(overrides=None, seq2seq=False):
        from tripletune.core.config import load_config
        from tripletune.train.tasks.text_to_triples import PairConfig

        write = _writer(tmp_path / "pairs")
        # Training leaves out what validation holds, so these are other texts.
        held_out = [replace(pair, text=f"{pair.text} Held out.") for pair in extraction_pairs[:5]]
        write(held_out, "validation")
        data = write(extraction_pairs)
        values = RUN | {
            "output_dir": str(tmp_path / "run"), "model.base": str(tiny_t5 if seq2seq else tiny_llama),
            "model.lora_rank": 4, "data.train": str(data), "train.epochs": 1, "train.batch_size": 2,
            "train.gradient_accumulation": 2, "train.eval_steps": None, "train.eval_generate_records": 2,
            "train.save_steps": 1000,
        }  # fmt: skip
        return load_config(PairConfig, None, values | (overrides or {}))

    return make


@pytest.fixture(scope="session")
def make_trajectory():
    """A CIRAG trajectory of two rounds with short turns: `make_trajectory(number, teacher="oracle")`."""
    from tripletune.core.data.pairs import Trajectory
    from tripletune.rag.systems.cirag.integration import Decision, Round, decision_text, messages_of

    def facts(name):
        return tuple(Triple(name, "saw", f"Kelm {number}") for number in range(2))

    def make(number, teacher="oracle"):
        name, other = f"Ada {number}", facts(f"Bo {number}")
        first = Decision("One.", facts(name)[:1], f"Who is {name}?")
        turns = (
            *messages_of("Go.", f"Whom did {name} see?", other, [Round(facts(name), first)]),
            {"role": "assistant", "content": decision_text(Decision("All.", other[:1], ""))},
        )
        flags = tuple(turn["role"] == "assistant" for turn in turns)
        return Trajectory(f"q{number}:0", f"q{number}", "cirag.integrate", teacher, turns, flags)  # type: ignore[arg-type]

    return make


@pytest.fixture
def write_trajectories(tmp_path):
    """Writes trajectories as `<split>-00000.jsonl` in a folder and returns the folder."""
    return _writer(tmp_path / "trajectories")


@pytest.fixture
def make_student_config(tmp_path, tiny_llama, make_trajectory, write_trajectories):
    """A distillation run on a tiny model that takes a second; two of its training questions are validation's."""

    def make(overrides=None, kind=None):
        from tripletune.core.config import load_config
        from tripletune.train.tasks.cirag_distill import StudentConfig

        data = write_trajectories([make_trajectory(number) for number in range(8)])
        write_trajectories([make_trajectory(number) for number in (0, 1, 8)], "validation")
        values = RUN | {
            "output_dir": str(tmp_path / "run"), "model.base": str(tiny_llama), "model.lora_rank": 4,
            "data.train": [str(data)], "data.max_tokens": 1024, "data.max_prompt_tokens": 900, "train.batch_size": 2,
            "train.eval_generate_records": 2,
        }  # fmt: skip
        if kind is not None and not issubclass(kind, StudentConfig):
            # Plain chats are not shortened.
            del values["data.max_prompt_tokens"]
        return load_config(kind or StudentConfig, None, values | (overrides or {}))

    return make


@pytest.fixture
def make_task(make_config, make_extraction_config, make_student_config, tiny_model, other_family):
    """A thing to train on tiny models: `make_task("text_to_triples", {...}, seq2seq=True)`; nothing is loaded yet."""

    def make(name, overrides=None, **options):
        from tripletune.core.plugins import load_from

        kind = load_from("tripletune.train.tasks", name, "training task").TASK
        if name == "ras":
            return kind(make_config(overrides, **options))
        if name == "text_to_triples":
            return kind(make_extraction_config(overrides, **options))
        if name == "chat":
            return kind(make_student_config(overrides, kind.Config))
        if name == "cirag_on_policy":
            teacher = other_family if options.get("other") else tiny_model("smollm2")
            own = {"train.teacher": str(teacher), "train.max_reply_tokens": 5}
            return kind(make_student_config({**own, **(overrides or {})}, kind.Config))
        return kind(make_student_config(overrides, **options))

    return make


@pytest.fixture
def begin_task(make_task):
    """As `make_task`, with model and rows."""

    def begin(*args, **options):
        task = make_task(*args, **options)
        task.begin()
        return task

    return begin


@pytest.fixture
def run_recipe(monkeypatch, capsys):
    """Runs a recipe's command line in this process and returns its error message ("" for success)."""
    import runpy
    import sys

    def call(argv):
        monkeypatch.setattr(sys, "argv", argv)
        code: Any = 0
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        if not code:
            return ""
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert code == 2
        return error

    return call


@pytest.fixture
def offline_wandb(tmp_path, monkeypatch):
    """W&B, whose runs go into the test's own folder.

    W&B reads its variables once in a process. Without its `teardown`, the folder would be that of the first test.
    """
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "DATA_DIR": str(tmp_path / "d")}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.teardown()


@pytest.fixture
def two_pages(tmp_path):
    """Options for two passages and their triples."""
    passages = [
        {"title": "Glass Harbour", "text": "A novel by Ida Morn."},
        {"title": "Ida Morn", "text": "Born in Velsund."},
    ]
    facts = [[["Glass Harbour", "Author", "Ida Morn"]], [["Ida Morn", "Birthplace", "Velsund"]]]
    corpus, triples = tmp_path / "corpus.jsonl", tmp_path / "triples.jsonl"
    write_lines(corpus, passages)
    write_lines(triples, ({**p, "triples": t} for p, t in zip(passages, facts)))
    return ["--corpus", str(corpus), "--triples", str(triples), "--top-k", "1"]
