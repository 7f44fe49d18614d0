"""Sinks for other programs: Weights & Biases, MLflow, a webhook for messages, and numbers that Prometheus fetches."""

import html
import json
import logging
import netrc
import os
import re
import secrets
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tunix.base.errors import Ending, UserError, name_error
from tunix.base.files import read_json, write_whole
from tunix.base.text import flat
from tunix.base.web import NoRedirects, build_opener
from tunix.run.sinks import Sink, Start

log = logging.getLogger(__name__)

# Ids under which other programs know a run are in run_ids.json of its folder, and a resumed run keeps them:
# {"wandb": "9c1f2ab0", "mlflow": "5d0e..."}
_changing = threading.Lock()  # each sink has a thread of its own, and each adds its id to the same file


def read_id(folder: Path, sink: str) -> str | None:
    """Return the id that a sink has given to the run; None if it has none yet."""
    path = folder / "run_ids.json"
    return read_json(path).get(sink) if path.is_file() else None


def keep_id(folder: Path, sink: str, value: str) -> None:
    """Write the id that a sink has given to the run."""
    path = folder / "run_ids.json"
    with _changing:
        ids = read_json(path) if path.is_file() else {}
        write_whole(path, json.dumps(ids | {sink: value}, indent=1) + "\n")


class Wandb(Sink):
    """A run of Weights & Biases: charts GROUP/NAME, samples as tables, files of the run as an artifact. A resumed run
    goes on with its id."""

    in_background = True

    @staticmethod
    def check(logging: dict[str, Any]) -> None:
        """Raise `UserError` without the package, or without a key where the run is to be sent."""
        if find_spec("wandb") is None:
            raise UserError("logging.sinks=wandb needs the package wandb: pip install 'tunix-trainer[wandb]'")
        mode = os.environ.get("WANDB_MODE", logging["wandb"]["mode"])
        host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        if mode == "online" and not _has_key(host):
            raise UserError(
                f"logging.sinks=wandb: there is no key for {host}: run `wandb login` once, or set WANDB_API_KEY, or "
                "logging.wandb.mode=offline (`wandb sync RUN_DIR/wandb/offline-run-*` sends it later)"
            )

    def __init__(self, start: Start):
        import wandb

        self.start, self.wandb, config = start, wandb, start.config
        keys, timeout_s = config["logging"]["wandb"], config["logging"]["close_timeout_s"]
        run_id = read_id(start.folder, "wandb") or secrets.token_hex(4)
        keep_id(start.folder, "wandb", run_id)  # before W&B answers: a next try goes on with this run
        self.run = wandb.init(
            project=keys["project"] or config["project_name"],
            entity=keys["entity"],
            group=keys["group"],
            tags=keys["tags"],
            name=config["run_name"] or start.folder.name,
            id=run_id,
            resume="allow",  # go on with the run of this id if there is one, else begin it
            mode=os.environ.get("WANDB_MODE", keys["mode"]),
            dir=start.folder,
            config=config,
            settings=wandb.Settings(console="off", silent=True, finish_timeout=timeout_s, init_timeout=timeout_s),
        )
        self.artifacts = keys["artifacts"]
        # W&B drops what comes for a step of its own count that is past: steps that a resumed run trains again, and the
        # line of a step behind answers that are drawn ahead. So its count goes on, and charts are over `step`.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        self.newest, self.ahead = self.run.starting_step, 0  # of W&B's count: the newest step, and by how much it leads

    def _log(self, values: dict[str, Any], step: int) -> None:
        if step + self.ahead < self.newest:
            self.ahead = self.newest + 1 - step
        self.newest = step + self.ahead
        self.run.log(values | {"step": step}, step=self.newest)

    def write(self, record: dict[str, Any], group: str) -> None:
        numbers = {f"{group}/{k}": v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        self._log(numbers, record["step"])

    def text(self, name: str, text: str, step: int) -> None:
        self._log({name: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def image(self, name: str, png: bytes, step: int) -> None:
        from PIL import Image

        self._log({name: self.wandb.Image(Image.open(BytesIO(png)))}, step)

    def table(self, name: str, rows: list[dict[str, Any]], text: str, step: int) -> None:
        """Log rows as a table; lists in them (log-probabilities) are left out."""
        columns: dict[Any, None] = {}
        for row in rows:  # an episode that failed has a key more than the others
            columns |= {key: None for key, value in row.items() if not isinstance(value, list)}
        table = self.wandb.Table(columns=[*columns], data=[[row.get(key) for key in columns] for row in rows])
        self._log({name: table}, step)

    def close(self, error: BaseException | None) -> None:
        if self.artifacts:
            artifact = self.wandb.Artifact(f"run-{self.run.id}", type="run")
            for path in [path for pattern in self.artifacts for path in sorted(self.start.folder.glob(pattern))]:
                if path.is_file():
                    artifact.add_file(str(path), str(path.relative_to(self.start.folder)))
            self.run.log_artifact(artifact)
        # An `Ending` has the exit code of the process; Python's exit code for any other exception, a bug, is 1.
        self.run.finish(exit_code=0 if error is None else getattr(error, "code", 1))


def _has_key(host: str) -> bool:
    """Return True where the environment or the file ~/.netrc has a key for the host."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


FLUSH_S = 2.0  # numbers of so many seconds are sent in one request: steps may be faster than requests
BATCH = 900  # metrics in a request, and a tenth as many parameters: the server takes at most 1000, and 100
MAX_LENGTH = 5000  # characters of a parameter


class Mlflow(Sink):
    """A run of MLflow: metrics GROUP/NAME, the config as parameters, texts and images as artifacts. A resumed run
    goes on with its id."""

    in_background = True

    @staticmethod
    def check(logging: dict[str, Any]) -> None:
        """Raise `UserError` without the package, or without an address: MLflow would write into the current folder."""
        if find_spec("mlflow") is None:
            raise UserError("logging.sinks=mlflow needs the package mlflow: pip install 'tunix-trainer[mlflow]'")
        address = logging["mlflow"]["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            raise UserError(
                "logging.sinks=mlflow needs an address: set logging.mlflow.tracking_uri=http://HOST:5000, or the "
                "environment variable MLFLOW_TRACKING_URI"
            )
        if re.fullmatch(r"[\w.-]+:\d+/?", address):
            raise UserError(
                f"logging.mlflow.tracking_uri (or MLFLOW_TRACKING_URI) is {address}; a server is http://{address}"
            )
        if address.startswith("file:") or (":" not in address and not address.startswith(("databricks", "uc"))):
            from mlflow import MlflowClient

            with tempfile.TemporaryDirectory() as folder:
                try:
                    MlflowClient(tracking_uri=folder).search_experiments(max_results=1)
                except Exception:
                    raise UserError(
                        f"logging.mlflow.tracking_uri (or MLFLOW_TRACKING_URI) is {address}, and this MLflow writes "
                        "into no folders; a file is sqlite:///mlflow.db, or set MLFLOW_ALLOW_FILE_STORE=true"
                    ) from None

    def __init__(self, start: Start):
        # `Background` tries again and says so. MLflow's own tries would take minutes before the first word in the log.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        config, keys = start.config, start.config["logging"]["mlflow"]
        try:
            self.client = MlflowClient(tracking_uri=keys["tracking_uri"])
        except Exception as error:
            if not re.search("duplicate column|already exists", str(error)):
                raise
            address = keys["tracking_uri"] or os.environ["MLFLOW_TRACKING_URI"]
            raise RuntimeError(f"{address} was left half made, by a kill while MLflow made it; remove it") from error
        self.waiting: dict[tuple[str, int], dict[str, Any]] = {}  # numbers by group and step, to be sent
        self.refused: set[str] = set()  # names of numbers
        self.sent = time.monotonic()  # when the newest numbers were sent
        run_id = read_id(start.folder, "mlflow")
        if run_id is not None:
            self.client.update_run(run_id, status="RUNNING")
            self.run_id = run_id
            return
        name = keys["experiment"] or config["project_name"]
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        run = self.client.create_run(experiment_id, run_name=config["run_name"] or start.folder.name, tags=keys["tags"])
        self.run_id = run.info.run_id
        # At once: a next try goes on with this run, also without parameters.
        keep_id(start.folder, "mlflow", self.run_id)
        params = [Param(_name(key), str(value)[:MAX_LENGTH]) for key, value in flat(config).items()]
        for first in range(0, len(params), BATCH // 10):
            self.client.log_batch(self.run_id, params=params[first : first + BATCH // 10])

    def write(self, record: dict[str, Any], group: str) -> None:
        self.waiting[group, record["step"]] = record
        if time.monotonic() - self.sent > FLUSH_S:
            self._send()

    def text(self, name: str, text: str, step: int) -> None:
        self.client.log_text(self.run_id, text, f"{name}/{step}.txt")

    def image(self, name: str, png: bytes, step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{step}.png"
            path.write_bytes(png)
            self.client.log_artifact(self.run_id, str(path), name)

    def close(self, error: BaseException | None) -> None:
        self._send()
        status = "FINISHED" if error is None else "FAILED"
        if isinstance(error, Ending) and not error.is_failure:
            status = "KILLED"  # MLflow's word for a run that was stopped; `resume` goes on with it
        self.client.set_terminated(self.run_id, status)

    def _send(self) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [
            Metric(_name(f"{group}/{key}"), float(value), now, step)
            for (group, step), record in self.waiting.items()
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float)
        ]
        for first in range(0, len(metrics), BATCH):
            self._log(metrics[first : first + BATCH])
        self.waiting, self.sent = {}, time.monotonic()

    def _log(self, metrics: list[Any]) -> None:
        """Send numbers. Those of a name that the server refuses, like reward_a//b, are left out from then on: tried
        again with all that follow, they would hold those back for good."""
        from mlflow import MlflowException

        metrics = [metric for metric in metrics if metric.key not in self.refused]
        try:
            self.client.log_batch(self.run_id, metrics=metrics)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(metrics) > 1:
                half = len(metrics) // 2
                self._log(metrics[:half])
                self._log(metrics[half:])
                return
            self.refused.add(metrics[0].key)
            log.warning("logging.sinks=mlflow: %s is left out: %s", metrics[0].key, name_error(error)[:300])


def _name(key: str) -> str:
    """Return a key as MLflow takes it: pass@8 becomes pass_at_8."""
    return re.sub(r"[^\w\-. /]", "_", key.replace("@", "_at_"))


VARIABLE = "TUNIX_WEBHOOK_URL"
TIMEOUT_S = 10.0


class Webhook(Sink):
    """Messages of a run when it starts, ends, fails or hangs, in Slack's format: {"text": "..."} sent by POST. A run
    that is killed (SIGKILL) sends none at its end."""

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
        self.url, self.start_time, self.last = _url(config["logging"]), time.monotonic(), dict[str, dict[str, Any]]()
        self.run = f"{config['project_name']} / {config['run_name'] or start.folder.name}"
        description = f"steps {start.step} to {start.last_step}, {start.folder} on {socket.gethostname()}"
        self._send(f"{self.run} {'goes on' if start.step else 'starts'}: {description}")

    def write(self, record: dict[str, Any], group: str) -> None:
        self.last[group] = record

    def close(self, error: BaseException | None) -> None:
        """Send how the run ends, the newest numbers of training and of each evaluation, and the time that passed."""
        end = "is done" if error is None else f"FAILED ({type(error).__name__}: {error})"
        if isinstance(error, Ending) and not error.is_failure:
            end = f"was stopped ({error})"
        elapsed = timedelta(seconds=round(time.monotonic() - self.start_time))
        numbers = [f"step {self.last['train']['step']}"] if "train" in self.last else ["no step"]
        for group, record in self.last.items():
            name = next((name for name in ("reward", "loss") if isinstance(record.get(name), float)), None)
            if name:
                numbers.append(f"{group} {name} {record[name]:.4f}")
        self._send(f"{self.run} {end}, {', '.join(numbers)}, after {elapsed}")

    def _send(self, text: str) -> None:
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        build_opener(TIMEOUT_S, NoRedirects).open(request, timeout=TIMEOUT_S).close()


def _url(logging: dict[str, Any]) -> str:
    return logging["webhook"]["url"] or os.environ.get(VARIABLE, "")


@contextmanager
def _listening(keys: dict[str, Any]) -> Iterator[None]:
    """Raise `UserError` where the block cannot listen on the port of these keys."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"logging.prometheus.port={keys['port']} of host {keys['host']} cannot be listened on: "
            f"{error.strerror or error}; take another"
        ) from None


class Prometheus(Sink):
    """The newest numbers as gauges, `tunix_train_loss`, that Prometheus fetches from http://HOST:PORT/metrics."""

    @staticmethod
    def check(logging: dict[str, Any]) -> None:
        """Raise `UserError` without the package or a port, or where the port is taken."""
        keys = logging["prometheus"]
        if find_spec("prometheus_client") is None:
            raise UserError("logging.sinks=prometheus needs a package: pip install 'tunix-trainer[serve]'")
        if keys["port"] is None:
            raise UserError("logging.sinks=prometheus needs a port: set logging.prometheus.port=9400")
        with _listening(keys), socket.create_server((keys["host"], keys["port"])):
            pass

    def __init__(self, start: Start):
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        config = start.config
        self.gauge, self.registry, self.gauges = Gauge, CollectorRegistry(), dict[str, Any]()
        self.labels = {"run": str(config["run_name"] or start.folder.name), "project": str(config["project_name"])}
        keys = config["logging"]["prometheus"]
        with _listening(keys):  # another run may have taken the port since `check`
            self.server, _ = start_http_server(keys["port"], keys["host"], self.registry)
        self._set("last_step", start.last_step)

    def _set(self, name: str, value: float) -> None:
        """Set the gauge of a name, which is made when it comes first."""
        name = "tunix_" + re.sub(r"\W+", "_", name)
        if name not in self.gauges:
            self.gauges[name] = self.gauge(name, "see docs/metrics.md", list(self.labels), registry=self.registry)
        self.gauges[name].labels(**self.labels).set(value)

    def write(self, record: dict[str, Any], group: str) -> None:
        for name, value in record.items():
            if isinstance(value, int | float):
                self._set(f"{group}_{name}", value)

    def close(self, error: BaseException | None) -> None:
        self.server.shutdown()
        self.server.server_close()
