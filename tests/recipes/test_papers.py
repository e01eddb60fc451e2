"""The chains from public files to a paper's table; a sample takes minutes, so `--sample` is for a person."""

import json
import re
import subprocess
from collections import Counter

import pytest

from tests.test_docs import ROOT, Command, own_arguments, program, text_of, troubles_of
from tripletune.data_builders.published import read_released
from tripletune.data_builders.readers import get_reader
from tripletune.recipes.papers.sample_files import main

SCRIPTS = {"ras_table1": "ras", "cirag_tables": "cirag"}


def printed(script, *words):
    command = ["bash", f"recipes/papers/{script}.sh", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_has_what_the_dry_run_prints(script):
    shown = printed(script, "--dry-run", SCRIPTS[script])
    assert shown.returncode == 0, shown.stderr
    assert f"```bash\n{shown.stdout}```" in text_of(ROOT / "docs/guide/tables.md")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_sample_runs_the_same_programs_with_flags_that_they_have(script):
    def commands(*words):
        lines = printed(script, "--dry-run", *words, "folder").stdout.splitlines()
        return [command for line in lines if program((command := Command(script, line)).words)]

    whole, sample = commands(), commands("--sample")
    assert [trouble for command in sample for trouble in troubles_of(command)] == []
    # The sample adds the command that makes it, and leaves out MAUVE.
    assert program(sample[0].words) == ("recipes/papers/sample_files.py",)
    ours = [program(command.words) for command in sample[1:]]
    assert ours == [program(command.words) for command in whole if "mauve" not in command.text]
    for small, command in zip(sample[1:], [command for command in whole if "mauve" not in command.text], strict=True):
        config = re.findall(r"--(?:config|task|tasks|reader|system|systems) \S+", command.text)
        assert config == re.findall(r"--(?:config|task|tasks|reader|system|systems) \S+", small.text)
        assert own_arguments(small.words)


def test_three_thousand_trajectories_are_all_for_training():
    chain = printed("cirag_tables", "--dry-run", "cirag").stdout
    for text in (chain, text_of(ROOT / "docs/guide/cirag.md")):
        assert "--limit 3000 --validation-fraction 0 --output" in text


def test_a_script_without_a_folder_or_with_an_unknown_option_says_its_usage():
    assert printed("ras_table1").returncode == 2
    assert "usage: bash recipes/papers/ras_table1.sh" in printed("ras_table1").stderr
    assert "unknown option --smaple" in printed("cirag_tables", "--smaple", "x").stderr


def test_the_sample_is_read_as_the_public_files_are(tmp_path):
    assert main([str(tmp_path)]) == 0
    drops: Counter[str] = Counter()
    records = list(read_released(str(tmp_path / "train_data.jsonl"), drops, Counter()))
    assert not drops
    assert {record.action.value for record in records} == {"[SUBQ]", "[SUFFICIENT]", "[NO_RETRIEVAL]"}
    assert all(step.triples for record in records for step in record.steps)
    for file, reader in {
        "popqa_longtail_w_gs.jsonl": "qa", "triviaqa_test_w_gs.jsonl": "qa", "health_claims_processed.jsonl": "claims",
        "arc_challenge_processed.jsonl": "multiple_choice", "asqa_eval_gtr_top100.json": "asqa",
        "eli5_eval_bm25_top100.json": "qa", "2wikimultihopqa/dev.json": "two_wiki",
        "musique_ans_v1.0_dev.jsonl": "musique", "hotpot_dev_distractor_v1.json": "hotpotqa",
    }.items():  # fmt: skip
        assert list(get_reader(reader)(str(tmp_path / file))), file
    asked = json.loads((tmp_path / "asqa_eval_gtr_top100.json").read_text())[0]
    assert len(asked["docs"]) == 5
