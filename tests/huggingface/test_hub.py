"""Models by their ID, from a server here that answers as the Hugging Face hub does."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from support.harness import ROOT

import tunix

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
        (FIND, ID, {"HF_ENDPOINT": "http://localhost:1"}, "Connection refused)"),
    ],
    ids=["unknown", "gated", "offline", "tokenizer unknown", "tokenizer offline", "unreachable"],
)  # fmt: skip
def test_why_it_cannot_be_fetched(code, model, env, message, hub, tmp_path):
    process = start(model, tmp_path, code, **{**hub[0], **env})
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert message in err.splitlines()[-1]


@pytest.fixture
def pushed(monkeypatch):
    """What a hub here was sent: the names of models with their files; "taken/name" is refused."""
    import base64

    sent: dict[str, dict[str, bytes]] = {}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, code, body):
            data = json.dumps(body).encode()
            self.send_response(code)
            for name, value in {"Content-Length": len(data), "Content-Type": "application/json"}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != "Bearer secret" or b"taken" in data:
                self.answer(403, {"error": "Forbidden"})
            elif self.path == "/api/repos/create":
                info = json.loads(data)
                name = f"{info.get('organization', 'someone')}/{info['name']}"
                sent[name] = {"visibility": str(info.get("visibility", info.get("private"))).encode()}
                self.answer(200, {"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
            elif "/preupload/" in self.path:
                files = [
                    {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for each in json.loads(data)["files"]
                ]
                self.answer(200, {"files": files})
            elif "/commit/" in self.path:
                name = "/".join(self.path.split("/")[3:5])
                for line in map(json.loads, data.splitlines()):
                    if line["key"] == "file":
                        sent[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer(
                    200,
                    {
                        "success": True,
                        "commitUrl": f"http://{self.headers['Host']}/{name}/commit/{COMMIT}",
                        "commitOid": COMMIT,
                        "hookOutput": "",
                    },
                )
            else:
                self.answer(200, {"errors": [], "warnings": []})  # of the card's header

        def do_GET(self):
            self.answer(404 if "taken" in self.path else 200, {"id": "x", "sha": COMMIT, "siblings": []})

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("localhost", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"HF_ENDPOINT": f"http://localhost:{server.server_port}", "HF_TOKEN": "secret"}, sent
        server.shutdown()


def export_as_user(env, folder, *words):
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "home"),
        "NO_PROXY": "localhost",
        "HF_HUB_DISABLE_XET": "1",
        **env,
    }
    return subprocess.run(
        [sys.executable, "-m", "tunix.export", *words], cwd=folder, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.nightly
def test_an_export_is_pushed_with_a_card_of_its_run(pushed, hf_dir, tmp_path):
    """The files of the folder and no others; the card has the licence of the base, numbers of the run and its curve."""
    env, sent = pushed
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(hf_dir, base)
    (base / "README.md").write_text("---\nlicense: gemma\n---\n# Base\n")
    training = [
        f"model.init_from={base}", "data=synthetic", "training.seq_len=16", "training.max_steps=3", "training.global_batch_size=2",
        "training.loss_chunk_size=16", "evaluation.every_steps=1", "evaluation.num_sequences=2", "evaluation.sample_tokens=0",
        f"hydra.run.dir={run}", "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", "model.lora.rank=2",
    ]  # fmt: skip
    tunix.train(training)
    (run / "results.json").write_text(json.dumps({"loss": 1.5, "rows": [1]}))
    done = export_as_user(env, tmp_path, f"checkpoint={run}", f"output={tmp_path / 'out'}", "push=someone/tuned")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"sent to {env['HF_ENDPOINT']}/someone/tuned")
    files = sent["someone/tuned"]
    assert files.pop("visibility") in (b"private", b"True")
    assert files.keys() == {path.name for path in (tmp_path / "out").iterdir()}
    card = files["README.md"].decode()
    for part in (
        'library_name: "peft"',
        'license: "gemma"',
        "# tuned",
        "| steps | 3 |",
        "| tokens | 96 |",
        "held-out loss at step 3",
        "| loss | 1.5 |",
        "![Loss",
    ):
        assert part in card, card
    assert Image.open(io.BytesIO(files["loss.png"])).size == (800, 400)


def test_a_push_that_is_refused_writes_nothing(pushed, hf_dir, tmp_path):
    env, _ = pushed
    for name, message in (
        ("taken/name", "push=taken/name could not be sent to the hub: HF_TOKEN is missing, or may not write there"),
        ("name", "push=name: expected OWNER/NAME"),
    ):
        done = export_as_user(env, tmp_path, f"checkpoint={hf_dir}", "output=out", f"push={name}")
        assert done.returncode == 2
        assert message in done.stderr
        assert not (tmp_path / "out").exists()
