import asyncio
import json

import pytest

from tripletune.core.calls import CallError, Sampling
from tripletune.data_builders.world.build import WorldOptions, generate_world, write_world
from tripletune.data_builders.world.oracle import WorldOracle

OPTIONS = WorldOptions(seed=2, train=0, validation=0, test=10, common_knowledge=0)


@pytest.fixture(scope="module")
def world():
    return generate_world(OPTIONS, "test")


def ask(oracle, text):
    return asyncio.run(oracle.complete([{"role": "user", "content": text}], Sampling())).text


def test_the_world_on_disk_gives_the_same_oracle(world, tmp_path):
    write_world(OPTIONS, tmp_path)
    article = next(iter(world.articles.values()))
    prompt = f"Title: {article.title}\nText: {article.text}"
    assert ask(WorldOracle.open(tmp_path, "test"), prompt) == ask(WorldOracle(world), prompt)
    found = json.loads(ask(WorldOracle(world), prompt))
    assert found["triples"] == [triple.as_list() for triple in article.triples]
    assert found["entities"][0] == article.title
    with pytest.raises(ValueError, match="has no split 'train'; it has test"):
        WorldOracle.open(tmp_path, "train")


def test_it_answers_from_passages_only_when_they_hold_every_fact(world):
    oracle = WorldOracle(world)
    for question in world.questions:
        texts = [f"{title}\n{world.articles[title].text}" for title in question.helpful]
        asked = "\n\n".join(["Passages:\n" + "\n\n".join(texts), f"Question: {question.text}"])
        assert ask(oracle, asked).endswith(f"Answer: {question.answer}")
        less = "\n\n".join(["Passages:\n" + "\n\n".join(texts[1:]), f"Question: {question.text}"])
        assert ask(oracle, less).endswith("Answer: Unanswerable")


def test_what_it_does_not_know_it_says(world):
    for text, message in (("hello", "not of a system"), ("Triples:\n\n\nQuestion: Who?", "no question 'Who\\?'")):
        with pytest.raises(CallError, match=message):
            ask(WorldOracle(world), text)
    empty = json.loads(ask(WorldOracle(world), "Title: Nowhere\nText: x"))
    assert empty == {"entities": ["Nowhere"], "triples": []}
