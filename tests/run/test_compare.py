"""Runs side by side, from made-up folders: the numbers are those counted by hand."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from PIL import Image
from rich.table import Table
from support.harness import ROOT

from tunix import compare
from tunix.base.errors import UserError
from tunix.base.text import as_text
from tunix.compare import as_json, list_differences, list_results, read_histories
from tunix.config.compose import compose
from tunix.export import _write_card
from tunix.run.model_card import COLORS, read_license, write_card


def write_run(folder: Path, losses: list[float], *words: str, again: int = 0, mfu: float | None = None) -> Path:
    """Write the folder of a run on 2 devices, whose steps take half a second; the last `again` steps ran twice."""
    folder.mkdir()
    config = compose(["training.max_steps=5", *words]).config.model_dump(mode="json", by_alias=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [  # the first step waits for the compiler, the third ran on a device of an unknown kind
        {"step": n, "loss": loss, "tokens": 100 * n, "tokens_per_s": 200.0 * n, "tokens_per_s_per_device": 100.0 * n,
         "step_time_s": 0.5, "data_wait_s": 0.05, "peak_memory_gib": 1.5 + n * (4 - n),
         "mfu": None if n == 3 or mfu is None else mfu * n}
        for n, loss in enumerate(losses, 1)
    ]  # fmt: skip
    held_out = [{"step": n, "split": "held_out", "loss": losses[n - 1] + 1, "bits_per_byte": n / 4} for n in (2, 4)]
    lines = sorted(lines + held_out, key=lambda line: line["step"])
    lines += [line for line in lines if line["step"] > len(losses) - again]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    first = write_run(tmp_path / "first", [5.0, 3.0, 4.0, 2.0], "optimizer.learning_rate=0.1", again=2)
    more = "run_name=better", "logging.sinks=[jsonl]"
    return [first, write_run(tmp_path / "second", [5.0, 2.0, 1.0, 2.5], *more, mfu=0.1)]


def test_numbers_and_differences(runs):
    histories = read_histories(runs)
    numbers = dict(list_results(histories))
    assert [each.name for each in histories] == ["first", "better"]
    assert numbers["steps"] == ["4 of 5", "4 of 5"]
    assert numbers["final loss"] == ["2.0000", "2.5000"]
    assert numbers["best held out"] == ["3.0000 (step 4)", "3.0000 (step 2)"]
    assert numbers["devices"] == ["2", "2"]
    assert numbers["device hours"] == [f"{6 * 0.5 * 2 / 3600:.3g}", f"{4 * 0.5 * 2 / 3600:.3g}"]  # two steps ran again
    assert numbers["final bits per byte"] == ["1.0000", "1.0000"]
    assert numbers["tokens/s (median)"] == ["600", "600"]  # of the steps behind the first
    assert numbers["MFU (median)"] == ["", "30.0%"]
    assert numbers["waiting for data"] == ["10.0%", "10.0%"]
    assert numbers["peak memory of a device"] == ["5.50 GiB", "5.50 GiB"]
    assert list_differences(histories) == [
        ("logging.sinks", ['["jsonl", "tensorboard"]', '["jsonl"]']),
        ("optimizer.learning_rate", ["0.1", str(histories[1].keys["optimizer.learning_rate"])]),
    ]
    assert "MFU (median)" not in dict(list_results(histories[:1]))  # no run has it
    histories[0].steps[0]["tokens_per_s_per_device"] = 50.0  # the run went on with fewer devices
    assert dict(list_results(histories))["devices"] == ["2", "2"]
    assert [each.name for each in read_histories([runs[0], runs[0]])] == [str(runs[0])] * 2


def test_steps_that_a_run_went_back_behind_do_not_count(runs):
    """It went on from the checkpoint of step 1, and has come to step 2."""
    file = runs[0] / "metrics.jsonl"
    lines = file.read_text().splitlines()[:-1]
    again = json.loads(lines[1]) | {"loss": 1.5}
    file.write_text("".join(line + "\n" for line in [*lines, json.dumps(again)]))
    numbers = dict(list_results(read_histories(runs)))
    assert (numbers["steps"][0], numbers["final loss"][0]) == ("2 of 5", "1.5000")
    assert numbers["best held out"][0] == "4.0000 (step 2)"


def test_an_evaluation_without_any_score_is_not_the_best(runs):
    """Where rewards are below 0, the 0 that stands for a missing score would be. Each prompt has two answers."""
    config = yaml.safe_load((runs[0] / "config.yaml").read_text())
    config["evaluation"]["num_samples"] = 2
    (runs[0] / "config.yaml").write_text(yaml.safe_dump(config))
    with (runs[0] / "metrics.jsonl").open("w") as file:
        for step, (reward, errors) in enumerate([(-2.0, 1), (0.0, 8), (-3.0, 0), (-1.0, 7)], 1):
            line = {
                "step": step,
                "tokens": 100,
                "tokens_per_s": 2.0,
                "tokens_per_s_per_device": 1.0,
                "step_time_s": 0.5,
            }
            held_out = {"step": step, "split": "held_out", "reward": reward, "reward_errors": errors, "prompts": 4}
            file.writelines(json.dumps(each) + "\n" for each in (line | {"reward": -1.0}, held_out))
    assert dict(list_results(read_histories(runs[:1])))["best held out"] == ["-1.0000 (step 4)"]


def test_the_command(runs):
    """Tables with the same names and numbers as the JSON."""
    command = [sys.executable, "-m", "tunix.compare", *map(str, runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in ("numbers", "best held out", "optimizer.learning_rate", "better"):
        assert text in done.stdout
    values = as_json(read_histories(runs))
    assert [run["name"] for run in values["runs"]] == ["first", "better"]
    assert values["numbers"]["final loss"] == ["2.0000", "2.5000"]
    assert list(values["differences"]) == ["logging.sinks", "optimizer.learning_rate"]


def test_a_folder_that_is_no_run_is_named(tmp_path, runs, monkeypatch, capsys):
    with pytest.raises(UserError, match="is no folder of a run: it has no config.yaml"):
        read_histories([tmp_path])
    for name, said in (("~nobody-here", "is no folder of a run"), ("x" * 300, f"{'x' * 200}...: File name too long")):
        monkeypatch.setattr("sys.argv", ["tunix.compare", name])
        assert compare.main() == 2
        assert said in capsys.readouterr().err
    (runs[0] / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="has no line of training in metrics.jsonl"):
        read_histories(runs)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.yaml", "]x: [", "config.yaml is damaged (it is not YAML)"),
        ("config.yaml", "text", "config.yaml is damaged (it has no section model)"),
        (
            "metrics.jsonl",
            '{"step": 1, "tokens": 8}\n',
            "metrics.jsonl: a line of training has no step_time_s, so the run",
        ),
        ("metrics.jsonl", '{"step": "1"}\n', "metrics.jsonl: a line of training has no step, so the run"),
    ],
)
def test_a_damaged_file_is_named(runs, file, text, message):
    (runs[0] / file).write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_histories(runs)


@pytest.mark.parametrize("torn", [b'{"step": 1, "los{"step": 2}\n', b"\xff\xfe}\n", b"[1]}\n", b"[" * 50_000 + b"}\n"])
def test_a_torn_line_is_left_out(runs, torn, capsys):
    whole = (runs[0] / "metrics.jsonl").read_bytes()
    (runs[0] / "metrics.jsonl").write_bytes(torn + whole)
    assert read_histories(runs)[0].steps
    (line,) = capsys.readouterr().err.splitlines()  # none of the last line, which may be being written
    assert "metrics.jsonl, line 1, is no JSON object: it is left out" in line


@pytest.mark.parametrize("damage", ["0", "1" + "0" * 400, "NaN", '"x"', "[]"])
def test_numbers_that_are_none_are_left_out(damage, runs, tmp_path):
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines()
    for key in ("loss", "peak_memory_gib", "data_wait_s", "bits_per_byte"):
        lines = [re.sub(rf'"{key}": [^,}}]*', f'"{key}": {damage}', line) for line in lines]
    (runs[0] / "metrics.jsonl").write_text("\n".join(lines))
    (history,) = found = read_histories(runs[:1])
    assert dict(list_results(found))["tokens"] == ["400"]
    write_card(tmp_path, "x", "text-generation", None, history.keys, history.steps, history.evaluations, None)


def test_text_with_brackets_stays_as_it_is():
    table = Table("run", title="exp[v2]")
    table.add_row("[/INST] attention.[qv] :smile:")
    assert as_text(table).split("\n")[0].strip() == "exp[v2]"
    assert "[/INST] attention.[qv] :smile:" in as_text(table)


def test_a_card_of_an_export_counts_what_its_checkpoint_has_learnt(runs, tmp_path):
    """Not the steps behind it; the last of them has learnt nothing, and has no loss."""
    for step in (1, 4):
        (runs[1] / "checkpoints" / str(step)).mkdir(parents=True)
    file = runs[1] / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 2.5', '"loss": null'))
    for checkpoint, expected, other in (
        (
            runs[1] / "checkpoints/1",
            "| steps | 1 |\n| tokens | 100 |\n| training loss of the last step | 5.0000 |",
            "held",
        ),
        (runs[1], "| steps | 4 |\n| tokens | 400 |\n| held-out loss at step 4 | 3.5000 |", "training loss"),
    ):
        command = SimpleNamespace(checkpoint=str(checkpoint), push="someone/tuned")
        cfg = SimpleNamespace(init_from=None, labels=("good", "bad"), vision=None)
        _write_card(command, tmp_path, SimpleNamespace(cfg=cfg))
        card = (tmp_path / "README.md").read_text()
        assert 'pipeline_tag: "text-classification"' in card
        assert expected in card
        assert other not in card.partition("![")[0]


def test_a_card_of_step_0_needs_no_line_of_training(runs, tmp_path):
    (runs[0] / "metrics.jsonl").write_text('{"step": 0, "split": "goodput"}\n')
    (runs[0] / "checkpoints" / "0").mkdir(parents=True)
    command = SimpleNamespace(checkpoint=str(runs[0]), push="someone/new")
    _write_card(command, tmp_path, SimpleNamespace(cfg=SimpleNamespace(init_from=None, labels=None, vision=None)))
    assert "## Training" not in (tmp_path / "README.md").read_text()


def test_the_page_of_a_base_that_has_no_end_is_not_read_whole(tmp_path):
    with (tmp_path / "README.md").open("w") as file:
        file.write("---\nlicense: mit\n---\n")
        file.truncate(1 << 40)
    assert read_license(str(tmp_path)) == {"license": "mit"}


def test_a_card_shows_the_whole_of_a_value_with_bars(tmp_path):
    keys = {"model.lora.rank": 8, "model.lora.targets": "attention|mlp"}
    write_card(tmp_path, "a", "text-generation", None, keys, [{"step": 1, "tokens": 8}], [], {"task": "a|b"})
    card = (tmp_path / "README.md").read_text()
    assert r"| `model.lora.targets` | attention\|mlp |" in card
    assert r"| task | a\|b |" in card


def test_a_card_says_what_is_known_and_no_more(tmp_path, monkeypatch):
    """The licence of a base, no data of the hub where a folder has their name, no updates, no loss that is null."""
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("base/README.md").write_text("---\nlicense: 'apache-2.0'\n---\n")
    Path("someone/data").mkdir(parents=True)
    keys = {"data.path": "someone/data", "model.lora.rank": 0, "model.lora.targets": "attention", "seed": 3}
    steps = [{"step": 1, "tokens": 8, "loss": 5.0}, {"step": 2, "tokens": 16, "loss": 1.0}]
    write_card(tmp_path, "a", "text-generation", "base", keys, steps, [{"step": 2, "loss": None}], None)
    card = Path("README.md").read_text()
    assert 'license: "apache-2.0"' in card
    assert "| `seed` | 3 |" in card
    for word in ("datasets", "base_model", "lora", "held-out", "Evaluation"):
        assert word not in card
    with Image.open("loss.png") as image:  # the loss falls
        assert (image.getpixel((225, 125)), image.getpixel((225, 275))) == (COLORS["training"], (255, 255, 255))
