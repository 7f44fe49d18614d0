"""Models by their ID, from a server here that answers as the Hugging Face hub does."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.harness import ROOT

ID, COMMIT = "someone/small-model", "0123456789abcdef0123456789abcdef01234567"
FIND = "import sys; from tunix.huggingface.hub import *; print(find(sys.argv[1], INFO_FILES + WEIGHTS))"
READ = "import sys; from tunix.data.tokenizer import find_tokenizer_files; print(find_tokenizer_files(sys.argv[1]))"


@pytest.fixture
def hub(hf_dir):
    """Environment variables for it, and how often each path was fetched."""
    fetched = Counter()
    files = {path.name: path.read_bytes() for path in hf_dir.iterdir()}
    files |= {"pytorch_model.bin": b"pickled", "modeling.py": b"import os"}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, code, body=b"", **headers):
            self.send_response(code)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command == "GET":
                fetched[self.path] += 1
                self.wfile.write(body)

        def do_GET(self):
            name = self.path.rpartition("/")[2]
            if "gated" in self.path:
                self.answer(
                    403, X_Error_Code="GatedRepo", X_Error_Message="Access to model someone/gated is restricted"
                )
            elif ID not in self.path:
                self.answer(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            elif self.path.startswith("/api/models/"):
                info = {"id": ID, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                if "/tree/" in self.path:
                    info = [
                        {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                        for name, data in files.items()
                    ]
                self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
            else:
                self.answer(200, files[name], ETag=f'"{hash(files[name]) & 0xFFFFFFFF:x}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("localhost", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"HF_ENDPOINT": f"http://localhost:{server.server_port}"}, fetched
        server.shutdown()


def start(model, folder, code=FIND, **env):
    environment = {**os.environ, "HF_HOME": str(folder), "NO_PROXY": "localhost", "HF_HUB_DISABLE_XET": "1", **env}
    return subprocess.Popen(
        [sys.executable, "-c", code, model], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def test_processes_fetch_each_file_once_and_nothing_that_runs(hub, hf_dir, tmp_path):
    env, fetched = hub
    together = [start(ID, tmp_path, **env) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in together]
    assert [process.returncode for process in together] == [0] * 3, said
    (folder,) = {out.split()[-1] for out, _ in said}
    for path in hf_dir.iterdir():
        assert fetched[f"/{ID}/resolve/{COMMIT}/{path.name}"] == 1, fetched
        assert Path(folder, path.name).read_bytes() == path.read_bytes()
    assert not any(name in path for path in fetched for name in ("pytorch_model.bin", "modeling.py"))

    offline = start(ID, tmp_path, HF_HUB_OFFLINE="1")
    assert offline.communicate(timeout=60)[0].split()[-1] == folder


@pytest.mark.parametrize(
    ("code", "model", "env", "message"),
    [
        (FIND, "someone/unknown", {}, "from the Hugging Face hub: it has no model of this name; a private one needs HF_TOKEN"),
        (FIND, "someone/gated", {}, "access to it has to be granted on its page, and HF_TOKEN set"),
        (FIND, ID, {"HF_HUB_OFFLINE": "1"}, "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set"),
        (READ, "someone/unknown", {}, "from the Hugging Face hub: it has no model of this name; a private one needs HF_TOKEN"),
        (READ, ID, {"HF_HUB_OFFLINE": "1"}, "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set"),
        (FIND, ID, {"HF_ENDPOINT": "http://localhost:1"}, "it is not in the cache, and the hub is out of reach"),
    ],
    ids=["unknown", "gated", "offline", "tokenizer unknown", "tokenizer offline", "unreachable"],
)  # fmt: skip
def test_why_it_cannot_be_fetched(code, model, env, message, hub, tmp_path):
    process = start(model, tmp_path, code, **{**hub[0], **env})
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert message in err.splitlines()[-1]
