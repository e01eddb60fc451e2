"""The server of the benchmark of calls."""

import json

from benchmarks.calls import CallsOptions, _eval_command, _Server


def test_a_recorded_call_is_answered_and_another_one_refused_and_counted():
    messages = [{"role": "user", "content": "Who?"}]
    server = _Server({'[{"content":"Who?","role":"user"}]': "Ada"})
    head, _, content = server._respond_and_count(json.dumps({"messages": messages}).encode()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert int(head.rpartition(b" ")[2]) == len(content)
    assert json.loads(content)["choices"][0]["message"]["content"] == "Ada"
    refused = server._respond_and_count(b'{"messages": []}')
    assert refused.startswith(b"HTTP/1.1 404")
    assert (server.calls, server.unknown) == (2, 1)


def test_the_command_has_the_pass_and_its_ledger(tmp_path):
    options = CallsOptions(concurrency=8)
    command = _eval_command("cirag", options, tmp_path, tmp_path / "pass", 5)
    assert command[command.index("--limit") + 1] == "5"
    assert command[command.index("--teacher-concurrency") + 1] == "8"
    assert command[command.index("--ledger") + 1] == str(tmp_path / "pass" / "ledger.sqlite")
    assert "extraction=store" in command
    assert "--ledger" not in _eval_command("ras", CallsOptions(ledger=False), tmp_path, tmp_path / "pass", 5)
