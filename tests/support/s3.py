"""A real server of S3's protocol on this machine, which can be told to deny, to be slow, and to vanish."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

BUCKET = "shelf"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Server:
    """moto's server, behind a door. `held` names requests (parts of their paths) that wait until `release`."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.app = DomainDispatcherApplication(create_backend_app)
        self.denies, self.held, self.waiting = False, "", threading.Event()
        self.released = threading.Event()
        self.http = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __call__(self, environ, start_response):
        path = environ["PATH_INFO"]
        if self.denies:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [DENIED]
        if self.held and self.held in path and environ["REQUEST_METHOD"] == "PUT":
            self.waiting.set()
            self.released.wait(120)
        return self.app(environ, start_response)

    def hold(self, part: str) -> None:
        """Let writes to paths with this part wait from now on."""
        self.held, self.waiting, self.released = part, threading.Event(), threading.Event()

    def release(self) -> None:
        self.held = ""
        self.released.set()

    def vanish(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@contextmanager
def serve_s3() -> Iterator[Server]:
    """A server with an empty bucket, which the environment of this process names."""
    import fsspec

    with pytest.MonkeyPatch.context() as patch:
        server = Server()
        for name, value in {
            "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with suppress(FileExistsError):  # all servers of this process have the same content
            fsspec.filesystem("s3").mkdir(BUCKET)
        try:
            yield server
        finally:
            server.release()
            server.vanish()
            fsspec.get_filesystem_class("s3").clear_instance_cache()
