"""Write the documents of a fictional company from a table (`company.yaml`), and record the calls of a teacher.

    python examples/make.py documents      # documents/: twenty files
    python examples/make.py record         # teacher.jsonl.gz: every call of the recipe, with its reply

The teacher is a server on this machine that answers from the table, but only with facts of the sentences in the prompt.
A recorded call holds its prompt: after a change of prompts, run `record` again.
"""

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from tripletune.core.data.records import normalize_answer as key
from tripletune.core.data.triples import Triple, format_triples, parse_triples
from tripletune.core.options import load_config
from tripletune.data_builders.questions.teacher import READ_ROLE, RECALL_ROLE, WORD_ROLE, load_question_prompts
from tripletune.llm.question_client import load_prompts
from tripletune.rag.chat_generator import ANSWER, PLAN
from tripletune.rag.extractor import TEACHER_PROMPT
from tripletune.recipes.own_documents import RoadConfig
from tripletune.recipes.own_documents import steps_of

HOME = Path(__file__).parent
DOCUMENTS, RECORDED = HOME / "documents", HOME / "teacher.jsonl.gz"
TABLE = yaml.safe_load((HOME / "company.yaml").read_text(encoding="utf-8"))
INVERSE = TABLE["lists"]
# Heading, introduction, and the kinds of things in each document.
PAGES = {
    "people": ("Who is who in the {d} division", "Whom to ask about what, and a few words on each of us.", ["person"]),
    "places": ("Where the {d} division works", "Notes for new colleagues and for visitors.", ["town", "site"]),
    "products": ("Instruments of the {d} division", "What we build, and who is behind it.", ["product"]),
    "projects": ("Projects of the {d} division", "Our projects, as reported to the board.", ["project"]),
    "partners": (
        "Partners of the {d} division",
        "Firms, clients and schools that we work with.",
        ["firm", "university"],
    ),
}
ENDINGS = {("River", "projects"): "txt", ("Snow", "partners"): "txt", ("Coast", "partners"): "html"}
LISTS = {"people": ("designed", "leads"), "partners": ("supplies sensors for", "pays for")}
PHRASES = {"designed": "{0} designed the {1} and the {2}.", "leads": "{0} leads the projects {1} and {2}.",
           "supplies sensors for": "{0} supplies the sensors of the {1} and the {2}.",
           "pays for": "{0} pays for the projects {1} and {2}."}  # fmt: skip


def things():
    """Yield division, kind, name and values of every thing in the table."""
    for division, kinds in TABLE["divisions"].items():
        for kind, rows in kinds.items():
            for name, values in rows.items():
                yield division, kind, name, [str(value) for value in values]


KIND = {key(name): kind for _, kind, name, _ in things()}


def draw(text, count):
    """Return a number below `count` that depends only on the text."""
    return hashlib.sha256(text.encode()).digest()[0] % count


def section(kind, name, values):
    """Yield sentences about a thing, each with the triples that the sentence states."""
    ways = TABLE["sentences"][kind]
    he, his = {"she": ("she", "her")}.get(values[0], ("he", "his"))
    words = {"he": he, "his": his, "He": he.capitalize(), "His": his.capitalize()}
    words["a1"] = f"{'an' if values[0][0] in 'aeiou' else 'a'} {values[0]}"
    columns = TABLE["columns"][kind]
    for sentence, *stated in ways[draw(name, len(ways))]:
        triples = [(name, columns[n - 1], values[n - 1].removeprefix("its ")) for n in stated]
        yield sentence.format(name, *values, **words), triples


def lists(division, page):
    """Yield sentences about who designed, leads, supplies or pays for two things, with their triples."""
    for predicate in LISTS.get(page, ()):
        found = {}
        for where, kind, name, values in things():
            columns = TABLE["columns"][kind]
            if where == division and INVERSE[predicate] in columns:
                found.setdefault(values[columns.index(INVERSE[predicate])], []).append(name)
        for owner, owned in found.items():
            if len(owned) == 2:
                yield PHRASES[predicate].format(owner, *owned), [(owner, predicate, one) for one in owned]


def pages():
    """Yield file name, heading, introduction and sections of each document; a section is a name and its sentences."""
    for division in TABLE["divisions"]:
        for page, (heading, introduction, kinds) in PAGES.items():
            found = [
                (name, list(section(kind, name, values)))
                for where, kind, name, values in things()
                if where == division and kind in kinds
            ]
            if rows := list(lists(division, page)):
                found.append(("Who has designed and leads what" if page == "people" else "What they do for us", rows))
            ending = ENDINGS.get((division, page), "html" if page == "places" else "md")
            yield f"{division.lower()}-{page}.{ending}", heading.format(d=division), introduction, found


