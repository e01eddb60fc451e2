"""`tripletune eval stopping`: one loop at every depth, and rules that choose among its answers."""

import json
import shutil

import pytest

from tests.cli import read_lines, write_lines
from tests.eval.suites.test_questions import Oracle, command, files  # noqa: F401
from tests.fakes import Client
from tripletune.core.calls import Completion, TokenScores
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval.__main__ import main
from tripletune.rag.systems import LoopOptions


class Sure(Oracle):
    """An oracle that stops after one search unless it must go on, and says how sure it is."""

    def reply(self, sample):
        if sample.begun:
            self.calls += 1
            return f"[SUBQ] {'again ' * len(sample.steps)}{sample.question}"
        return super().reply(sample)

    async def generate(self, sample, max_new_tokens, evidence=None):
        scores = TokenScores(-0.1, 2.0) if sample.task == "answering" else None
        return Completion(self.reply(sample), 10, 2, scores=scores)


@pytest.fixture
def bench(files, serve):  # noqa: F811
    """Runs the bench, and returns its metrics and rows."""
    model = Sure()
    serve(model)
    step = Step("Where is Town1?", (Triple("Town1", "lies on", "River1"),))
    plans = [
        Record("0", "q", "planning", "Where?", Action.SUBQ, (), "Where?"),
        Record("1", "q", "planning", "Where?", Action.SUFFICIENT, (step,)),
    ]
    write_lines(files / "plans.jsonl", [record.to_json() for record in plans])

    def run(*more, code=0, system="ras"):
        words = command(files, system, **{"first_query": "generated"})
        assert main(["stopping", *words[1:], *more]) == code
        folder = files / "out"
        return json.loads((folder / "metrics.json").read_text()), read_lines(folder / "results.jsonl"), model

    return run


def test_every_rule_is_judged_on_the_same_answers(bench, files, capsys):  # noqa: F811
    metrics, rows, _ = bench("--depths", "2", "--training-data", str(files / "plans.jsonl"))
    rules = metrics["rules"]
    assert list(rules) == [
        "always 0 searches", "always 1 search", "always 2 searches",
        "the planner", "counting steps", "matching words", "TASR", "the best depth of each question (bound)",
    ]  # fmt: skip
    assert [rules[name]["searches"]["mean"] for name in list(rules)[:5]] == [0, 1, 2, 1, 1]
    # An answer, and a plan for each search; the planner also says that it stops, and TASR answers twice.
    assert [rules[name]["calls"]["mean"] for name in list(rules)[:7]] == [1, 2, 3, 3, 2, 2, 4]
    assert rules["always 0 searches"]["scores"]["exact_match"]["mean"] == 0
    assert rules["the planner"]["scores"]["exact_match"]["mean"] == 1
    # At its 3 calls, the planner is compared with two searches.
    assert rules["the planner"]["at_searches"]["exact_match"]["mean"] == 0
    assert metrics["missing"] == []
    assert [rules[name]["recall"]["mean"] for name in ("always 0 searches", "always 1 search")] == [0, 1]
    assert [depth["answer"] for depth in rows[0]["depths"]][1:] == ["River0", "River0"]
    assert rows[0]["depths"][1]["hits"] == 1
    assert rows[0]["depths"][2]["stop_reason"] == "max_rounds"
    shown = capsys.readouterr().out
    assert "when to stop: ras on hotpotqa, 6 questions" in shown


@pytest.fixture
def other_seed(bench, files):  # noqa: F811
    """A finished bench in `out`, and a copy that another model made, which answers nothing right; its folder."""
    bench("--depths", "2")
    other = files / "other"
    shutil.copytree(files / "out", other)
    settings = json.loads((other / "settings.json").read_text())
    settings["run"]["model"] = settings["run"]["planner"] = {"spec": "other", "weights": "0" * 16}
    (other / "settings.json").write_text(json.dumps(settings))
    rows = read_lines(other / "results.jsonl")
    for row in rows:
        for answered in (*row["depths"], row["planner"]):
            answered["scores"] = dict.fromkeys(answered["scores"], 0.0)
    write_lines(other / "results.jsonl", rows)
    return other


def test_seeds_are_averaged_without_asking_again(bench, other_seed, files, capsys):  # noqa: F811
    metrics, *_ = bench("--depths", "2", "--other-seeds", str(other_seed))
    rule = metrics["seeds"]["rules"]["always 1 search"]["scores"]["exact_match"]
    assert (rule["mean"], rule["n"]) == (0.5, 6)
    assert metrics["rules"]["always 1 search"]["scores"]["exact_match"]["mean"] == 1
    shown = capsys.readouterr().out
    assert "mean of 2 training seeds" in shown
    assert "p is that of the two-level bootstrap" in shown
    assert main(["report", str(files / "out"), "--output", str(files / "page")]) == 0
    tables = (files / "page" / "report.md").read_text()
    assert "Means over training seeds" in tables
    assert "seeds/rules" not in tables


