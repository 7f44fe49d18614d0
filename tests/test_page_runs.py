"""The commands of each page run one after the other, in the order of the page, as a reader types them: nightly.

A run is cut to two steps, and a model that is larger than this machine gets a dry run or a derived plan. CANNOT names
what cannot run here, and why; other tests talk to those programs, or to servers of their kind.
"""

import json
import math
import re
import shutil
from pathlib import Path
from subprocess import TimeoutExpired

import numpy as np
import pytest
from conftest import write_corpus
from PIL import Image
from safetensors.numpy import save_file
from support.devices import QUICK, xla_flags
from support.harness import ROOT, run_python
from test_data_page import write_files
from test_page_commands import list_commands

LARGE = r"model=(gemma|llama|qwen)|grpo_gsm8k|google/gemma-3-1b"  # a model of so many bytes is not made here
CANNOT = {
    r"^(?!python)|HF_TOKEN|webhook|wandb|HOST|API_KEY": "a program or an account of others",
    r"launcher=(slurm|ray|kubernetes)(?!.*dry_run)": "a cluster: tests/launch has one of each kind",
    r"tunix\.(serve|play)|tunix.generate.*chat=true$": "a server, or somebody at the terminal",
    r"tunix.launch (?!--nprocs \d)": "more machines than one, or as many processes as there are GPUs",
    r"s3://|google/gemma-3-270m|openwebtext|gsm8k|lm_eval": "a download",
    r"python_tool|prepare model=gemma3_4b_vision": "the tokenizer of Qwen 3, of Gemma 3",
    r"benchmarks\.": "a measurement: it takes minutes",
    r"tunix\.doctor": "what it finds is of this machine",
    r"--config-path|train_script=": "a file of the reader's",
}
CHANGED = {"training.max_steps": "2", "evaluation.every_steps": "null", "evaluation.sample_tokens": "0"}
TEXT = "a few words to be merged " * 40
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": TEXT}]
ROWS = {
    "mine": {"messages": TURNS, "question": "hi", "answer": TEXT},
    "conversations": {"messages": TURNS}, "chat": {"text": TEXT},
    "pairs": {"prompt": "hi", "chosen": TEXT, "rejected": "merged"},
    "questions": {"prompt": "hi", "chosen": TEXT, "rejected": "merged"},
    "answers": {"prompt": "hi", "completion": TEXT, "label": [True, False]},
    "problems": {"problem": "what is 2 + 3?", "solution": "5"}, "web": {"text": TEXT},
    "reviews": {"text": TEXT, "sentiment": ["negative", "positive"]},
}  # fmt: skip
EXAMPLES = {  # what stands for the reader's own
    r"^(against=)?RUN_DIR$": r"\1RUN",
    r"RUN_DIR,HF_DIR": "RUN_DIR,RUN",
    r"checkpoints/\d+": "checkpoints/2", r"steps=\[300,400,500\]": "steps=[1,2]", "DIR_OR_RUN": "RUN_DIR",
    "EXPORT_OR_CORPUS": "EXPORT", r"skip_steps=\[1200:1250\]": "skip_steps=[3:3]", "~/": "", r"NAME=": "first=",
    "global_batch_size=256": "global_batch_size=8", r"^8$": "2",  # processes
    r"^output=DIR$": "output=NEW",
}  # fmt: skip
COMMANDS = [  # pages and words
    (case.id.partition(":")[0], case.values[0])
    for case in list_commands()
    if not any(re.search(pattern, " ".join(case.values[0])) for pattern in CANNOT)
]
PAGES = sorted({page for page, _ in COMMANDS})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with runs of two steps on sums, with both checkpoints: RUN_DIR by task=sft, RUN by task=grpo."""
    folder = tmp_path_factory.mktemp("finished")
    saved = "checkpoint.save_every_steps=1"
    grpo = ["+experiment=grpo_addition", "model.init_from=RUN_DIR", "task.samples_every_steps=1", saved]
    for words in (
        ["run_training.py", "+experiment=sft_addition", saved, "hydra.run.dir=RUN_DIR"],
        ["run_training.py", *grpo, "hydra.run.dir=RUN"],
        ["-m", "tunix.export", "checkpoint=RUN_DIR", "output=EXPORT"],
    ):
        done = run_python(*prepare(["python", *words])[0], cwd=folder, XLA_FLAGS=xla_flags(1))
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def reader(tmp_path, hf_dir, finished) -> Path:
    """A folder with what the pages name."""
    write_files(tmp_path)
    write_corpus(tmp_path / "notes")
    for name, row in ROWS.items():
        labels = [{key: value[n] for key, value in row.items() if key in ("label", "sentiment")} for n in (0, 1)]
        pairs = (
            1500 if "messages" in row else 200
        )  # task=sft holds one of 200 rows out, and a sequence has 2,048 tokens
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row | each)}\n" for each in labels) * pairs)
    (tmp_path / "mine.csv").write_text("system_prompt,user_prompt,prediction\n" + f"Be brief,hi,{TEXT}\n" * 3000)
    (tmp_path / "test.csv").write_text("question,answer\n07+05=,12\n")
    (tmp_path / "prompts.csv").write_text("question,prompt\nhi,hi\n")
    for name in ("code", "corpus", "mine", "law", "other", "train", "my_dataset"):
        write_corpus(tmp_path / name)
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "photos" / "one.png")
    for name in ("HF_DIR", "DIR", "SMALL", "LARGE"):
        shutil.copytree(hf_dir, tmp_path / name)
        config = json.loads((hf_dir / "config.json").read_text()) | {"max_position_embeddings": 8192}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for name in ("RUN_DIR", "RUN", "EXPORT"):
        shutil.copytree(finished / name, tmp_path / name, symlinks=True)
    (tmp_path / "outputs" / "tunix").mkdir(parents=True)
    (tmp_path / "outputs" / "tunix" / "latest").symlink_to(tmp_path / "RUN")
    (tmp_path / "ADAPTER").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (tmp_path / "ADAPTER" / "adapter_config.json").write_text(json.dumps(settings))
    up = "base_model.model.model.layers.{}.mlp.up_proj.lora_{}.weight"
    shapes = {"A": (2, 32), "B": (64, 2)}
    factors = {up.format(n, side): np.zeros(shapes[side], np.float32) for n in range(3) for side in "AB"}
    save_file(factors, tmp_path / "ADAPTER" / "adapter_model.safetensors")
    return tmp_path


def shorten(words: list[str]) -> list[str]:
    """Leave out and add words, so that a run ends within seconds."""
    line = " ".join(words)
    if "dry_run=true" in words:
        return words
    if re.search(LARGE, line):
        return [*words, "dry_run=true"]
    changed = CHANGED | ({"training.max_steps": "8"} if "training.profile_communication=true" in words else {})
    if "resume=" in line:  # what was begun goes on
        changed = {"training.max_steps": "3"}
    kept = [word for word in words if word.split("=")[0] not in changed]
    if "best.jsonl" in line:  # answers of a few tokens
        kept += ["training.seq_len=64", "training.loss_chunk_size=64", "data.held_out_fraction=0"]
    return [*kept, *(f"{key}={value}" for key, value in changed.items())]


def prepare(words: list[str]) -> tuple[list[str], int]:
    """Return the words behind `python`, of a shorter run, and the devices that they need."""
    line, devices = " ".join(words), 1
    if "metric=reward" in words:  # a run that has rewards
        words = [word.replace("RUN_DIR", "RUN") for word in words]
    if "guess_by=mtp" in words:  # the run above it on the page, which has such a layer
        words = [word.replace("RUN_DIR", "outputs/mtp_toy/latest") for word in words]
    for pattern, example in EXAMPLES.items():
        words = [re.sub(pattern, example, word) for word in words]
    words = [word for word in words[words.index("python") + 1 :] if word != "..."]
    if "run_training.py" in words or "tunix.prepare" in words:
        words = shorten(words)
    if any(word.startswith("plan.") for word in words):
        words.append("plan.num_compiled=0")
    if sizes := re.search(r"mesh_shape=\[\[([\d,]+)\]", line):
        devices = math.prod(map(int, sizes[1].split(",")))
    elif "+experiment=quick_test" in line:
        devices = 8
    return [str(ROOT / word) if word == "run_training.py" else word for word in words], devices


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, reader):
    wrong, devices = [], 1
    for typed in (words for name, words in COMMANDS if name == page):
        line = " ".join(typed)
        shutil.rmtree(reader / "NEW", ignore_errors=True)  # what a command exports before
        words, needed = prepare([*typed])
        devices = devices if "resume=" in line else needed  # a run goes on with its mesh
        flags = QUICK if "tunix.verify" in line else xla_flags(devices)  # verify chooses its devices
        try:
            done = run_python(*words, cwd=reader, timeout=600, XLA_FLAGS=flags, HOME=str(reader))
            said = "" if done.returncode == 0 else (done.stdout + done.stderr)[-600:]
        except TimeoutExpired:
            said = "it does not end"
        if said:
            wrong.append(f"{line}\n{said}")
    assert not wrong, "\n\n".join(wrong)
