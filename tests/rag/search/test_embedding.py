import asyncio
import json
import shutil
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, BertConfig, BertModel

from tests.llm.server import MockServer, Reply
from tripletune.core.calls import PromptTooLong
from tripletune.models.control_tokens import read_control_as_text
from tripletune.models.encoders import load_encoder
from tripletune.models.fingerprints import encoder_fingerprint
from tripletune.models.graph_llm.embeddings import TextEncoder
from tripletune.rag.search.embedding import Embedder, open_embedder

try:
    from sentence_transformers.sentence_transformer.modules import Pooling, Router, Transformer
except ImportError:
    from sentence_transformers.models import Pooling, Router, Transformer


class Letters:
    """Embeds a text as its letter counts; notes what it was asked for."""

    def __init__(self, seconds=0.0):
        self.seen, self.seconds = [], seconds

    def __call__(self, texts, kind):
        time.sleep(self.seconds)
        self.seen.append((kind, list(texts)))
        return np.array([[text.count(letter) + 1e-9 for letter in "abc"] for text in texts])


def test_scores_are_cosines_and_vectors_are_kept():
    encode = Letters()
    embedder = Embedder("letters", encode)
    assert asyncio.run(embedder.scores("aa", ["b", "a", "ab", "b"])) == [0.0, 1.0, 0.707107, 0.0]
    assert asyncio.run(embedder.scores("aa", [])) == []
    asyncio.run(embedder.scores("b", ["ab", "c"]))
    assert encode.seen == [("query", ["aa"]), ("text", ["b", "a", "ab"]), ("query", ["b"]), ("text", ["c"])]


def test_the_fingerprint_of_an_encoder_has_its_pooling(tiny_encoder, tmp_path):
    folder = shutil.copytree(tiny_encoder, tmp_path / "encoder")
    found = [encoder_fingerprint(str(folder)), open_embedder(str(folder)).weights]
    (pooling,) = folder.glob("*/config.json")
    pooling.write_text(pooling.read_text().replace("mean", "max"))
    assert found == [found[0]] * 2
    assert encoder_fingerprint(str(folder)) not in ("", found[0])
    assert encoder_fingerprint("openai:text-embedding-3-small") == ""


def test_vectors_that_are_not_finite_are_refused():
    embedder = Embedder("broken", lambda texts, kind: np.array([[np.nan if text == "Oslo" else 1.0] for text in texts]))
    assert embedder.encode(["Kelm"]).tolist() == [[1.0]]
    with pytest.raises(ValueError, match="encoder broken: a vector is not finite"):
        asyncio.run(embedder.scores("Kelm", ["Oslo"]))


def test_the_oldest_vectors_are_forgotten():
    encode = Letters()
    embedder = Embedder("letters", encode, kept=1)
    asyncio.run(embedder.queries(["a", "b"]))
    asyncio.run(embedder.queries(["b", "a"]))
    assert [texts for _, texts in encode.seen] == [["a", "b"], ["a"]]


def test_what_one_query_is_compared_with_is_kept_for_the_next_however_much_it_is():
    encode = Letters()
    embedder, texts = Embedder("letters", encode, kept=1), [f"a{'b' * (number % 7)} {number}" for number in range(5000)]
    first, again = (asyncio.run(embedder.scores("a", texts)) for _ in range(2))
    assert first == again
    assert (len(first), first[:2]) == (5000, [1.0, 0.707107])
    assert sum(len(given) for kind, given in encode.seen if kind == "text") == 5000


def test_while_it_encodes_the_loop_runs_and_what_waits_goes_together():
    """Defect D1: 64 questions with an encoder of 100 ms took 64 times 100 ms, and no reply was read meanwhile."""
    encode = Letters(seconds=0.1)
    embedder = Embedder("letters", encode)

    beats = 0

    async def heartbeat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.005)
            beats += 1

    async def run():
        beat = asyncio.create_task(heartbeat())
        found = await asyncio.gather(*(embedder.queries(["a" + "b" * number]) for number in range(64)))
        beat.cancel()
        return found

    assert [vectors.shape for vectors in asyncio.run(run())] == [(1, 3)] * 64
    assert sum(len(texts) for _, texts in encode.seen) == 64
    assert len(encode.seen) <= 3
    assert beats > len(encode.seen)


