"""The collection of trajectories as people run it: a batch teacher whose replies a script writes, round after round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.models.llm.provider import answer_batch
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.data.trajectories import read_trajectories
from tripletune.models.llm.programs import main as calls
from tripletune.models.options import ConfigError, load_config, to_yaml
from tripletune.recipes.cirag_trajectories import CollectConfig, run

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
TRAIN = {
    "hotpotqa": "hotpotqa_train.jsonl",
    "2wikimultihopqa": "2wikimultihopqa_train.jsonl",
    "musique": "musique_ans_train.jsonl",
}
# Kills the process, as `kill -9` does, when so many calls have been noted as waiting.
KILLER = """
import os, signal, sys
from tripletune.models.llm.ledger import Ledger
from tripletune.recipes.cirag_trajectories import run
noted, original = [], Ledger.wait_for
def wait_for(self, call):
    original(self, call)
    noted.append(call)
    if len(noted) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
Ledger.wait_for = wait_for
run(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of five questions each, one with pages of its own and one that shares none of them."""
    folder = tmp_path_factory.mktemp("world")
    write_world(WorldOptions(seed=5, train=5, validation=0, test=5, common_knowledge=0, one_hop=0), folder)
    return [f"hotpotqa:{folder}/train.jsonl", f"hotpotqa:{folder}/test.jsonl"]


def command(files: list[str], output: Path, *more: str) -> list[str]:
    return [
        "--files", ",".join(files), "--output_dir", str(output), "--questions", "4", "--retriever", "bm25",
        "--encoder", "null", "--options", "rerank=no,top_k=3", "--teacher.backend", "batch",
        "--teacher.model", "some-model", *more,
    ]  # fmt: skip


def requests_in(output: Path) -> list[Path]:
    return sorted((output / "ledger.sqlite.batch").glob("*.jsonl"))


def reply_to(body: dict[str, Any]) -> str:
    """What a script can say: the page's title in every triple, one more question, and a made-up answer."""
    turns = [message["content"] for message in body["messages"] if message["role"] == "user"]
    if "[[## fact_before_filter ##]]" in turns[-1]:
        facts = json.loads(turns[-1].split("[[## fact_before_filter ##]]\n", 1)[1].split("\n", 1)[0])["fact"]
        # Two rounds of search for every question.
        asked = f"What is {facts[-1][2]}?" if len(turns) < 2 and facts else "<no question>"
        core = json.dumps({"fact": facts[:1]})
        return f"[[## thought ##]]\nNo more.\n\n[[## fact_after_filter ##]]\n{core}\n\n[[## question ##]]\n{asked}"
    if turns[-1].startswith("Title: "):
        title, text = turns[-1].removeprefix("Title: ").split("\n", 1)
        if "\nEntities: " not in turns[-1]:
            return json.dumps({"entities": [title]})
        return json.dumps({"triples": [[title, "tells of", " ".join(text.split()[-4:-1])]]})
    return "Thought: one of the facts.\nAnswer: Kelm"


def go_on(output: Path, words: list[str], replies: Path) -> int:
    """Have the newest request file answered, import the replies, give the same command again."""
    answer_batch(requests_in(output)[-1], replies, reply_to)
    assert calls(["batch", "import", "--ledger", str(output / "ledger.sqlite"), "--replies", str(replies)]) == 0
    return run(words)


def last_turn(line: str) -> str:
    return str(json.loads(line)["body"]["messages"][-1]["content"])


@pytest.fixture(scope="module")
def collected(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection that was answered to its end."""
    output = tmp_path_factory.mktemp("collected")
    words = command(files, output)
    assert run(words) == 3
    while (code := go_on(output, words, output / "replies.txt")) == 3:
        assert len(requests_in(output)) < 20
    assert code == 0
    return output


def test_every_round_of_requests_is_one_file_for_all_training_sets(collected: Path) -> None:
    kinds = []
    for file in requests_in(collected):
        turns = [last_turn(line) for line in file.read_text().splitlines()]
        kinds.append({
            "integrate" if "fact_before_filter" in turn else "answer" if "Question: " in turn
            else "triples" if "\nEntities: " in turn else "entities"
            for turn in turns
        })  # fmt: skip
    assert kinds[:3] == [{"entities"}, {"triples"}, {"integrate"}]
    # In the second round some questions meet new pages and others go on to integrate or to answer.
    assert "integrate" in set.union(*kinds[3:])
    assert "answer" in kinds[-1]
    titles = [last_turn(line).split("\n")[0] for line in requests_in(collected)[0].read_text().splitlines()]
    assert len(set(titles)) == len(titles), "a page is asked about once"
    assert len(titles) > 3 * 4, "pages of both training sets"


def test_the_trajectories_are_there_with_two_rounds_each(collected: Path) -> None:
    found = list(read_trajectories(collected / "trajectories"))
    assert len(found) == 8
    assert {sum(one.learned) for one in found} == {2}
    assert {one.model for one in found} == {"openai:some-model"}
    for name in ("hotpotqa", "hotpotqa-2"):
        metrics = json.loads((collected / name / "run" / "metrics.json").read_text())
        assert (metrics["questions"], metrics["counts"]["rounds"]) == (4, 8)
        assert metrics["supporting_recall"]["n"] == 4
        about = json.loads((collected / name / "run" / "run.json").read_text())
        assert about["command"][:3] == ["tripletune", "eval", "run"]
    assert yaml.safe_load((collected / "config.yaml").read_text())["questions"] == 4


def test_two_folders_get_the_same_bytes_round_after_round(files: list[str], collected: Path, tmp_path: Path) -> None:
    words = command(files, tmp_path)
    assert run(words) == 3
    assert run(words) == 3, "nothing is answered yet"
    for _ in range(3):
        assert go_on(tmp_path, words, tmp_path / "replies.txt") == 3
    mine, theirs = requests_in(tmp_path), requests_in(collected)
    assert len(mine) == 4
    assert [file.read_bytes() for file in mine] == [file.read_bytes() for file in theirs[:4]]


def test_after_a_kill_the_file_is_the_same(files: list[str], collected: Path, tmp_path: Path) -> None:
    words = command(files, tmp_path)
    killed = subprocess.run(
        [sys.executable, "-c", KILLER, "7", *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert killed.returncode == -9, killed.stderr.decode()[-500:]
    assert requests_in(tmp_path) == []
    assert run(words) == 3
    assert requests_in(tmp_path)[0].read_bytes() == requests_in(collected)[0].read_bytes()


def test_a_finished_collection_is_left_as_it_is(files: list[str], collected: Path) -> None:
    card = (collected / "trajectories" / "README.md").read_bytes()
    before = [file.name for file in requests_in(collected)]
    assert run(command(files, collected)) == 0
    assert (collected / "trajectories" / "README.md").read_bytes() == card
    assert [file.name for file in requests_in(collected)] == before


def test_other_draws_do_not_go_into_the_same_folder(
    files: list[str], collected: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command(files, collected), "--questions", "3"]) == 2
    assert "train_count was 4 and is 3. Name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--files", "hotpotqa"], "files: there is no file (nothing stands after the colon)"),
        (["--files", "hotpot:x.json"], "files: task 'hotpot' is not one of"),
        (["--questions", "-1"], "questions: -1 must be at least 0"),
        (["--questions", "6"], "6 questions are to be drawn and 5 can be used"),
        (["--retriever", "dens"], "'dens' is not one of bm25, dense, hybrid"),
        (["--retriever", "dense"], "encoder is not set"),
        (["--options", "candidate=3"], "did you mean candidates?"),
        (["--options", "extraction=store"], "extraction=store and a file of triples (--triples) go together"),
        (["--teacher.backend", "bach"], "backend: 'bach' is not one of"),
        (["--teacher.model", ""], "teacher: model is not set"),
        (["--keep.min_score", "f1"], "write it as METRIC=VALUE"),
        (["--keep.limit", "0"], "limit: 0 must be at least 1"),
        (["--question", "3"], "did you mean --questions?"),
    ],
)
def test_bad_input_gives_one_message_and_exit_code_2(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert run([*command(files, tmp_path), *more]) == 2
    shown = capsys.readouterr().err
    assert shown.count("error: ") == 1
    assert message in shown


@pytest.mark.parametrize("name", ["paper", "small"])
def test_the_configurations_are_whole_but_for_the_benchmarks_files(name: str) -> None:
    path = ROOT / "recipes" / "configs" / f"cirag_trajectories_{name}.yaml"
    try:
        config = load_config(CollectConfig, path)
    except ConfigError as error:
        lines = str(error).splitlines()[1:]
        assert lines
        assert all("there is no file" in line for line in lines)
        config = CollectConfig(**{**yaml.safe_load(path.read_text()), "teacher": CollectConfig().teacher})
    assert [source.task for source in config.sources()] == list(TRAIN)
    assert config.questions == {"paper": 1000, "small": 20}[name]


def test_the_configuration_can_be_written_and_read(files: list[str], tmp_path: Path) -> None:
    config = load_config(CollectConfig, None, {"files": files, "teacher.model": "m", "keep.limit": None})
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(CollectConfig, tmp_path / "c.yaml") == config


@pytest.mark.skipif(not DATA.is_dir(), reason="the benchmarks' files are not beside the checkout")
def test_60_real_questions_for_two_rounds(tmp_path: Path) -> None:
    real = [f"{task}:{DATA / file}" for task, file in TRAIN.items()]
    words = [*command(real, tmp_path / "a"), "--questions", "20"]
    again = [*command(real, tmp_path / "b"), "--questions", "20"]
    assert run(words) == run(again) == 3
    one, two = requests_in(tmp_path / "a"), requests_in(tmp_path / "b")
    assert len(one) == 1
    assert one[0].read_bytes() == two[0].read_bytes()
    assert 60 < len(one[0].read_text().splitlines()) <= 60 * 3
    for _ in range(3):
        assert go_on(tmp_path / "a", words, tmp_path / "replies.txt") == 3
    rounds = [[last_turn(line) for line in file.read_text().splitlines()] for file in requests_in(tmp_path / "a")]
    assert len(rounds[2]) == 60
    assert all("[[## Original Query ##]]" in turn for turn in rounds[2]), "the decisions of the first round"
    # What is asked next belongs to the second round: pages that the second query has found.
    assert set(rounds[0]).isdisjoint(rounds[3])
    assert any(turn.startswith("Title: ") for turn in rounds[3])
