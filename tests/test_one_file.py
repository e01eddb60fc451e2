"""One file is enough: a task, a metric, a reader, a teacher backend, a system and a thing to train, added and run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
FILES = {
    "eval/tasks/mine.yaml": """
reader: mine
metrics: [first_letter]
""",
    "eval/metrics/mine.py": '''
def first_letter(prediction, answers):
    """The first letter is right."""
    return float(prediction[0] == answers[0][0])
''',
    "data_builders/readers/mine.py": '''
"""Rows of `{"id", "q", "a", "title", "text"}`."""
import json

from tripletune.core.data.questions import Question
from tripletune.core.data.passages import Passage

def read_questions(location, issues=None, source="mine"):
    for line in open(location):
        row = json.loads(line)
        passage = Passage(row["title"], row["text"])
        yield Question(row["id"], row["q"], (row["a"],), (passage,), (0,), "", source)
''',
    "tripletune/llm/backends/mine.py": '''
"""A teacher that knows where Ada was born."""
from tripletune.core.calls import Backend, Completion
from tripletune.llm.backends import BackendKind

LABELS = '{"documents": [1], "answerable": true, "triples": [["Ada", "born in", "London"]]}'

class Mine(Backend):
    model = "mine:m"

    async def complete(self, messages, sampling):
        return Completion("Londinium" if len(messages) == 1 else LABELS)

BACKEND = BackendKind(lambda options, key, ledger: Mine())
''',
    "rag/systems/mine.py": '''
"""Asks the teacher."""
from tripletune.rag.systems import System
from tripletune.rag import Trace

async def run(question, search, tools, options):
    reply = await tools.llm.chat([{"role": "user", "content": question}], role="mine", question_id=tools.question_id)
    trace = Trace(question, answer=reply.text)
    trace.count(reply)
    return trace

SYSTEM = System("mine", run, needs_corpus=lambda options: False, model="llm")
''',
    "train/tasks/mine.py": '''
"""Words, and then the same in capitals."""
from dataclasses import dataclass, field
from functools import cached_property

from tripletune.train.settings import RunConfig
from tripletune.train.text import TextTask, TextTrainSection

@dataclass
class Config(RunConfig):
    train: TextTrainSection = field(default_factory=TextTrainSection)

class Mine(TextTask):
    Config = Config

    @cached_property
    def sources(self):
        return self.source_pair(lambda row, where: row)

    def tokenised(self, source, cache):
        from tripletune.train.rows.cache import cached_rows

        def rows(part, counts):
            for example in part:
                ids = self.processor(example["text"] + example["text"].upper())["input_ids"]
                yield {"input_ids": ids, "labels": ids, "length": len(ids)}

        return cached_rows(["mine", source.digest], cache, source.works(rows))

TASK = Mine
''',
}
TRAINED = """
import sys
from pathlib import Path
from tripletune.checkpoints.card import collect_provenance, render_card
from tripletune.models.graph_llm import load_graph_llm
from tripletune.train import main

for more in (["--dry-run"], ["--model.graph_new", "9"]):
    assert main("ras", argv=[*sys.argv[1:], *more]) == 0
folder = Path("graph/final")
print("\\nlayer", load_graph_llm(folder)[0].get_base_model().graph_encoder.settings.graph_new)
print(render_card(collect_provenance(folder), "adapter", "graph"))
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the packages with the new files, and the data that they read."""
    folder = tmp_path_factory.mktemp("house")
    for link in (path for path in (ROOT / "tripletune").iterdir() if path.is_symlink()):
        shutil.copytree(ROOT / link.name, folder / link.name)
    shutil.copytree(ROOT / "tripletune", folder / "tripletune", symlinks=True)
    for name, text in FILES.items():
        assert not (folder / name).exists()
        (folder / name).write_text(text.lstrip())
    row = {"id": "q1", "q": "Where was Ada born?", "a": "London", "title": "Ada", "text": "Ada was born in London."}
    (folder / "questions.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": f"word {n}"}) + "\n" for n in range(8)))
    return folder


def run(house, *words):
    return python(house, "-m", "tripletune", *words)


def python(house, *words):
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=house, env={**os.environ, "PYTHONPATH": str(house)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_task_a_metric_a_reader_a_system_and_a_teacher_are_a_file_each(house):
    shown = run(
        house, "eval", "run", "--system", "mine", "--task", "mine", "--data", "questions.jsonl", "--output", "out",
        "--teacher", "mine", "--teacher-model", "m",
    )  # fmt: skip
    assert "The first letter is right" in shown
    found = json.loads((house / "out" / "metrics.json").read_text())
    assert (found["system"], found["task"], found["cost"]["calls"]) == ("mine", "mine", 1)
    assert found["metrics"]["first_letter"]["mean"] == 1.0


def test_the_same_reader_and_teacher_give_records(house):
    run(
        house, "build", "subq", "--source", "mine:questions.jsonl", "--teacher", "mine", "--teacher-model", "m",
        "--split-name", "train", "--output", "records",
    )  # fmt: skip
    records = [json.loads(line) for line in (house / "records" / "train-00000.jsonl").read_text().splitlines()]
    assert [record["action"] for record in records if record["task"] == "planning"] == ["[SUBQ]", "[SUFFICIENT]"]
    assert records[-1]["steps"][0]["triples"] == [["Ada", "born in", "London"]]


def test_a_thing_to_train_is_a_file(house, tiny_llama):
    words = ["--data.train", "words.jsonl", "--data.validation", "words.jsonl", "--model.base", tiny_llama]
    run(house, "train", "mine", *words, "--output_dir", "run", "--train.epochs", 1, "--train.batch_size", 4)
    result = json.loads((house / "run" / "final" / "training.json").read_text())
    assert (result["rows"], result["steps"]) == (8, 2)
    assert result["evaluation"]["eval_loss"] > 0
    assert len((house / "run" / "evaluations.jsonl").read_text().splitlines()) == 1


def test_a_graph_setting_is_declared_in_one_place(house, tiny_llama, tiny_encoder, write_records, records):
    file, place = house / "tripletune" / "core" / "data" / "graph_settings.py", "    projector_width: int = "
    text = file.read_text()
    assert text.count(place) == 1
    file.write_text(text.replace(place, f'    graph_new: int = setting(7, "a new one", above=0)\n{place}'))
    # YAML and flag.
    (house / "graph.yaml").write_text("model:\n  graph_new: 8\n  graph_hidden_width: 16\n  projector_width: 16\n")
    words = ["--config", "graph.yaml", "--model.base", tiny_llama, "--model.encoder", tiny_encoder]
    words += ["--data.train", write_records(records), "--output_dir", "graph", "--train.max_steps", 1]
    resolved, saved = python(house, "-c", TRAINED, *words).split("\nlayer ")
    assert "graph_new: 8" in resolved
    # Layer and card of what was saved.
    assert saved.startswith("9\n")
    assert "graph_new: 9" in saved