def test_a_call_that_is_given_up_leaves_the_others_alone():
    embedder = Embedder("letters", Letters(seconds=0.05))

    async def run():
        first = asyncio.create_task(embedder.queries(["a"]))
        second = asyncio.create_task(embedder.queries(["a", "b"]))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(run()).shape == (2, 3)


def test_a_failure_reaches_everybody_whom_it_concerns_and_nobody_else():
    def encode(texts, kind):
        if "bad" in texts:
            raise RuntimeError("out of memory")
        return np.ones((len(texts), 2))

    embedder = Embedder("failing", encode)

    async def run():
        with pytest.raises(RuntimeError, match="out of memory"):
            await embedder.queries(["good", "bad"])
        return await embedder.queries(["good"])

    assert asyncio.run(run()).shape == (1, 2)


def test_a_text_that_the_encoder_refuses_fails_its_own_call_alone():
    def encode(texts, kind):
        if "long" in texts:
            raise PromptTooLong("too long")
        return np.ones((len(texts), 2))

    embedder = Embedder("refusing", encode)

    async def run():
        calls = (embedder.queries([text, "both"]) for text in ("a", "long", "b"))
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [isinstance(one, PromptTooLong) for one in asyncio.run(run())] == [False, True, False]


def test_a_vector_does_not_depend_on_company(tiny_encoder):
    texts = ["Oslo", "Who directed the film?", "a b c d e f g", "Kelm", "Which river crosses Kelm and flows on?"]
    embedder = open_embedder(str(tiny_encoder))
    together = embedder.encode(texts)
    assert (together == np.concatenate([embedder.encode([text]) for text in texts])).all()
    assert np.linalg.norm(together, axis=1) == pytest.approx(1.0)


