"""Every command in a block of a page, or with keys in its text, is taken by the program that it names.

What the page names is around it.

A block that cannot be tried here says why in its first line: `# No test runs this: ...`. Words of training compose a
config; commands with keys of their own read them. At night test_page_runs.py runs them. The commands about data and own
parts also run each time, in test_data_page.py and test_extending.py, and those of launchers say who each process is, in
launch/test_launch_pages.py.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch.test_launch import TWO_MACHINES
from safetensors.numpy import save_file
from support.harness import ROOT

from tunix.config import Average, Evaluate, Export, Generate, Play, Samples, Section, Serve
from tunix.config.command_line import command_parser, read_settings
from tunix.config.compose import add_search_path, check_sweep, compose, to_yaml
from tunix.launch import __main__ as launch

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks/results.md"]
NO_COMMANDS = ("python", "text", "json", "yaml")  # languages of blocks
REASON = "# No test runs this: "
OWN_TESTS = ("extending.md",)  # pages whose blocks another test runs
SECTIONS: dict[str, type[Section]] = {
    "generate": Generate, "evaluate": Evaluate, "export": Export, "average": Average, "serve": Serve, "play": Play,
    "samples": Samples,
}  # fmt: skip
# What stands for a folder or a model of the user's.
RUNS = (
    "RUN_DIR", "RUN", "outputs/addition_sft/latest", "outputs/addition_teacher/latest", "outputs/look_up_sft/latest",
    "outputs/shapes_sft/latest", "outputs/addition_reward/latest", "outputs/addition_kto/latest",
)  # fmt: skip
MODELS = "HF_DIR", "DIR", "OTHER_DIR", "SMALL", "LARGE", "google/gemma-3-1b-it", "google/gemma-3-270m"
# Pages show what is answered, or a part of a command.
REFUSED = ("python run_training.py lr=1e-3", "python -m tunix.evaluate metric=lm_eval")
ELSEWHERE = ("checkpoint=", "resume=s3:")  # tests/test_verify.py, tests/run/test_buckets.py
SHELL = {"NUM_NODES": "2", "HOST_NODE_ADDR": "10.0.0.1:29400", "JOB_ID": "7", "NODE": "1", "MASTER_ADDR": "10.0.0.1"}


def list_commands() -> list:
    """A case for each command of a block: the page, and the words of the line."""
    cases = []
    for page in PAGES:
        for language, body in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), flags=re.M | re.S):
            lines = body.replace("\\\n", " ").splitlines()
            if language in NO_COMMANDS or lines[0].startswith(REASON) or page.name in OWN_TESTS:
                continue
            cases += [make_case(page, line) for line in lines if line.strip() and not line.startswith(("export", "#"))]
        # And those in sentences and tables that have keys and no gaps.
        sentences = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for line in dict.fromkeys(re.findall(r"`(python [^`\n]*=[^`\n]*)`", sentences)):
            if (
                not re.search(r" \.\.\. |NAME|jax\.distributed", line)
                and line not in REFUSED
                and page.name not in OWN_TESTS
            ):
                cases.append(make_case(page, line))
    return cases


def make_case(page: Path, line: str) -> Any:
    words = shlex.split(re.sub(r"\$(\w+)", lambda name: SHELL.get(name[1], "x"), line), comments=True)
    return pytest.param(words, id=f"{page.name}: {' '.join(words)}"[:110])


@pytest.fixture(scope="module")
def world(tmp_path_factory, hf_dir) -> Path:
    """A folder with what the pages name."""
    folder = tmp_path_factory.mktemp("world")
    data = "data=csv", "data.paths=[test.csv]", "task=sft"
    saved = to_yaml(compose([*data, "model=tiny", "tokenizer=bytes", "model.vocab_size=auto"]).config)
    of_recipes = {  # where a command changes a key that other data do not have
        "outputs/addition_kto/latest": to_yaml(compose(["+experiment=kto_toy"]).config),
        "outputs/addition_reward/latest": to_yaml(compose(["+experiment=reward_model_toy"]).config),
    }
    for name in (*RUNS, "outputs/tunix/latest"):
        (folder / name / "checkpoints" / "7").mkdir(parents=True)
        (folder / name / "config.yaml").write_text(of_recipes.get(name, saved))
    for name in MODELS:
        shutil.copytree(hf_dir, folder / name)
        config = json.loads((hf_dir / "config.json").read_text()) | {"max_position_embeddings": 8192}
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "ADAPTER").mkdir()
    (folder / "ADAPTER" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    factors = {f"base_model.model.model.layers.0.mlp.up_proj.lora_{side}.weight": np.zeros((2, 2)) for side in "AB"}
    save_file(factors, folder / "ADAPTER" / "adapter_model.safetensors")
    (folder / "two_nodes.yaml").write_text(TWO_MACHINES)
    for path, body in re.findall(r"```yaml\n# (\S+\.yaml)[^\n]*\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.S):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(body)
    return folder


@pytest.mark.parametrize("words", list_commands())
def test_command(words, world, monkeypatch):
    monkeypatch.chdir(world)
    monkeypatch.syspath_prepend(world)
    while "=" in words[0]:  # VARIABLE=value before the program
        name, value = words[0].split("=", 1)
        monkeypatch.setenv(name, value)
        words = words[1:]
    OF_OTHERS.get(words[0], take)(words)


def check_make(words: list[str]) -> None:
    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M)


def check_pip(words: list[str]) -> None:
    """Files of requirements are there, and extras and the version are those of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[2:]:
        if version := re.match(r"tunix_trainer-([\d.]+)-", word):
            assert version[1] == project["version"]
        if extras := re.search(r"\[(.*)\]", word):
            assert {*extras[1].split(",")} <= {*project["optional-dependencies"]}
        assert (ROOT / word).is_file() or not word.startswith("requirements/")


