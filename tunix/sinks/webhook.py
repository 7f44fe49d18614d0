"""A message when a run starts, ends or fails, in Slack's format: {"text": "..."} sent by POST."""

import json
import os
import socket
import time
import urllib.request
from datetime import timedelta
from typing import Any

from tunix.base.errors import Ending, UserError
from tunix.sinks.sink import Start

VARIABLE = "TUNIX_WEBHOOK_URL"
TIMEOUT_S = 10.0


class Webhook:
    """Messages of a run, sent when it starts and when it ends. A run that is killed (SIGKILL) sends none at its end."""

    in_background = True

    @staticmethod
    def check(logging: dict[str, Any]) -> None:
        """Raise `UserError` without an address to send to."""
        url = _url(logging)
        if not url:
            raise UserError(
                f"logging.sinks=webhook needs an address: set the environment variable {VARIABLE}, which keeps it out "
                "of the saved config, or logging.webhook.url"
            )
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"logging.webhook.url (or {VARIABLE}) begins with {url[:8]}; it must be an http(s):// address"
            )

    def __init__(self, start: Start):
        config = start.config
        self.url, self.begun, self.last = _url(config["logging"]), time.monotonic(), dict[str, dict[str, Any]]()
        self.run = f"{config['project_name']} / {config['run_name'] or start.folder.name}"
        where = f"steps {start.step} to {start.last_step}, {start.folder} on {socket.gethostname()}"
        self._send(f"{self.run} {'goes on' if start.step else 'starts'}: {where}")

    def write(self, record: dict[str, Any], group: str) -> None:
        self.last[group] = record

    def text(self, name: str, text: str, step: int) -> None:
        """Texts are not sent."""

    def image(self, name: str, png: bytes, step: int) -> None:
        """Pictures are not sent."""

    def close(self, error: BaseException | None) -> None:
        self._send(f"{self.run} {_describe_end(error)}, {self._describe_numbers()}")

    def _describe_numbers(self) -> str:
        """Return the newest numbers of training and of each evaluation, and the time that passed."""
        elapsed = timedelta(seconds=round(time.monotonic() - self.begun))
        numbers = [f"step {self.last['train']['step']}"] if "train" in self.last else ["no step"]
        for group, record in self.last.items():
            name = next((name for name in ("reward", "loss") if isinstance(record.get(name), float)), None)
            if name:
                numbers.append(f"{group} {name} {record[name]:.4f}")
        return f"{', '.join(numbers)}, after {elapsed}"

    def _send(self, text: str) -> None:
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            pass


def _url(logging: dict[str, Any]) -> str:
    return logging["webhook"]["url"] or os.environ.get(VARIABLE, "")


def _describe_end(error: BaseException | None) -> str:
    if error is None:
        return "is done"
    if isinstance(error, Ending) and not error.is_failure:
        return f"was stopped ({error})"
    return f"FAILED ({type(error).__name__}: {error})"
