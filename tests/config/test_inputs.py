"""What can be checked for nothing is checked before anything is written or submitted; a dry run checks it too."""

import pytest
from support.harness import ONE_LAYER

import tunix
from tunix.base.errors import UserError
from tunix.config.compose import compose, reject_missing_inputs
from tunix.processes.identity import find_identity, reject_idle_gpus

SUBMITTED = ["launcher=slurm", "launcher.nodes=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hydra.run.dir=gs://bucket/run"], "hydra.run.dir=gs:/.*bucket/run: a bucket cannot be written"),
        (["loading.cache_dir=s3://bucket/x", "dry_run=true"], "loading.cache_dir=s3://bucket/x: a bucket cannot"),
        (
            ["hydra.run.dir='\udcff'"],
            r"hydra.run.dir=.*/\\udcff: the name is no UTF-8; choose another folder",
        ),  # byte FF
        (["data=text", "data.paths=[nowhere/]"], "data.paths: nowhere/ does not exist"),
        (["data=text", "data.paths=['nowhere/*.txt']", "dry_run=true"], r"data.paths: nowhere/\*.txt does not exist"),
        ([*SUBMITTED, "data=text", "data.paths=[nowhere/]"], "data.paths: nowhere/ does not exist"),
        (["tokenizer.path=nowhere/tokenizer.json"], "tokenizer.path: nowhere/tokenizer.json does not exist"),
        (["tokenizer.path=./robot", "dry_run=true"], "tokenizer.path: ./robot does not exist"),
        (
            ["+experiment=sft_addition", "task.chat_template=my.jinja", "dry_run=true"],
            "task.chat_template: my.jinja does not",
        ),
    ],
)
def test_inputs_that_are_not_there(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        reject_missing_inputs(compose(words))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["tokenizer.path=gpt2"],
        ["tokenizer.path=google/gemma-3-1b-it"],
        ["data=text", "data.paths=['*.txt']"],
        ["data=text", "data.paths=[here.txt]", "tokenizer.path=nowhere.json", "tokenizer.train=true"],
        [*SUBMITTED, "launcher.container_image=image", "data=text", "data.paths=[nowhere/]"],
    ],
)
def test_inputs_that_may_be_there(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("text")
    reject_missing_inputs(compose(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+training.compiler_options.xla_no_such_option=1"], "training.compiler_options: .*xla_no_such_option"),
        (["training.profile_communication=true", "profile.after_step=500"], "profile.after_step=500"),
    ],
)
def test_a_dry_run_checks_what_the_run_would(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [*ONE_LAYER, "model.embed_dim=32", "model.mlp_dim=32"]
    with pytest.raises(UserError, match=message):
        tunix.train([*small, "dry_run=true", *words])
    assert not any(tmp_path.iterdir())


def test_what_is_trained_is_a_config_or_a_list_of_words():
    with pytest.raises(UserError, match="tunix.train takes a Config, or a list of words, not 'seed=1'"):
        tunix.train("seed=1")  # type: ignore[arg-type]


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}


def test_gpus_without_work_are_refused():
    def reject(*words: str, **environment: str) -> None:
        distributed, variables = compose(list(words)).config.distributed, LAUNCHED | environment
        identity = find_identity(distributed, variables)
        assert identity is not None
        reject_idle_gpus(identity, distributed, variables)

    eight = ",".join(map(str, range(8)))
    with pytest.raises(
        UserError, match="4 processes of this host take one GPU each, and it has 8: 4 would have no work"
    ):
        reject(CUDA_VISIBLE_DEVICES=eight)
    reject(CUDA_VISIBLE_DEVICES="0,1,2,3")
    reject(CUDA_VISIBLE_DEVICES=eight, JAX_PLATFORMS="cpu")
    reject("distributed.allow_idle_devices=true", CUDA_VISIBLE_DEVICES=eight)
    reject("distributed.local_device_ids=[2,3]", CUDA_VISIBLE_DEVICES=eight)
    reject(CUDA_VISIBLE_DEVICES="3")  # the launcher has hidden the others
    reject(CUDA_VISIBLE_DEVICES=eight, LOCAL_WORLD_SIZE="1")  # one process for the host takes all
