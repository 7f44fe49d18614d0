"""`python -m tunix.verify`: the same numbers on every mesh, or exit code 1."""

import re
import sys
from itertools import combinations

import jax
import pytest
from support.devices import QUICK
from support.harness import ONE_LAYER, ROOT, RUN, run_python

from tunix import verify
from tunix import verify as command
from tunix.config.compose import compose
from tunix.sharding.mesh import resolve
from tunix.sharding.table import axis_names
from tunix.training.train_spec import TrainSpec

TWO = '--meshes=[[[8],["fsdp"]],[[2,2,2],["dp","fsdp","tp"]]]'


MIXED = {"fsdp": 2, "cp": 2, "tp": 2}


@pytest.fixture
def words(corpus) -> list[str]:
    once = dict(word.split("=", 1) for word in (*RUN, *ONE_LAYER))  # the last value of each key
    return [*(f"{key}={value}" for key, value in once.items()), "data=text", f"data.paths=['{corpus}']"]


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tunix.verify", *words])
        code = command.main()
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_alone_the_cpu_stands_for_eight_devices(words, tmp_path):
    done = run_python("-m", "tunix.verify", *words, TWO, "--steps=2", cwd=tmp_path, XLA_FLAGS=QUICK)
    assert done.returncode == 0, done.stderr
    assert '[[2,2,2],["dp","fsdp","tp"]]' in done.stdout
    last = done.stdout.splitlines()[-1]  # below the table
    assert re.fullmatch(
        r"largest relative difference \S+ \(\S+e-0[78] in the first step\), within the tolerance of 1e-05", last
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_digits_differ_past_a_tolerance_of_nothing(words, run):
    code, out, _ = run(*words, TWO, "--steps=2", "--tolerance=1e-12")
    assert code == 1
    assert "past the tolerance of 1e-12" in out


@pytest.mark.nightly
def test_a_mesh_that_goes_wrong_is_found(words, run, monkeypatch):
    """One mesh starts from other weights than the first."""
    new_state = TrainSpec.new_state

    def other_seed_on_tp(self, seed, given=None):
        return new_state(self, seed + (jax.sharding.get_mesh().shape["tp"] > 1), given)

    monkeypatch.setattr(TrainSpec, "new_state", other_seed_on_tp)
    code, out, _ = run(*words, TWO, "--steps=1")
    assert code == 1
    assert [line.count("!") for line in out.splitlines() if "[[" in line] == [0, 2]


def test_numbers_that_are_not_finite_never_agree():
    two = [verify.Trial("", 1, {"loss": [float("nan")], "grad_norm": [1.0]})] * 2
    assert set(two[1].compute_differences(two[0]).values()) == {0.0, float("inf")}


@pytest.mark.parametrize(
    ("more", "chosen"),
    [
        ([], [{}, {"cp": 8}, {"fsdp": 8}, {"dp": 8}, MIXED]),  # four heads: no tp=8
        (["model.num_heads=8"], [{}, {"tp": 8}, {"cp": 8}, {"fsdp": 8}, {"dp": 8}, MIXED]),
        (["training.global_batch_size=4", "model.mesh_shape=[[2,4],[fsdp,tp]]"], [{}, {"cp": 8}, MIXED]),
    ],
    ids=["heads", "all", "batch"],
)
def test_chosen_meshes(words, more, chosen):
    cfg = compose([*words, *more]).config
    sizes = resolve(cfg.model.mesh_shape, 8, cfg.dims, allow_idle=False)
    found = verify.select_meshes(cfg, cfg.training.batch_shape(sizes).num_sequences)
    assert [{axis: size for axis, size in sizes.items() if size > 1} for sizes in found] == chosen


def test_process_0_loads_no_teacher_alone(words, monkeypatch):
    """The other processes wait until it has trained, and would not answer when it asks them about the files."""
    cfg = compose([*words, f"task.teacher={ROOT}/tests/models/parity/llama"]).config
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert 1 not in [max(sizes.values()) for sizes in verify.select_meshes(cfg, 8)]


def test_every_mesh_of_a_model_with_experts():
    """Each axis meets each other one."""
    cfg = compose(
        [
            "model=tiny_moe",
            "model.num_layers=8",
            "model.num_heads=8",
            "training.global_batch_size=64",
            "training.micro_batch_size=1",
        ]
    ).config
    found = verify.select_meshes(cfg, 64, every=True)
    named = [frozenset(axis for axis, size in sizes.items() if size > 1) for sizes in found]
    assert len(found) == 1 + 6 + 30 + 20  # one device; 8 on an axis; 4 x 2 and 2 x 4; 2 x 2 x 2
    assert {frozenset(pair) for pair in combinations(axis_names(), 2)} <= set(named)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--meshes=[[8]"], "--meshes [[8]: expected all, or a list of meshes like"),
        (["--meshes=[8]"], "--meshes [8]: expected all, or a list of meshes like"),
        (["--meshes=[[4,2],[fsdp,tp]]"], "--meshes [[4,2],[fsdp,tp]]: expected all, or a list of meshes like"),
        (['--meshes=[[[8],["fdsp"]]]'], "did you mean fsdp?"),
        (['--meshes=[[[8,2],["fsdp","tp"]]]'], "fsdp=8 x tp=2 needs 16 devices, 8 are visible"),
        (['--meshes=[[[3],["dp"]]]'], "training.global_batch_size=8 is not divisible by 3"),
        (
            ["training.global_batch_size=4", '--meshes=[[[3],["dp"]]]'],
            "training.global_batch_size=4 is not divisible by 3",
        ),
        (["--steps=0"], "--steps 0 must be 1 or more"),
        (["--tolerance=nan"], "--tolerance nan must be 0 or more"),
        (["resume=latest"], "tunix.verify starts from new weights"),
        (["training.seq_length=4"], "here it is training.seq_len=4"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input(more, message, words, run):
    code, out, error = run(*words, *more)
    assert code == 2
    assert out == ""
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