def test_what_is_no_other_seed_is_refused(bench, other_seed, files, capsys):  # noqa: F811
    for folders, problem in (
        (str(files / "out"), "it has the model of this run"),
        (f"{other_seed},{other_seed}", f"it has the model of {other_seed}"),
        (str(files), "name output folders of eval stopping"),
    ):
        bench("--depths", "2", "--other-seeds", folders, code=2)
        assert problem in capsys.readouterr().err
    bench("--depths", "3", "--overwrite", "--other-seeds", str(other_seed), code=2)
    assert "other settings (run/options/max_rounds; depths)" in capsys.readouterr().err
    rows = read_lines(other_seed / "results.jsonl")
    write_lines(other_seed / "results.jsonl", rows[1:])
    bench("--depths", "2", "--other-seeds", str(other_seed), code=2)
    assert "answers to 5 questions and this run to 6" in capsys.readouterr().err


def test_depths_share_their_first_calls(bench):
    _, rows, model = bench("--depths", "3")
    # Plans [SUBQ] at 0, 1 and 2 searches and answers at 0 to 3; the planner's own plans before and after a search.
    assert model.calls == len(rows) * (3 + 4 + 2)


def test_rules_that_cannot_be_judged_are_named(bench, capsys):
    metrics, *_ = bench("--depths", "2", "--set", "stop=fixed")
    assert "the planner" not in metrics["rules"]
    assert [sentence.split(" not judged")[0] for sentence in metrics["missing"]] == [
        "The planner is", "Counting steps and matching words are",
    ]  # fmt: skip
    assert "--training-data" in capsys.readouterr().out


def test_the_report_shows_the_table(bench, files):  # noqa: F811
    bench("--depths", "2")
    assert main(["report", str(files / "out"), "--output", str(files / "page")]) == 0
    tables = (files / "page" / "report.md").read_text()
    assert "| always 1 search |" in tables
    assert "| rule | searches | calls | recall |" in tables
    assert "| rule | score | at equal searches | at equal calls |" in tables
    assert "rules/" not in tables


@pytest.mark.parametrize(
    ("system", "more", "problem"),
    [
        ("ras", ["--set", "max_rounds=3"], "--depths says how often"),
        ("standard", [], "nothing to stop"),
        ("ras,ircot", [], "name one system"),
        ("ras", ["--system", "ircot"], "name one system"),
    ],
)
def test_what_has_no_depths_is_an_error(bench, capsys, system, more, problem):
    with pytest.raises(FileNotFoundError):
        bench(*more, code=2, system=system)
    assert problem in capsys.readouterr().err


def test_any_system_with_rounds_is_run_with_fewer(files, monkeypatch):  # noqa: F811
    """IRCoT has no plans to overrule: it is allowed one search, then two, and no model says how sure it is."""

    def reply(asked):
        return "So the answer is: River0." if "2 rounds" in asked.text else "Where does it lie?"

    monkeypatch.setattr("tripletune.eval.suites.questions.open_chat_model", lambda *_: Client(answer=reply))
    words = command(files, system="ircot", model=None, triples=None, llm="openai:any", limit=2)
    assert main(["stopping", *words[1:], "--depths", "2"]) == 0
    metrics = json.loads((files / "out" / "metrics.json").read_text())
    assert list(metrics["rules"]) == [
        "at most 1 search",
        "at most 2 searches",
        "the best depth of each question (bound)",
    ]
    assert metrics["missing"][-1].startswith("TASR is not judged")


def test_fixed_searches_is_an_option_of_the_loop():
    assert LoopOptions().stop == "adaptive"


def test_the_oracle_of_a_world_goes_on_where_it_would_stop(tmp_path):
    write_world(WorldOptions(seed=2, train=0, validation=0, test=10), tmp_path)
    data = {"data": "test.jsonl", "corpus": "test.corpus.jsonl", "triples": "test.triples.jsonl", "oracle": "test"}
    words = [word for name, file in data.items() for word in (f"--{name}", str(tmp_path / file))]
    more = ["--top-k", "1", "--depths", "2", "--output", str(tmp_path / "out")]
    assert main(["stopping", "--system", "ras", "--task", "hotpotqa", *words, *more]) == 0
    rows = read_lines(tmp_path / "out" / "results.jsonl")
    assert [row["error"] for row in rows] == [""] * 10
    stopped_early = [row for row in rows if row["planner"]["stop_reason"] in ("sufficient", "no_retrieval")]
    went_on = [row["depths"][2]["searches"] - row["planner"]["searches"] for row in stopped_early]
    assert max(went_on) > 0
