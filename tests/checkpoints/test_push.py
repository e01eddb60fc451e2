import base64
import json
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import utils
from packaging.version import Version

from tests.cli import run
from tripletune.checkpoints import __main__ as program
from tripletune.core.hub import push_folder
from tripletune.train import train
from tripletune.train.tasks.ras import GraphTask

CARD = "---\nlicense: mit\n---\n# A model\n"


@pytest.fixture
def hub(monkeypatch):
    """A Hub on this machine: what it was asked for, and the files of its commits."""
    found = SimpleNamespace(made=[], files={}, tokens=set(), status=200)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found.tokens.add(self.headers.get("Authorization"))
            rows = [json.loads(line) for line in body.splitlines()] if body else []
            reply = {"url": f"{found.url}/me/m", "name": "me/m", "id": "1"}
            if self.path == "/api/repos/create":
                found.made.append(rows[0])
            elif "/preupload/" in self.path:
                reply = {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                                   for one in rows[0]["files"]]}  # fmt: skip
            elif "/commit/" in self.path:
                for row in rows:
                    if row["key"] == "file":
                        found.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
                    elif row["key"] == "deletedFile":
                        del found.files[row["value"]["path"]]
                reply = {"success": True, "commitOid": "c0ffee", "commitUrl": f"{found.url}/me/m/commit/c0ffee"}
            self.answer(reply)

        def do_GET(self):
            files = [{"type": "file", "path": name, "oid": "1", "size": 1} for name in found.files]
            self.answer(files if "/tree/" in self.path else {"id": "me/m", "sha": "c0ffee", "siblings": []})

        def answer(self, reply):
            data = json.dumps(reply if found.status == 200 else {"error": "no such right"}).encode()
            self.send_response(found.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for module in (huggingface_hub.constants, huggingface_hub.hf_api.constants):
        monkeypatch.setattr(module, "ENDPOINT", found.url)
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "__init__", _init(found.url))
    monkeypatch.setattr("huggingface_hub.repocard.constants.ENDPOINT", found.url, raising=False)
    if Version(huggingface_hub.__version__) < Version("2.2"):
        # It asks huggingface.co whether a card is valid, whatever the endpoint.
        def validate(card, repo_type):
            utils.hf_raise_for_status(utils.get_session().post(f"{found.url}/api/validate-yaml", json={}))

        monkeypatch.setattr(huggingface_hub.ModelCard, "validate", validate)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield found
    server.shutdown()


def _init(url, original=huggingface_hub.HfApi.__init__):
    return lambda self, **options: original(self, **{"endpoint": url, **options})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "m").mkdir()
    for name, text in {"README.md": CARD, "config.json": "{}", "notes.txt": "mine"}.items():
        (tmp_path / "m" / name).write_text(text)
    return tmp_path / "m"


def test_named_files_are_pushed_in_one_commit_and_the_token_stays_away(hub, folder):
    assert push_folder(folder, "me/m", "model", ["README.md", "*.json"]).startswith(hub.url)
    assert hub.files == {"README.md": CARD.encode(), "config.json": b"{}"}
    assert hub.made == [{"name": "m", "organization": "me", "visibility": "private", "type": "model"}]
    assert "Bearer hf_secret" in hub.tokens
    assert not any(b"hf_secret" in path.read_bytes() for path in folder.iterdir())


def test_a_refusal_is_one_line(hub, folder):
    hub.status = 403
    with pytest.raises(OSError, match=r"127.0.0.1.* refused me/m \(403\): .*hf auth login"):
        push_folder(folder, "me/m", "model", ["*"])


@pytest.mark.parametrize("passed", [True, False])
def test_only_a_folder_that_verifies_is_pushed(passed, hub, folder, monkeypatch):
    monkeypatch.setattr(program, "verify", lambda folder: [SimpleNamespace(passed=passed)])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").touch()
    hub.files = {"adapter_model.safetensors": b"of an adapter", "adapter_config.json": b"{}"}
    ran = run("checkpoints", "push", folder, "me/m")
    assert ran.code == (0 if passed else 2)
    assert [one["visibility"] for one in hub.made] == ["private"] * passed
    assert ("does not verify" in ran.err) is not passed
    pushed = {"README.md", "config.json", "additional_chat_templates/tool_use.jinja"}
    assert set(hub.files) == (pushed if passed else {"adapter_model.safetensors", "adapter_config.json"})


def test_no_connection_is_one_line(hub, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "__init__", _init("http://127.0.0.1:9"))
    with pytest.raises(OSError, match="no connection to http"):
        push_folder(folder, "me/m", "model", ["*"])


@pytest.mark.parametrize("status", [200, 403])
def test_a_run_is_exported_and_pushed_at_its_end(status, hub, make_config, tiny_run, same_process, monkeypatch):
    def child(words, original=subprocess.run, **options):
        if words[0] != sys.executable:  # git, for the code's version
            return original(words, **options)
        hub.status = status
        ran = run(words[3], *words[4:])
        assert status == 200 or "refused me/m (403)" in ran.error
        return SimpleNamespace(returncode=ran.code)

    monkeypatch.setattr("tripletune.train.subprocess.run", child)
    config = make_config({"push_to_hub": "me/m"})
    refused = pytest.raises(OSError, match=rf"trained, but the push failed.*checkpoints push {config.output_dir} me/m")
    with refused if status == 403 else nullcontext():
        train(
            GraphTask(config),
            run=lambda task, checkpoint: shutil.copytree(tiny_run, config.output_dir, dirs_exist_ok=True),
        )
    assert [one["visibility"] for one in hub.made] == ["private"] * (2 if status == 200 else 1)
    assert ("adapter_model.safetensors" in hub.files) is (status == 200)
    assert not [name for name in hub.files if name.startswith(("checkpoint", "optim", "training"))]
    assert b"/home/someone" not in b"".join(hub.files.values())


def test_a_run_that_can_not_be_pushed_does_not_begin(hub, make_config):
    hub.status = 403
    with pytest.raises(OSError, match=r"refused me/m \(403\)"):
        train(GraphTask(make_config({"push_to_hub": "me/m"})), run=lambda task, checkpoint: pytest.fail("it began"))


def test_a_data_set_in_order_is_pushed(hub, tmp_path, records, write_records):
    data = write_records(records)
    (data / "README.md").write_text(CARD)
    (data / "cache.bin").write_bytes(b"0")
    hub.files = {"train-00001.jsonl": b"of a larger data set", "LICENSE": b""}
    assert run("data", "push", data, "me/m").code == 0
    assert hub.made[0]["type"] == "dataset"
    assert set(hub.files) == {"README.md", "train-00000.jsonl", "LICENSE"}
    (data / "train-00000.jsonl").write_text("{}\n")
    assert "is not valid, so it was not pushed" in run("data", "push", data, "me/m").error
