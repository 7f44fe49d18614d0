"""Tokens learnt in a second where answers share rows, and where each has one: `python -m benchmarks.answer_rows`.

Words: `steps=8`, `rounds=2`, `packed=8` (`task.answers_per_row`), and others that training takes. A random model draws
64 answers a step of lengths that differ, with rows of 128 tokens. Both ways take turns, so that other work on the
machine meets both. Learning is a step without drawing and scoring; the first two steps of a run are left out.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

SHARED = (
    "task=grpo", "model=adder", "data=arithmetic", "tokenizer=bytes", "scheduler=constant",
    "task.chat_template='{% for message in messages %}{{ message.content }}{% endfor %}'", "task.rewards=[length]",
    "task.reward_processes=1", "task.samples_every_steps=null", "sampling.max_new_tokens=118", "training.seq_len=128",
    "sampling.stop=[a,e,i]", "training.global_batch_size=64", "training.micro_batch_size=8",
    "training.mixed_precision=fp32", "evaluation.every_steps=null", "evaluation.sample_tokens=0",
    "data.held_out_fraction=0", "checkpoint.save_every_steps=1000",
)  # fmt: skip


def measure(folder: Path, answers_per_row: int, words: list[str]) -> list[tuple[float, float]]:
    """Return for each step but the first two the tokens that were learnt in a second, and the rows of the step."""
    import tunix

    tunix.train([*SHARED, f"task.answers_per_row={answers_per_row}", f"hydra.run.dir={folder}", *words])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rollout_s" in line and line.get("split", "train") == "train"][2:]
    return [
        (
            64 * line["answer_tokens"] / (line["step_time_s"] - line["rollout_s"] - line["reward_s"]),
            line.get("rows_used", 64),
        )
        for line in steps
    ]


def main(words: list[str]) -> None:
    given = {"steps": "8", "rounds": "2", "packed": "8"}
    own = [word for word in words if word.split("=")[0] in given]
    given |= dict(word.split("=") for word in own)
    if int(given["steps"]) <= 2:
        sys.exit(f"steps={given['steps']}: the first two do not count; give more")
    words = [f"training.max_steps={given['steps']}", *(word for word in words if word not in own)]
    found: dict[int, list[tuple[float, float]]] = {1: [], int(given["packed"]): []}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(int(given["rounds"])):
            for answers_per_row, steps in found.items():
                steps += measure(Path(name) / f"{turn}_{answers_per_row}", answers_per_row, words)
    speeds = {number: statistics.median(speed for speed, _ in steps) for number, steps in found.items()}
    for number, steps in found.items():
        found_speeds, rows = zip(*steps, strict=True)
        print(
            f"answers_per_row {number}: {min(rows)} to {max(rows)} rows, {speeds[number]:,.0f} tokens learnt a second "
            f"({min(found_speeds):,.0f} to {max(found_speeds):,.0f}), {speeds[number] / speeds[1]:.2f} times"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
