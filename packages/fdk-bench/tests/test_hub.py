"""Models by their id on a hub: a server on loopback answers Hugging Face's own client."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "0123456789" * 4
SENTENCES = "the cat sat on a mat\nthe dogs ran far from home\n"


class Hub(BaseHTTPRequestHandler):
    """One model, as the hub gives it: what there is, and its files."""

    folder, name, asked = None, "someone/tiny", []

    def do_HEAD(self):
        self.asked.append(self.path)
        path = re.sub(r"\?.*", "", self.path)
        file = re.fullmatch(rf"/{self.name}/resolve/(?:main|{COMMIT})/(.+)", path)
        if file and (self.folder / file[1]).is_file():
            data = (self.folder / file[1]).read_bytes()
            return self.answer(200, data, ETag=f'"{hashlib.sha256(data).hexdigest()}"')
        about = re.fullmatch(rf"/api/models/{self.name}((?:/(?:tree|revision)/\w+)?)", path)
        if about:
            names = sorted(f.name for f in self.folder.iterdir())
            told = {"id": self.name, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            if about[1].startswith("/tree"):
                told = [{"type": "file", "path": n, "oid": "0", "size": 1} for n in names]
            return self.answer(200, json.dumps(told).encode())
        known = file or path.startswith(f"/api/models/{self.name}/")
        missing = "EntryNotFound" if known else "RepoNotFound"
        return self.answer(404, b"", **{"X-Error-Code": missing})

    def do_GET(self):
        self.do_HEAD()

    def answer(self, status, data, **headers):
        self.send_response(status)
        for name, value in (headers | {"X-Repo-Commit": COMMIT}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def run_with_hub(tmp_path):
    """Runs ``fdk-bench`` with a hub that has one folder; gives what was printed and asked for."""
    servers = []

    def run(folder, *arguments):
        handler = type("Handler", (Hub,), {"folder": folder, "asked": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "COLUMNS": "200",
        }
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-m", "fdk_bench", *map(str, arguments), "--out", tmp_path / "out"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done, handler.asked

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_models_by_id(run_with_hub, hf_folder, write_tokenizer, tmp_path):
    write_tokenizer(hf_folder)
    (tmp_path / "text.txt").write_text(SENTENCES)
    formats = "-b", "16,4", "--format", "int", "-g", "32", "--backend", "reference"
    few = "--no-compile", "--context", "5", "--reps", "2", "--device", "cpu", "--dtype", "fp32"
    done, asked = run_with_hub(
        hf_folder, "models", "--model", Hub.name, *formats, *few, "--text", tmp_path / "text.txt"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(path.endswith("/model.safetensors") for path in asked)
    rows = rows_of(tmp_path / "out" / "models.jsonl")
    assert [row["case"]["format"] for row in rows] == ["fp32", "int4-g32"]
    for row in rows:
        assert row["case"]["model"] == Hub.name
        assert row["values"]["tokens_per_second"] > 0
        assert row["values"]["perplexity"] > 1


def test_accuracy_by_id(run_with_hub, bert_folder, tmp_path):
    done, asked = run_with_hub(
        bert_folder, "accuracy", "--model", Hub.name, "--formats", "int4-g32"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(path.endswith("/model.safetensors") for path in asked)
    rows = rows_of(tmp_path / "out" / "accuracy.jsonl")
    assert 0 < rows[-1]["values"]["weight_error"] < 0.3


def test_an_id_that_the_hub_has_not(run_with_hub, hf_folder, tmp_path):
    done, asked = run_with_hub(
        hf_folder, "models", "--model", "someone/absent", "-b", "16", "--device", "cpu"
    )
    assert done.returncode == 1
    assert any("/someone/absent/" in path for path in asked)
    rows = rows_of(tmp_path / "out" / "models.jsonl")
    assert all("someone/absent" in row["error"] for row in rows)
