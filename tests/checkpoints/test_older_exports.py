"""An export that revision a95bc5e4 wrote is loaded and answers, also in batches, and without the project."""

import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoints.test_standalone import alone
from tests.cli import run
from tripletune.checkpoints.standalone import MODELING, modeling_source
from tripletune.core.data.records import ModelInput, Step
from tripletune.llm.graph_generator import load_generator

STORE = Path(__file__).parents[1] / "stores/export_a95bc5e4"
ANSWERS = json.loads((STORE / "answers.json").read_text(encoding="utf-8"))
# Answers questions in batches of four, padded on the left; neither this project nor what only it needs can be imported.
BATCHES = """
import json, sys
for name in ("tripletune", "checkpoints", "models", "sentence_transformers", "faiss", "datasets"):
    sys.modules[name] = None
from transformers import AutoModel, AutoProcessor
model = AutoModel.from_pretrained("export", trust_remote_code=True)
processor = AutoProcessor.from_pretrained("export", trust_remote_code=True)
code = sys.modules[type(processor).__module__]
answers = json.load(open("answers.json"))
replies = []
for start in range(0, len(answers), 4):
    rows, graphs = [], []
    for row in answers[start : start + 4]:
        steps = [(step["query"], step["triples"]) for step in row["steps"]]
        inputs = processor(row["question"], steps, row["task"])
        rows.append({"input_ids": inputs["input_ids"][0].tolist()})
        history = tuple(code.Step(query, tuple(code.Triple(*one) for one in triples)) for query, triples in steps)
        graphs += processor.encode_input(code.ModelInput(row["task"], row["question"], history)).graphs
    batch = processor.tokenizer.pad(rows, padding_side="left", return_tensors="pt")
    more = {"graphs": code.batch_graphs(graphs, processor.vectors)} if graphs else {}
    output = model.generate(**batch, **more, max_new_tokens=12)
    replies += output[:, batch["input_ids"].shape[1] :].tolist()
print(json.dumps(replies))
"""


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A copy of the stored folders, as the working directory, because the export names its base model by a path."""
    shutil.copytree(STORE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_older_export_answers_and_is_verified(store):
    samples = [ModelInput(row["task"], row["question"], tuple(map(Step.from_json, row["steps"]))) for row in ANSWERS]
    generator = load_generator("export")
    expected = [generator.processor.tokenizer.decode(row["tokens"], skip_special_tokens=True) for row in ANSWERS]
    replies = generator.generate_many(samples, 12)
    assert [reply.text for reply in replies] == [text.strip() for text in expected]
    assert len(set(expected)) == len(expected)
    done = run("checkpoints", "verify", "export")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_an_older_export_answers_in_batches_without_the_project(store):
    """With its own modelling file under transformers 5.23; `checkpoints export` writes one for later versions."""
    done = run("checkpoints", "export", "export", "--output", "again")
    assert done.code == 0, done.err
    assert (store / "again" / MODELING).read_text(encoding="utf-8") == modeling_source()
    shutil.rmtree(store / "export")
    (store / "again").rename(store / "export")
    assert json.loads(alone(BATCHES, store)) == [row["tokens"] for row in ANSWERS]