def test_queries_and_texts_have_towers_of_their_own(tokenizer_folder, tmp_path):
    towers = [tower(tmp_path / f"tower{seed}", tokenizer_folder, seed) for seed in (1, 2)]
    folder, texts = tmp_path / "two", ["Oslo", "Which river crosses Kelm and flows on?"]
    SentenceTransformer(modules=[Router.for_query_document(*towers)], device="cpu").save(str(folder))
    embedder, theirs = open_embedder(str(folder)), SentenceTransformer(str(folder), device="cpu")
    for kind, vectors in (("query", theirs.encode_query(texts)), ("text", theirs.encode_document(texts))):
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        assert embedder.encode(texts, kind) == pytest.approx(unit, abs=1e-5)
    assert np.abs(embedder.encode(texts, "query") - embedder.encode(texts)).max() > 0.01
    with pytest.raises(ValueError, match=r"tower for queries and another for texts, and the names in a graph are"):
        TextEncoder(str(folder))
    # Weights are looked at in both.
    (second,) = folder.glob("document_0_*/model.safetensors")
    weights = dict(list(load_file(second).items())[1:])
    save_file(weights, second, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing"):
        load_encoder(str(folder))


def test_towers_that_are_not_for_retrieval_are_refused(tokenizer_folder, tmp_path):
    towers = {name: tower(tmp_path / name, tokenizer_folder, 1) for name in ("query", "picture")}
    SentenceTransformer(modules=[Router(towers, default_route="query")], device="cpu").save(str(tmp_path / "two"))
    with pytest.raises(ValueError, match=r"towers for query, picture, but none for document"):
        open_embedder(str(tmp_path / "two"))


def tower(folder, tokenizer_folder, seed):
    """The modules of a tiny encoder."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes, initializer_range=0.5)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return [Transformer(str(folder)), Pooling(16, "mean")]


def test_control_tokens_in_a_text_are_text(tiny_encoder, tokenizer):
    # This one reads texts as turns of a chat template, most read them alone.
    model, spelled = load_encoder(str(tiny_encoder)), "a <|im_end|> b<s>"
    one, two = (model.preprocess([text])["input_ids"][0].tolist() for text in (spelled, "Ordinary text"))
    assert [one.count(token) for token in range(4)] == [two.count(token) for token in range(4)]
    assert spelled in model.tokenizer.decode(one)
    known = SentenceTransformer(str(tiny_encoder), device="cpu").preprocess(["Ordinary text"])["input_ids"][0]
    assert two == known.tolist()
    read_control_as_text(tokenizer)
    assert not {0, 1, 2, 3}.intersection(tokenizer(spelled)["input_ids"])


def test_prompts_tell_queries_from_texts_and_a_process_opens_an_encoder_once(tiny_encoder):
    plain = open_embedder(str(tiny_encoder))
    assert open_embedder(str(tiny_encoder)) is plain
    prompted = open_embedder(str(tiny_encoder), query_prompt="Find: ")
    assert prompted.name == f"{tiny_encoder} query='Find: '"
    assert (prompted.encode(["Oslo"]) == plain.encode(["Oslo"])).all()
    assert (prompted.encode(["Oslo"], "query") != plain.encode(["Oslo"], "query")).any()


def test_inner_product_keeps_the_length_of_vectors(tiny_encoder):
    cosine, dot = open_embedder(str(tiny_encoder)), open_embedder(str(tiny_encoder), similarity="dot")
    assert (cosine.name, dot.name) == (str(tiny_encoder), f"{tiny_encoder} dot")
    length = np.linalg.norm(dot.encode(["Oslo"]))
    assert length > 1.1
    assert dot.encode(["Oslo"]) / length == pytest.approx(cosine.encode(["Oslo"]))
    (score,) = asyncio.run(dot.scores("Oslo", ["Oslo"]))
    assert score == pytest.approx(length**2, rel=1e-5)


def test_an_endpoint_that_speaks_openais_embeddings(monkeypatch):
    def reply(body):
        rows = [{"object": "embedding", "index": i, "embedding": [i, 1]} for i in range(len(body["input"]))]
        return Reply(raw=json.dumps({"object": "list", "model": "m", "data": rows[::-1]}))

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with MockServer(reply) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        embedder = open_embedder("openai:m", query_prompt="q: ")
        assert embedder.encode(["a", ""], "query") == pytest.approx(np.array([[0, 1], [0.5**0.5, 0.5**0.5]]))
    assert [(body["model"], body["input"]) for body in server.bodies] == [("m", ["q: a", "q: "])]
    with MockServer(reply) as server:
        # The address is no part of the encoder, and a key for OpenAI is not sent to it.
        monkeypatch.setenv("OPENAI_API_KEY", "sk-precious")
        other = open_embedder(f"openai:nvidia/m@v2@{server.url}")
        assert other.encode(["a"]).shape == (1, 2)
    assert (other.name, other.weights, server.bodies[0]["model"]) == ("openai:nvidia/m@v2", "", "nvidia/m@v2")
    assert server.authorizations == {"none"}
    for wrong in ("127.0.0.1:8000/v1", "http://me:key@host/v1", "http://host/v1?key=1"):
        with pytest.raises(ValueError, match=r"encoder openai:m.*: .*URL behind @ .*http://"):
            open_embedder(f"openai:m@{wrong}")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ValueError, match=r"encoder openai:other: .*OPENAI_API_KEY"):
        open_embedder("openai:other")


def test_the_type_in_which_an_encoder_computes_is_part_of_its_name(tiny_encoder):
    plain, half = open_embedder(str(tiny_encoder)), open_embedder(str(tiny_encoder), dtype="bfloat16")
    assert half.name == f"{plain.name} bfloat16"
    texts = [f"the {number}. text of {number * 'some '}words" for number in range(20)]
    cosines = (plain.encode(texts) * half.encode(texts)).sum(1)
    assert 0.99 < cosines.min() < 1 - 1e-7
    # A name of its own, so that an index of other vectors is not used.
    assert open_embedder(str(tiny_encoder), dtype="float32").name == f"{plain.name} float32"
    with pytest.raises(ValueError, match="encoder_dtype=auto has no effect on openai:m, whose server chooses the type"):
        open_embedder("openai:m@http://127.0.0.1:1/v1", dtype="auto")
