"""The environment for other trainers: an episode by hand, and TRL's trainer that calls its tools."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tripletune.data_builders.readers.hotpotqa import read_questions
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.rag.retrievers import open_retriever
from tripletune.rag.triple_store import open_triples
from tripletune.train.environment import SearchEnvironment, environment_rows


@pytest.fixture
def episode(tmp_path: Path) -> SearchEnvironment:
    write_world(WorldOptions(seed=5, train=0, validation=0, test=4, common_knowledge=0), tmp_path)
    retriever = open_retriever("bm25", tmp_path / "test.corpus.jsonl", tmp_path / "index")
    triples = open_triples(tmp_path / "test.triples.jsonl", tmp_path / "index" / "triples.sqlite")
    return SearchEnvironment(list(read_questions(tmp_path / "test.jsonl")), retriever, triples, top_k=2)


def test_an_episode(episode: SearchEnvironment) -> None:
    *others, last = (row["id"] for row in environment_rows([*episode._questions.values()]))
    assert episode.reset(id=last) == f"\n{episode.question.question}"
    found = asyncio.run(episode.search(episode.question.question))
    assert found.startswith("(S> ")
    assert len(found.split("\n")) == 2
    wanted = {episode.question.passages[place].id for place in episode.question.supporting}
    share = len(wanted & set(episode._found)) / len(wanted)
    assert share > 0
    assert episode.get_reward() == pytest.approx(0.2 * share - 0.02)
    assert not episode.done
    episode.answer(episode.question.answers[0])
    assert episode.get_reward() == pytest.approx(1 + 0.2 * share - 0.02)
    assert episode.done
    episode.answer("x")
    assert not asyncio.run(episode.search("who")).startswith("(S>")
    assert episode.get_reward() == pytest.approx(1 + 0.2 * share - 0.02)
    episode.reset(id=others[0])
    assert (episode.get_reward(), episode.searches, episode.done) == (0.0, 0, False)
    assert episode.reset(seed=1) == episode.reset(seed=1)
    episode._triples = None
    assert "(S>" not in asyncio.run(episode.search("who"))


def test_trl_calls_its_tools(episode: SearchEnvironment, tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja").read_text()
    question = next(iter(episode._questions.values()))
    replies = [
        '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>' % question.question,  # noqa: UP031
        '<tool_call>\n{"name": "answer", "arguments": {"text": "%s"}}\n</tool_call>' % question.answers[0],  # noqa: UP031
        "It is known.",
    ]
    read, made = [], [episode]

    def another() -> SearchEnvironment:
        made.append(SearchEnvironment([question], episode._retriever, episode._triples, 2))
        return made[-1]

    def write(prompts: list[list[int]], *_: object, **__: object) -> tuple[list[list[int]], None]:
        read.append(tokenizer.decode(prompts[0]))
        return [tokenizer(f"{replies[len(read) - 1]}<|im_end|>")["input_ids"]] * len(prompts), None

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    # Byte by byte a conversation is long.
    model.config.max_position_embeddings = 8192
    batches = {"max_steps": 1, "per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4000}
    trainer = GRPOTrainer(
        model,
        args=GRPOConfig(str(tmp_path / "run"), **batches, report_to="none", use_cpu=True, bf16=False),
        train_dataset=Dataset.from_list(environment_rows([question] * 2)),
        processing_class=tokenizer,
        environment_factory=another,
    )
    trainer._generate_single_turn = write
    trainer.train()
    assert question.question in read[0]
    assert "(S> " in read[1]
    assert [one.done for one in made[1:]] == [True, True]
    assert [one.searches for one in made[1:]] == [1, 1]
    assert made[1].get_reward() > 1
