"""MLflow: numbers as metrics GROUP/NAME, the config as parameters, texts and pictures as artifacts."""

import os
import re
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunix.base.errors import Ending, UserError
from tunix.base.nested import flat
from tunix.sinks.run_ids import keep_id, read_id
from tunix.sinks.sink import Start

FLUSH_S = 2.0  # numbers of so many seconds are sent in one request: steps may be faster than requests
BATCH = 900  # metrics in a request, and a tenth as many parameters: the server takes at most 1000, and 100
LONGEST = 5000  # characters of a parameter


class Mlflow:
    """A run of MLflow. A resumed run goes on with its id."""

    in_background = True

    @staticmethod
    def check(logging: dict[str, Any]) -> None:
        """Raise `UserError` without the package."""
        if find_spec("mlflow") is None:
            raise UserError("logging.sinks=mlflow needs the package mlflow: pip install 'tunix-trainer[mlflow]'")

    def __init__(self, start: Start):
        # `Background` tries again and says so. MLflow's own tries would take minutes before the first word in the log.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        from mlflow import MlflowClient

        self.start, config = start, start.config
        keys = config["logging"]["mlflow"]
        self.client = MlflowClient(tracking_uri=keys["tracking_uri"])
        self.waiting: dict[tuple[str, int], dict[str, Any]] = {}  # numbers by group and step, to be sent
        self.sent = time.monotonic()  # when the newest numbers were sent
        known = read_id(start.folder, "mlflow")
        if known is not None:
            self.client.update_run(known, status="RUNNING")
            self.run_id = known
            return
        name = keys["experiment"] or config["project_name"]
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        run = self.client.create_run(experiment_id, run_name=config["run_name"] or start.folder.name, tags=keys["tags"])
        self.run_id = run.info.run_id
        self._log_parameters(config)
        keep_id(start.folder, "mlflow", self.run_id)

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
            Metric(f"{group}/{_name(key)}", float(value), now, step)
            for (group, step), record in self.waiting.items()
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float)
        ]
        for first in range(0, len(metrics), BATCH):
            self.client.log_batch(self.run_id, metrics=metrics[first : first + BATCH])
        self.waiting, self.sent = {}, time.monotonic()

    def _log_parameters(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_name(key), str(value)[:LONGEST]) for key, value in flat(config).items()]
        for first in range(0, len(params), BATCH // 10):
            self.client.log_batch(self.run_id, params=params[first : first + BATCH // 10])


def _name(key: str) -> str:
    """Return a key as MLflow takes it: pass@8 becomes pass_at_8."""
    return re.sub(r"[^\w\-. /]", "_", key.replace("@", "_at_"))