def write_documents():
    DOCUMENTS.mkdir(exist_ok=True)
    for file, heading, introduction, sections in pages():
        texts = [(name, " ".join(sentence for sentence, _ in rows)) for name, rows in sections]
        if file.endswith("md"):
            text = f"# {heading}\n\n{introduction}\n" + "".join(f"\n## {name}\n\n{text}\n" for name, text in texts)
        elif file.endswith("txt"):
            text = f"{heading}\n\n{introduction}\n" + "".join(f"\n{text}\n" for _, text in texts)
        else:
            body = "".join(f"<h2>{html.escape(name)}</h2>\n<p>{html.escape(text)}</p>\n" for name, text in texts)
            head = f'<!doctype html>\n<html lang="en">\n<head><title>{heading}</title></head>\n<body>\n'
            text = f"{head}<h1>{heading}</h1>\n<p>{introduction}</p>\n{body}</body>\n</html>\n"
        (DOCUMENTS / file).write_text(text, encoding="utf-8")


SENTENCES = [(sentence, triples) for *_, sections in pages() for _, rows in sections for sentence, triples in rows]


class Teacher:
    """Replies to the prompts of `rag extract`, `build questions` and, for questions that it wrote, RAS."""

    def __init__(self):
        roles = load_question_prompts().texts
        self.roles = {roles[role.replace(".", "_")]: role for role in (WORD_ROLE, READ_ROLE, RECALL_ROLE)}
        self.roles[TEACHER_PROMPT.read_text(encoding="utf-8").strip()] = "extract"
        self.roles |= {text: role for role, text in load_prompts((PLAN, ANSWER)).texts.items()}
        self.asked = {}

    def reply(self, messages):
        role, text = self.roles[messages[0]["content"].strip()], messages[-1]["content"]
        if role == "extract":
            return format_triples(Triple(*one) for one in facts_of(text)) or "NONE"
        if role == WORD_ROLE:
            return json.dumps(self.word(text), ensure_ascii=False)
        if role in (PLAN, ANSWER):
            return self.plan(text) if role == PLAN else self.read(text)
        # A model without passages does not know the fictional company.
        return "unknown" if role == RECALL_ROLE else self.answer(*text.rsplit("\n\nQuestion: ", 1)) or "unknown"

    def word(self, text):
        kind, wanted = re.match(r"Kind: (\w+)(?: \((.*)\))?", text).groups()
        facts = [tuple(line.split(". ", 1)[1].split(" | ")) for line in re.findall(r"^\d+\. .* \| .*$", text, re.M)]
        made = {"chain": chain, "comparison": lambda rows: compare(rows, wanted), "intersection": common}[kind](facts)
        if not made:
            return {"question": ""}
        question, subqueries, ask = made
        self.asked[question] = subqueries, ask
        return {"question": question, "subqueries": subqueries}

    def answer(self, passages, question):
        return self.asked[question][1]({(key(s), p, o) for s, p, o in facts_of(passages)})

    def plan(self, text):
        history, question = text.rsplit("Question: ", 1)
        left = self.asked[question][0][history.count("[SUBQ]") :]
        return f"[SUBQ] {left[0]}" if left else "[SUFFICIENT]"

    def read(self, text):
        history, question = text.rsplit("Question: ", 1)
        facts = {(key(one.subject), one.predicate, one.object) for one in parse_triples(history).triples}
        return self.asked[question][1](facts) or "unknown"


def facts_of(text):
    """Return the triples of the table's sentences in a text, if their subject is in the text too."""
    plain = " ".join(text.split())
    return [one for sentence, rows in SENTENCES if sentence in plain for one in rows if one[0] in plain]


def values(facts, subject, predicate):
    """Return the objects of a subject's predicate in the facts, also from inverse triples."""
    found = {o for s, p, o in facts if (s, p) == (key(subject), predicate)}
    return found | {names(s) for s, p, o in facts if INVERSE.get(p) == predicate and key(o) == key(subject)}


def owned(facts, owner, predicate):
    found = {o for s, p, o in facts if s == key(owner) and INVERSE.get(p) == predicate}
    return found | {names(s) for s, p, o in facts if p == predicate and key(o) == key(owner)}


def names(normal):
    return next(name for *_, name, _ in things() if key(name) == normal)


def called(name):
    kind = KIND.get(key(name))
    return {"product": f"the {name}", "project": f"the {name} project"}.get(kind, name)