def check_docker(words: list[str]) -> None:
    if words[1] == "build":
        assert (ROOT / words[words.index("-f") + 1]).is_file()
    else:
        compose(words[words.index("tunix:cuda13") + 1 :])


OF_OTHERS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make, "pip": check_pip, "docker": check_docker,
    "ollama": lambda words: None,  # a program of others; tests/huggingface/test_gguf.py reads its file
    "wandb": lambda words: None,  # needs an account
    "tensorboard": lambda words: None,  # a server that does not end
}  # fmt: skip


def take(words: list[str]) -> None:
    """Let the program that the words name read its words."""
    program = next((n for n, word in enumerate(words) if word == "run_training.py" or word.startswith("tunix.")), None)
    if words[:2] == ["python", "-m"] and words[2].startswith(
        "benchmarks."
    ):  # reads its words when it has begun to work
        assert importlib.util.find_spec(words[2]) is not None
        return
    assert program is not None, f"no program of ours in {words}: say why in the block's first line, {REASON}..."
    name, own = words[program].removeprefix("tunix."), [word for word in words[program + 1 :] if word != "..."]
    if name == "launch":
        launch.read_flags(own, dict(os.environ))
        take(own)
    elif name in SECTIONS:
        read(SECTIONS[name], own)
    elif name == "compare":
        assert [word for word in own if not word.startswith("-")] == ["RUN", "RUN"]
    else:
        read_training(own)


def read(section: type[Section], words: list[str]) -> None:
    """Read the words of a command with keys of its own, and compose those that are keys of training."""
    first = [f"run={word}" for word in words if section is Samples and "=" not in word]
    words = [*first, *(word for word in words if "=" in word)]
    others = [w for w in words if "overrides" in section.model_fields and w.split("=")[0] not in section.model_fields]
    settings: Any = read_settings(
        section, [word for word in words if word not in others], {"overrides": others} if others else {}
    )
    if others:  # they change the config of a run, or of a folder's model
        checkpoint = settings.checkpoint
        start = [f"resume={checkpoint}" if checkpoint in RUNS else f"model.init_from={checkpoint}"]
        compose([*(start if checkpoint else []), *others])


def read_training(words: list[str]) -> None:
    parser = command_parser("page", "")
    for flag in ("--json", "--multirun"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--meshes", "--steps", "--config-path", "--config-name"):
        parser.add_argument(flag)
    parsed = parser.parse_intermixed_args(words)
    overrides = add_search_path(parsed.overrides, parsed.config_dir)
    if parsed.multirun:
        check_sweep(overrides)
    elif not parsed.config_path and not any(word.startswith(ELSEWHERE) for word in overrides):
        compose(overrides)
