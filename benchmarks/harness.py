"""The harness's numbers of one tiny model: by our adapter, and by the harness's own backend for transformers.

    PYTHONPATH=tests python -m benchmarks.harness          with a Python that has tunix, lm_eval, torch and transformers

Prints both numbers of each task, and ends with 1 where they differ by more than 1e-5.
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
import lm_eval.models.huggingface
import lm_eval.tasks
from support.harness_tasks import TASKS, write_tasks
from support.hf_files import write_hf_dir

import tunix
from tunix.inference.lm_eval import make_adapter


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = write_hf_dir(Path(name))
        info = json.loads((folder / "tokenizer_config.json").read_text())
        info["eos_token"] = "<eos>"  # transformers 5 refuses the older form
        (folder / "tokenizer_config.json").write_text(json.dumps(info))
        write_tasks(folder)
        manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
        ours = make_adapter(tunix.load_pretrained(folder), batch_size=3)
        theirs = lm_eval.models.huggingface.HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
        numbers = [
            lm_eval.simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True)
            for model in (ours, theirs)
        ]
    worst = 0.0
    for task in TASKS:
        for metric, value in numbers[0]["results"][task].items():
            other = numbers[1]["results"][task][metric]
            if isinstance(value, float) and "stderr" not in metric:
                difference = abs(value - other) / max(abs(other), 1e-9)
                worst = max(worst, difference)
                print(f"{task:10} {metric:24} {value:14.8f} {other:14.8f}  differ by {difference:.1e}")
        answers = [[sample["resps"] for sample in each["samples"][task]] for each in numbers]
        print(json.dumps(answers[0][:1]), json.dumps(answers[1][:1]))
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