def chain(facts):
    chance = " ".join(map(str, facts))
    phrase = called(facts[0][0])
    for _, predicate, _ in facts[:-1]:
        forms = TABLE["refer"].get(predicate)
        if not forms:
            return None
        # A nested phrase must be the last part of the outer phrase.
        forms = [form for form in forms if phrase == called(facts[0][0]) or form.endswith("{x}")]
        phrase = forms[draw(chance + predicate, len(forms))].format(x=phrase)
    asks = [TABLE["ask"].get(predicate) for _, predicate, _ in facts]
    if not all(asks):
        return None

    def answer(known):
        found = {facts[0][0]}
        for _, predicate, _ in facts:
            found = {o for one in found for o in values(known, one, predicate)}
        return found.pop() if len(found) == 1 else ""

    subqueries = [form[draw(chance, 2)].format(x=called(fact[0])) for form, fact in zip(asks, facts)]
    return asks[-1][draw(chance + "!", 2) if len(facts) < 3 else 0].format(x=phrase), subqueries, answer


def compare(facts, wanted):
    (a, predicate, _), (b, _, _) = facts
    test = {"smaller or earlier": "less", "larger or later": "more"}.get(wanted, "same")
    form = TABLE[test].get(predicate)
    if not form:
        return None

    def number(text):
        return float(re.sub(r"[^\d.]", "", text))

    def answer(known):
        found = [values(known, name, predicate) for name in (a, b)]
        if not all(len(one) == 1 for one in found):
            return ""
        (one,), (other,) = found
        if test == "same":
            return "yes" if one == other else "no"
        return a if (number(one) < number(other)) == (test == "less") else b

    ask = TABLE["ask"][predicate][0]
    return form.format(a=called(a), b=called(b)), [ask.format(x=called(name)) for name in (a, b)], answer


def common(facts):
    rows = []
    for subject, predicate, thing in facts:
        given, name = (subject, INVERSE[predicate]) if predicate in INVERSE else (thing, predicate)
        if name not in TABLE["shared"]:
            return None
        rows.append((given, name, *TABLE["shared"][name]))
    (a, first, what, one, _), (b, second, other, two, _) = rows
    if what != other:
        return None

    def answer(known):
        found = owned(known, a, first) & owned(known, b, second)
        return found.pop() if len(found) == 1 else ""

    question = f"Which {what} {one.format(x=called(a))} and {two.format(x=called(b))}?"
    return question, [row[4].format(x=called(row[0])) for row in rows], answer


class Handler(BaseHTTPRequestHandler):
    teacher = Teacher()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.teacher.reply(body["messages"])
        counts = [sum(len(one["content"]) for one in body["messages"]) // 4, len(text) // 4 + 1]
        usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        data = json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def record():
    """Run the recipe's chat model steps and the notebook's last step with the teacher, and save its calls."""
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with tempfile.TemporaryDirectory() as scratch:
        home, program = f"{scratch}/road", [sys.executable, "-m", "tripletune"]
        for command in road(home, url):
            if command.split()[1] in ("build", "rag"):
                subprocess.run([*program, *command.split()[1:]], check=True)
        rows = map(json.loads, Path(home, "questions/test.jsonl").read_text(encoding="utf-8").splitlines())
        question = next(row["question"] for row in rows if row["type"] == "2-hop")
        ledger, llm = f"{home}/ledger.sqlite", f"openai:tarnbeck-teacher@{url}"
        where = f"--corpus {home}/passages --triples {home}/triples.sqlite --top-k 1 --first-query generated"
        ask = ["ask", question, *where.split(), "--llm", llm, "--teacher-ledger", ledger]
        for words in (ask, ["ledger", "export", ledger, "--output", f"{scratch}/calls.jsonl"]):
            subprocess.run([*program, *words], check=True)
        calls = (Path(scratch) / "calls.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) | {"seconds": 0.0, "time": "2026-01-01T00:00:00+00:00"} for line in calls]
        rows.sort(key=lambda row: row["key"])
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))
    server.shutdown()


def road(output, url="http://127.0.0.1:9/v1", calls=None):
    """Return the recipe's commands for these documents."""
    given = {
        "output_dir": output,
        "documents": [str(DOCUMENTS)],
        "llm": f"openai:tarnbeck-teacher@{url}",
        "calls": calls,
    }
    config = load_config(RoadConfig, HOME.parent / "recipes/configs/example_documents.yaml", given)
    return [command for _, command, _ in walk(config)]


if __name__ == "__main__":
    {"documents": write_documents, "record": record}[sys.argv[1]]()
