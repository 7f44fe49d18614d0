"""A real MLflow server on this machine, with a database of its own, and a door before it that can be shut."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 240.0


class Server:
    """The server's REST API, as a program asks it that has no client of MLflow."""

    def __init__(self, port: int):
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def ask(self, method: str, /, **parameters: Any) -> Any:
        """Return the answer to `GET /api/2.0/mlflow/METHOD`."""
        return json.loads(self.fetch(f"api/2.0/mlflow/{method}", **parameters))

    def fetch(self, path: str, /, **parameters: Any) -> bytes:
        with urllib.request.urlopen(f"{self.url}/{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
            return answer.read()

    def list_values(self, run_id: str, name: str) -> dict[int, float]:
        """Return the values of a metric by step; none where the server does not know the metric yet."""
        answer = self.ask("metrics/get-history", run_id=run_id, metric_key=name)
        return {metric["step"]: metric["value"] for metric in answer.get("metrics", ())}


@contextmanager
def serve_mlflow(folder: Path) -> Iterator[Server]:
    """`mlflow server`, with its database and its artifacts in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/runs.sqlite", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words], env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        server, deadline = Server(port), time.monotonic() + START_S
        while not _is_up(server):
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.2)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_up(server: Server) -> bool:
    try:
        return server.fetch("health") == b"OK"
    except (OSError, urllib.error.URLError):
        return False


class Door:
    """An address that leads to a server while the door is open. Shut, it is the address of a server that has died."""

    def __init__(self, server: Server):
        self.server, self.port = server, 0
        self.connections: list[socket.socket] = []
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def shut(self) -> None:
        """Refuse new connections, and end those that are there."""
        for connection in (self.listener, *self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.connections.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server.port))
                self.connections += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
