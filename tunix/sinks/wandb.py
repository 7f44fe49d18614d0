"""Weights & Biases: numbers as charts GROUP/NAME, samples as tables, files of the run as an artifact."""

import netrc
import os
import secrets
from importlib.util import find_spec
from io import BytesIO
from typing import Any
from urllib.parse import urlparse

from tunix.base.errors import UserError
from tunix.sinks.run_ids import keep_id, read_id
from tunix.sinks.sink import Start


class Wandb:
    """A run of Weights & Biases. A resumed run goes on with its id."""

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

        self.start, config = start, start.config
        keys, timeout_s = config["logging"]["wandb"], config["logging"]["close_timeout_s"]
        run_id = read_id(start.folder, "wandb") or secrets.token_hex(4)
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
        keep_id(start.folder, "wandb", run_id)
        self.artifacts = keys["artifacts"]

    def write(self, record: dict[str, Any], group: str) -> None:
        numbers = {f"{group}/{k}": v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        self.run.log(numbers, step=record["step"])

    def text(self, name: str, text: str, step: int) -> None:
        import html

        import wandb

        self.run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def image(self, name: str, png: bytes, step: int) -> None:
        import wandb
        from PIL import Image

        self.run.log({name: wandb.Image(Image.open(BytesIO(png)))}, step=step)

    def table(self, name: str, rows: list[dict[str, Any]], text: str, step: int) -> None:
        """Log rows with the same keys as a table; lists in them (log-probabilities) are left out."""
        import wandb

        columns = [key for key, value in rows[0].items() if not isinstance(value, list)]
        table = wandb.Table(columns=[*columns], data=[[row[key] for key in columns] for row in rows])
        self.run.log({name: table}, step=step)

    def close(self, error: BaseException | None) -> None:
        import wandb

        if self.artifacts:
            artifact = wandb.Artifact(f"run-{self.run.id}", type="run")
            for pattern in self.artifacts:
                for path in sorted(self.start.folder.glob(pattern)):
                    if path.is_file():
                        artifact.add_file(str(path), str(path.relative_to(self.start.folder)))
            self.run.log_artifact(artifact)
        # An `Ending` has the exit code of the process; any other exception is a bug, and Python's exit code for it is
        # 1.
        self.run.finish(exit_code=0 if error is None else getattr(error, "code", 1))


def _has_key(host: str) -> bool:
    """Return True where the environment or the file ~/.netrc has a key for the host."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
