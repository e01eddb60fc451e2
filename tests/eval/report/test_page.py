"""The page of a report in a browser: what it shows, finds and draws, and that nothing of its data comes to life."""

import asyncio
import json
import re
import shutil
from itertools import combinations
from xml.etree import ElementTree

import pytest

from tests.cli import write_lines
from tests.eval.report.browser import CHROMIUM, new_page
from tripletune.eval.__main__ import main

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
EVIL = "</script><script>document.title='broken'</script><img src=http://127.0.0.1:9/x onerror=\"document.title='b'\">"
TITLES = ("Ada", "Byron", EVIL)


def row(number, system):
    """Question `number`: "good" is right on all but the last, "bad" on the first alone."""
    right = number == 0 or (system == "good" and number < 11)
    triples = [["Ada", "father", "Byron"], ["Byron", "wrote", EVIL], ["Cato", "wrote", "letters"]]
    step = {"query": f"who is {EVIL}", "passages_without_triples": 0, "triples": triples if system == "bad" else []}
    step["passages"] = [{"id": f"p{n}", "title": title, "score": 1.0} for n, title in enumerate(TITLES)]
    trace = {
        "steps": [step], "actions": [{"reply": EVIL, "action": "ask", "subquery": "", "unexpected": False}],
        "details": {"gist": triples[:1] if system == "bad" else [], "note": EVIL, "tokens": {"read": [100, 10]}},
        "question": "Q", "calls": 2, "prompt_tokens": 100, "seconds": 0.5, "malformed": 0, "unexpected": 0,
        "tallies": {"calls.read": 2}, "stop_reason": "sufficient", "error": "", "completion_tokens": 10,
        "cached": {"read": [1, 50, 5]} if system == "bad" else {},
    }  # fmt: skip
    return {
        "id": f"q{number}", "question": f"Who was the father of Ada? {EVIL if number == 1 else number}",
        "type": ("bridge", "comparison")[number % 2], "answers": ["Byron"], "prediction": "Byron" if right else "Nero",
        "scores": {"exact_match": float(right)}, "supporting": ["p0", "p9"][: 1 + number % 2],
        "error": "no reply" if (number, system) == (11, "bad") else "", "trace": trace,
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of twelve questions, and their corpus."""
    home = tmp_path_factory.mktemp("runs")
    corpus = home / "corpus.jsonl"
    lines = [{"id": f"p{n}", "title": title, "text": f"text of {title}"} for n, title in enumerate(TITLES)]
    write_lines(corpus, lines)
    for system in ("bad", "good"):
        folder = home / "hotpotqa" / system
        folder.mkdir(parents=True)
        settings = {"system": system, "task": {"name": EVIL, "metrics": ["exact_match"]}, "data": "d", "options": {}}
        settings["llm"] = {"teacher": "oracle:world"}
        (folder / "settings.json").write_text(json.dumps(settings | {"corpus": None, "retriever": "bm25"}))
        (folder / "run.json").write_text(json.dumps({"questions": 12, "command": ["tripletune", EVIL]}))
        (folder / "metrics.json").write_text(json.dumps({"session": {}}))
        rows = [row(number, system) for number in range(12)]
        write_lines(folder / "results.jsonl", rows)
    corpus.rename(home / "hotpotqa" / "corpus.jsonl")
    return home


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    assert main(["report", str(runs), "--output", str(tmp_path_factory.mktemp("out") / "r"), "--traces", "11"]) == 0
    return tmp_path_factory.getbasetemp() / "out0" / "r" / "report.html"


@pytest.fixture(scope="module")
def crowd(runs, tmp_path_factory):
    """One run under 14 names, so that all points of a plot are one."""
    names = [f"{name} with a name that needs much room={runs}/hotpotqa/good" for name in "abcdefghijklmn"]
    assert main(["report", *names, "--output", str(tmp_path_factory.mktemp("crowd") / "r"), "--traces", "0"]) == 0
    return tmp_path_factory.getbasetemp() / "crowd0" / "r" / "report.html"


def see(page, tmp_path, *looks, **screen):
    """What scripts give, each after a fragment, on the open page; it may load only itself and must meet no error."""

    async def look():
        async with new_page(tmp_path / "profile") as browser:
            found = []
            for fragment, script in looks:
                await browser.open(f"file://{page}#{fragment}", **screen)
                found.append(await browser.run(script))
            assert not browser.errors
            assert {url for url in browser.requests if not url.startswith(("about:blank", "blob:"))} == {
                f"file://{page}"
            }
            return found

    return asyncio.run(look())


def test_data_ends_no_script(page):
    assert page.read_text().count("</script") == 3
    assert page.read_text().count("<img") == 0


@needs_browser
def test_no_text_of_the_data_comes_to_life(page, tmp_path):
    script = """[document.title, document.querySelectorAll("img, script[src], link").length,
        document.getElementById("page").textContent]"""
    ((title, foreign, shown),) = see(page, tmp_path, ("q=q1&run=1", script))
    assert (title, foreign) == ("Evaluation report", 0)
    for text in (f"father of Ada? {EVIL}", f"who is {EVIL}", f"text of {EVIL}", "★ 1 of 2 supporting passages"):
        assert text in shown


@needs_browser
def test_the_best_run_stands_first_and_differences_are_said_in_words(page, tmp_path):
    script = """document.querySelector(".matrix td").focus(),
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true })),
        [".plot .name", ".verdict", ".matrix td", "#about.warn"].map((which) =>
            [...document.querySelectorAll(which)].map((one) => one.textContent || "-")
        ).concat(document.getElementById("page").innerText)"""
    ((names, verdicts, cells, about, text),) = see(page, tmp_path, ("", script))
    assert names[:2] == ["1. good", "2. bad, 1 failed"]
    assert re.search("12 questions.*ORACLE world", about[0])
    assert verdicts[0] == "highest score"
    assert verdicts[1].startswith("−83.3, worse, p 0.00")
    assert cells == ["-", "+83.3", "−83.3", "-"]
    assert "good against bad: +83.3 (" in text
    assert "on 12 questions, p 0.002 (McNemar's exact test, Holm): better." in text


@needs_browser
def test_an_unfinished_run_is_last_even_with_the_highest_score(runs, tmp_path):
    part = tmp_path / "part"
    shutil.copytree(runs / "hotpotqa" / "good", part)
    write_lines(part / "results.jsonl", [row(number, "good") for number in range(3)])
    folders = [f"part={part}", *(f"{runs}/hotpotqa/{name}" for name in ("bad", "good"))]
    assert main(["report", *folders, "--output", str(tmp_path / "r")]) == 0
    script = """[".plot .name", ".verdict"].map((which) => [...document.querySelectorAll(which)]
        .map((one) => one.textContent)).concat(document.querySelector(".front").getAttribute("d"))"""
    ((names, verdicts, front),) = see(tmp_path / "r" / "report.html", tmp_path, ("", script))
    assert names[:3] == ["1. good", "2. bad, 1 failed", "3. part (3 of 12 questions)"]
    assert verdicts[0] == "highest score"
    assert "L" not in front, "equal costs: the best finished run alone"


@pytest.fixture
def sure(runs, tmp_path):
    """A report of the good run, which was sure of its right answers and withheld the wrong one."""
    folder = tmp_path / "sure"
    shutil.copytree(runs / "hotpotqa" / "good", folder)
    rows = [row(number, "good") for number in range(12)]
    for number, values in enumerate(rows):
        values["trace"]["confidence"] = {"probability": 0.9 if number % 2 else 0.3, "support": 1.0}
    rows[11]["trace"]["withheld"] = "Nero"
    write_lines(folder / "results.jsonl", rows)
    assert main(["report", str(folder), "--output", str(tmp_path / "r")]) == 0
    return tmp_path / "r"


def test_a_report_says_what_a_confidence_is_worth(sure):
    tables = (sure / "report.md").read_text()
    assert "| 1 | 91.7 | 100.0 (" in tables
    # Eleven right answers, six of them with 0.3 and five with 0.9.
    figures = json.loads((sure / "report.json").read_text())["groups"][0]["runs"][0]["figures"]
    assert figures["confidence"]["probability"]["error"] == pytest.approx((6 * 0.7 + 5 * 0.1) / 11)
    assert [point["threshold"] for point in figures["confidence"]["probability"]["curve"]] == [0.3, 0.9]
    assert [figures["withheld"], figures["answered"]["n"]] == [1, 11]
    assert "What does a threshold let through?" in tables


@needs_browser
def test_the_page_draws_risk_and_coverage(sure, tmp_path):
    script = """[[...document.querySelectorAll("select[name=sure] option")].map((one) => one.value),
        [...document.querySelectorAll("h2")].some((one) => one.textContent === "When to say I don't know"),
        [...document.querySelectorAll("svg title")].map((one) => one.textContent)
            .filter((one) => /answered from/.test(one))]"""
    ((measures, is_there, points),) = see(sure / "report.html", tmp_path, ("", script))
    assert (measures, is_there) == (["probability", "support"], True)
    assert [point.rpartition("of the ")[2] for point in points] == [
        "100.0 % answered from 0.3 on", "45.5 % answered from 0.9 on",
    ]  # fmt: skip


@needs_browser
def test_questions_are_found_by_outcome_kind_and_text(page, tmp_path):
    expected = {
        "only=1&outcome=wrong": ["11"],
        "outcome=differ&type=bridge": ["2", "4", "6", "8", "10"],
        "text=ada%3F%2010": ["10"],
        "only=0&text=nero&type=bridge": ["2", "4", "6", "8", "10"],
        "hops=2&outcome=right&only=0": [],
    }
    script = "[...document.querySelectorAll('.question .asked')].map((one) => one.textContent.split(' ').pop())"
    assert see(page, tmp_path, *((fragment, script) for fragment in expected)) == list(expected.values())


@needs_browser
def test_a_trace_is_drawn_as_a_graph_and_one_that_was_left_out_is_told(page, tmp_path):
    drawn = """[...document.querySelectorAll(".graph g")].map((one) => [one.getAttribute("class"),
        one.querySelector("title").textContent]).sort()"""
    other = "document.querySelector('.runs button').click(), document.querySelector('.trace').textContent"
    looks = (("q=q2", drawn), ("q=q2", other), ("q=q0", "document.getElementById('page').innerText"))
    nodes, good, text = see(page, tmp_path, *looks)
    assert nodes == [["", EVIL], ["asked", "Ada"], ["gold", "Byron"]], "what is far from the question is not drawn"
    assert "No graph: the trace of good has no triples, only passages. Runs that have one: bad." in good
    assert "This page has the traces of 11 questions and lacks 1 (--traces)" in text
    assert "This trace is not in the page" in text


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_14_runs_have_marks_of_their_own_labels_that_do_not_collide_and_tables_that_scroll(crowd, tmp_path, width):
    script = """(() => {
        const all = (which) => [...document.querySelectorAll(which)], looks = (one) => getComputedStyle(one).fill;
        const box = (one) => one.getBoundingClientRect().toJSON();
        const matrix = document.querySelector(".matrix").parentNode, rim = box(document.querySelector(".plot"));
        const marks = [...document.querySelector(".plot").querySelectorAll(".dot")];
        return [marks.map((one) => one.getAttribute("d") + looks(one)), all(".label").map(box),
            box(all(".plot")[1]), document.querySelector("main section").clientWidth,
            document.documentElement.scrollWidth, matrix.tabIndex, getComputedStyle(matrix, "::before").content,
            all(".plot text").map(box).filter((one) => one.left < rim.left - 1 || one.right > rim.right + 1)];
    })()"""
    ((marks, labels, plot, room, wide, tab, hint, cut),) = see(crowd, tmp_path, ("", script), width=width)
    assert len(set(marks)) == len(labels) == 14
    for one, two in combinations(labels, 2):
        assert one["right"] <= two["left"] or two["right"] <= one["left"] or (
            one["bottom"] <= two["top"] + 2 or two["bottom"] <= one["top"] + 2), (one, two)  # fmt: skip
    assert all(plot["top"] <= one["top"] and one["right"] <= plot["right"] for one in labels)
    assert plot["width"] > 0.9 * room
    assert wide == width
    assert not cut
    assert (tab == 0) == ("scroll sideways" in hint) == (width == 390)


@needs_browser
def test_a_plot_is_saved_as_a_file_of_its_own_with_light_colours(page, tmp_path):
    script = """document.querySelectorAll(".save").forEach((one) => one.click()),
        new Promise((done) => setTimeout(() => done(document.querySelector(".save").textContent), 1000))"""
    (said,) = see(page, tmp_path, ("q=q2", script), dark=True)
    saved = {one.name: one.read_text() for one in (tmp_path / "profile").glob("*.svg")}
    assert said.removeprefix("Save ") in saved
    assert {name.rsplit("-")[-1] for name in saved} >= {"scores.svg", "weighted_tokens.svg", "graph.svg"}
    for text in saved.values():
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text
        assert "rgb(28, 32, 36)" in text, "ink of the light page"


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_telephone(page, tmp_path, dark):
    script = "[document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
    ((width, paper),) = see(page, tmp_path, ("q=q2&run=1", script), width=400, dark=dark)
    assert width == 400
    assert (sum(map(int, paper[4:-1].split(","))) < 200) == dark


def test_a_corpus_of_other_runs_is_refused(runs, tmp_path, capsys):
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n')
    words = ["report", str(runs), "--output", str(tmp_path / "out"), "--corpus", str(tmp_path / "c.jsonl")]
    assert main(words) == 2
    assert "no run of this report used this file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("offline_wandb")
def test_tables_go_to_latex_and_to_tracking(runs, tmp_path):
    assert main(["report", str(runs), "--output", str(tmp_path / "out"), "--wandb", "p", "--price", "1,2"]) == 0
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    latex = (tmp_path / "out" / "report.tex").read_text()
    assert r"good & 12 & 0 & 91.7 (75.0 to 100.0) & +83.3" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\bottomrule") > 3
    assert r"\textless{}/script\textgreater{}" in latex
    assert "bad (1 failed) & 2.0 (2.0 to 2.0) & 1.0 (1.0 to 1.0) & 100.0" in latex, "half of the calls were not sent"
    assert "0.120 (0.120 to 0.120)" in latex, "dollars per 1,000 questions"
