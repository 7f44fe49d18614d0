"""Steps a minute where environments wait, with rollouts drawn ahead and without: `python -m benchmarks.staleness`.

Words: `wait_s=1.0` (of each turn), `steps=30`, `processes=64`, `ahead=0,1,3`, and others that training takes. The model
of `+experiment=sft_look_up` learns with `+experiment=grpo_look_up`, 16 answers a step; its environment sleeps before it
answers, as one that asks a server does. The seconds of a step are the mean of those after the first ten.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tunix.rl.tools import LookUp


class SlowLookUp(LookUp):
    """A `LookUp` that waits before it answers."""

    def __init__(self, wait_s: float):
        self.wait_s = wait_s

    def step(self, text: str) -> tuple[str | None, float, bool]:
        time.sleep(self.wait_s)
        return super().step(text)


def main(words: list[str]) -> None:
    import tunix

    given = {"wait_s": "1.0", "steps": "30", "processes": "64", "ahead": "0,1,3"}
    own = [word for word in words if word.split("=")[0] in given]
    given |= dict(word.split("=") for word in own)
    if int(given["steps"]) <= 10:
        sys.exit(f"steps={given['steps']}: the first ten do not count; give more")
    words = [word for word in words if word not in own]
    with tempfile.TemporaryDirectory() as name:
        taught = Path(name) / "taught"
        tunix.train(["+experiment=sft_look_up", f"hydra.run.dir={taught}", *words])
        for staleness in given["ahead"].split(","):
            folder = Path(name) / f"staleness_{staleness}"
            tunix.train([
                "+experiment=grpo_look_up", f"model.init_from={taught}", f"task.staleness={staleness}",
                "task.environment=benchmarks.staleness:SlowLookUp", f"training.max_steps={given['steps']}",
                f"task.environment_options={{wait_s:{given['wait_s']}}}", "training.global_batch_size=16",
                "training.micro_batch_size=16", f"task.environment_processes={given['processes']}",
                "evaluation.every_steps=null", "checkpoint.save_every_steps=1000", f"hydra.run.dir={folder}", *words,
            ])  # fmt: skip
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            lines = [line for line in lines if line.get("split", "train") == "train"][10:]
            seconds = statistics.mean(line["step_time_s"] for line in lines)
            reward = statistics.mean(line["reward"] for line in lines[-10:])
            print(
                f"staleness {staleness}: {60 / seconds:.1f} steps a minute, {seconds:.2f} s a step; mean reward of the "
                f"last 10 steps {reward:.3f}, tools {statistics.mean(line['tool_s'] for line in lines):.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
