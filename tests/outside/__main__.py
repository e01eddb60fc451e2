"""Run every program and the commands of README and guide from a wheel, outside the clone, and print a table.

    python -m tests.outside --output FOLDER            # about half an hour on two cores
    python -m tests.outside --output FOLDER --only triples.md

A command whose exit code is not the expected one is shown with the end of its output, and the exit code here is 1. The
same command continues a stopped run: commands that ended as expected are not run again. The chat model is a mock
server, which answers from the facts of the made-up world and of `examples/`.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.cli import read_lines
from tests.outside.commands import LONGEST, PAGES, Command, commands_of_pages
from tests.outside.environment import CLEAN, build_wheel, install
from tests.outside.inputs import write_documents, write_inputs
from tests.outside.programs import CARDS, PROGRAM_COMMANDS
from tests.outside.teacher import mock_server


def main() -> int:
    """Run from a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", required=True, type=Path, help="folder for wheel, environment, results and table.md"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run README, and the pages with one of these words in their name"
    )
    options = parser.parse_args()
    home = options.output.resolve()
    programs = home / "environment" / "bin"
    if not programs.exists():
        (home / "source").mkdir(parents=True)
        install(build_wheel(home / "source"), programs.parent)
    work = home / "work"
    if not work.exists():
        work.mkdir()
        write_documents(work)
    done = home / "results.jsonl"
    results = {(row["page"], row["command"]): row for row in (read_lines(done) if done.exists() else [])}
    # Two runs with other pages may share the folder.
    log_file = work / f"log{os.getpid()}.txt"
    rows: list[list[str]] = []
    failures = 0
    with mock_server(work / "runs" / "world") as server:
        pages = [page for page in PAGES if page == "README.md" or _is_chosen(page, options.only)]
        commands = commands_of_pages(pages, server.url)
        if _is_chosen("programs", options.only):
            commands += [Command("programs", text, text.replace("SERVER", server.url)) for text in PROGRAM_COMMANDS]
            commands += [Command("programs", f"code of {folder}/README.md", folder) for folder in CARDS]
        for command in commands:
            if command.page != "README.md" and not (work / "corpus.jsonl").exists():
                write_inputs(work)
            earlier = results.get((command.page, command.shown), {})
            if earlier.get("code") == str(command.code):
                rows.append([command.page, command.shown, earlier["code"], earlier["seconds"]])
                continue
            code, seconds = _result(command, programs, log_file)
            result = {"page": command.page, "command": command.shown, "code": code, "seconds": seconds}
            with done.open("a") as file:
                file.write(f"{json.dumps(result)}\n")
            rows.append([command.page, command.shown, code, seconds])
            failed = code not in ("-", str(command.code))
            failures += failed
            print(f"{command.page} | {command.shown[:150]} | {code} | {seconds}", flush=True)
            if failed:
                print(log_file.read_text()[-1500:], flush=True)
    lines = ["| page | command | code | seconds |", "|---|---|---|---|"]
    lines += [f"| {page} | `{shown}` | {code} | {seconds} |" for page, shown, code, seconds in rows]
    (home / "table.md").write_text("\n".join([*lines, ""]))
    print(f"{len(rows)} commands, {failures} not as expected; the table is {home / 'table.md'}")
    return int(failures > 0)


def _is_chosen(page: str, words: list[str]) -> bool:
    """Whether a page's name holds one of the words."""
    return any(word in page for word in words)


def _result(command: Command, programs: Path, log_file: Path) -> tuple[str, str]:
    """Exit code and seconds of a command, or "-" and why it is left out; its output goes to `log_file`.

    The command runs in the folder of the file.
    """
    if command.why_left_out:
        return "-", command.why_left_out
    work = log_file.parent
    package = next(programs.parent.glob("lib/*/site-packages/tripletune"))
    text = command.text
    if not text.startswith("tripletune"):
        # The launcher and Python take files, which are in the package.
        text = text.replace("recipes/", f"{package}/recipes/")
    words = shlex.split(text)
    if command.shown.startswith("code of "):
        code = "\n".join(re.findall(r"^```python\n(.*?)^```", (work / text / "README.md").read_text(), re.M | re.S))
        words = ["python", "-c", code.replace("max_new_tokens=64", "max_new_tokens=4")]
    modules = {"tripletune": "tripletune", "accelerate": "accelerate.commands.accelerate_cli"}
    started = [str(programs / "python"), *(["-m", modules[words[0]]] if words[0] in modules else []), *words[1:]]
    environment = CLEAN | {"OPENAI_API_KEY": "x", "HF_HUB_OFFLINE": "1", "SERVE_KEY": "key"}
    began = time.monotonic()
    with log_file.open("w") as log:
        # A server of tools ends with its standard input.
        process = subprocess.Popen(
            started, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            if words[:2] == ["tripletune", "serve"] and "--mcp" not in words:
                _ask_server(process, "--api-key-env" in words)
            code = process.wait(LONGEST)
        except (subprocess.TimeoutExpired, OSError) as error:
            process.kill()
            code = process.wait() or 1
            log.write(f"\n{error!r}")
    missing = re.search(r"run pip install 'tripletune\[(\w+)\]'", log_file.read_text())
    if code == 2 and missing:
        return "-", f"needs the extra {missing[1]}, which is not installed here"
    return str(code), f"{time.monotonic() - began:.0f}"


def _ask_server(process: "subprocess.Popen[bytes]", has_key: bool) -> None:
    """Ask a server a question as soon as it listens, then stop it as Ctrl+C does."""
    headers = {"Content-Type": "application/json"}
    if has_key:
        headers["Authorization"] = "Bearer key"
    message = {"role": "user", "content": "Who leads the project Clearwater?"}
    until = time.monotonic() + LONGEST
    while True:
        try:
            with urllib.request.urlopen("http://127.0.0.1:8000/healthz", timeout=5):
                break
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.5)
    models = urllib.request.Request("http://127.0.0.1:8000/v1/models", headers=headers)
    with urllib.request.urlopen(models, timeout=5) as response:
        first_model = json.load(response)["data"][0]["id"]
    body = json.dumps({"model": first_model, "messages": [message]}).encode()
    request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=LONGEST) as response:
        assert json.load(response)["choices"]
    process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
