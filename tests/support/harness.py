"""A model small enough to compile in seconds, and the pieces of a run around it, as `tunix.trainer.run` puts them together."""

import contextlib
import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from support.devices import xla_flags
from support.forks import start

from tunix.__main__ import main
from tunix.base.files import STOP_SIGNALS
from tunix.config import Config
from tunix.config.compose import compose
from tunix.sharding.arrays import to_global
from tunix.sharding.mesh import ONE_DEVICE as ONE_DEVICE_SHAPE
from tunix.sharding.mesh import device_mesh
from tunix.training import train_spec as training
from tunix.training.choices import build_layout, build_mesh
from tunix.training.loss import find_loss_kind
from tunix.training.state import Architecture, describe, new_state

ROOT = Path(__file__).parents[2]
SMALL = [
    "model.vocab_size=320", "model.embed_dim=32", "model.mlp_dim=64", "model.num_layers=3", "model.global_every=3",
    "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8", "model.sliding_window=8",
    "training.seq_len=32", "training.loss_chunk_size=16", "training.micro_batch_size=1", "training.mixed_precision=fp32",
    "tokenizer.vocab_size=300",
]  # fmt: skip
ONE_LAYER = ("model.num_layers=1", "model.global_every=1")
RUN = [  # and for whole runs
    *SMALL, "training.max_steps=6", "evaluation.num_sequences=8", "evaluation.every_steps=3",
    "evaluation.sample_tokens=0", "checkpoint.save_every_steps=3", "logging.every_steps=1",
]  # fmt: skip
# And for two processes of one device: each collective waits until the other process gets a core. At a constant rate the
# step does not know the length of the run: the tests share compiled programs.
PAIR = [
    *RUN, *ONE_LAYER, "scheduler=constant", "training.global_batch_size=2", "model.mesh_shape=[[2],[fsdp]]",
    "evaluation.num_sequences=2", "hydra.run.dir=run",
]  # fmt: skip
# And where the mesh does not matter, two devices: tests of several files share the compiled step. At a constant rate the
# step does not know the length of the run.
TWO_DEVICES = (
    "scheduler=constant", "model.mesh_shape=[[2],[fsdp]]", "distributed.allow_idle_devices=true",
    "training.global_batch_size=4", "training.micro_batch_size=2",
)  # fmt: skip
ONE_DEVICE = "model.mesh_shape=[[1],[fsdp]]"
# Meshes of a model with layers of several kinds, which splits batch, heads, tokens and weights, and has no stages. Each
# has batches of four sequences.
SPLIT_MESHES = [
    ["model.mesh_shape=[[2,2],[fsdp,tp]]", "training.micro_batch_size=2", "training.sequence_parallel=true"],
    ["model.mesh_shape=[[2,2],[dp,cp]]", "training.micro_batch_size=2"],
    ["model.mesh_shape=[[2,2],[cp,tp]]", "training.micro_batch_size=4", "model.cp_exchange=ring"],
]

# Experts of a tiny model: their number, and what differs from conf/model/family/experts.yaml.
FEW_EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_dim": 16, "balance_loss": 0.01, "z_loss": 0.001}


def extract(file: Path, folder: Path) -> None:
    """Unpack a tar file; the Python 3.11.2 of Debian 12 has no `filter` yet, and unpacks it as it is."""
    with tarfile.open(file) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def experts(**changed: Any) -> str:
    """Return the word that gives any model a few experts, with some of their keys changed."""
    usual: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / "family" / "experts.yaml").mlp)
    values = usual | FEW_EXPERTS | changed
    named = (f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items())
    return f"++model.mlp={{{', '.join(named)}}}"


# Steps that move the weights visibly, by few operations: a third of those of a step are AdamW's.
SGD = [
    "optimizer=sgd", "optimizer.nesterov=false", "optimizer.learning_rate=0.1", "scheduler=constant",
    "scheduler.warmup_ratio=0",
]  # fmt: skip


@dataclass
class Program:
    """A train step with the state it starts from."""

    built: training.TrainSpec
    step: Any  # not compiled
    fresh: bool
    compiled: Any = None  # by `run`

    @property
    def cfg(self) -> Config:
        return self.built.cfg

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.built.mesh

    @property
    def arch(self) -> Architecture:
        return self.built.arch

    @cached_property
    def state(self) -> Any:
        """Made when it is asked for: a program that is only compiled needs none."""
        with jax.set_mesh(self.mesh):
            if self.fresh:
                return self.built.new_state(self.cfg.seed)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.built.abstract)
            return jax.tree.map(jax.device_put, _initial(self.built), shardings)

    def lower(self, batch: dict[str, np.ndarray]):
        with jax.set_mesh(self.mesh):
            return jax.jit(self.step, donate_argnums=0).lower(self.built.abstract, to_global(batch, self.mesh))

    def compile(self, batch: dict[str, np.ndarray]):
        return self.lower(batch).compile()

    def run(self, batch: dict[str, np.ndarray], steps: int = 2) -> list[dict[str, float]]:
        """Metrics of some steps on one batch; the state is left after them."""
        with jax.set_mesh(self.mesh):
            step, data, out = self.compile(batch), to_global(batch, self.mesh), []
            self.compiled = step
            for _ in range(steps):
                self.state, metrics = step(self.state, data)
                out.append(
                    {name: float(value) if value.ndim == 0 else value.tolist() for name, value in metrics.items()}
                )
        return out

    def loss(self, params: Any) -> jax.Array:
        """Loss of one random microbatch, on the mesh in use."""
        loss, rows = find_loss_kind(self.cfg).make(self.cfg), {name: leaf[0] for name, leaf in batch().items()}
        return loss(self.arch.module(params), rows, None).objective

    def kept_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of what the forward pass of `loss` keeps for the backward pass."""
        with jax.set_mesh(self.mesh):
            kept = jax.eval_shape(lambda params: jax.vjp(self.loss, params)[1], self.state["params"])
        return [leaf.shape for leaf in jax.tree.leaves(kept)]


def program(*overrides: str, fresh: bool = False) -> Program:
    """With `fresh`, the initial state is made on this mesh, as a run makes it."""
    cfg = compose([*SMALL, *overrides]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        built = training.assemble(cfg, mesh)
        return Program(built, built.step([(100, 1000)]), fresh)


_initial_states: dict[str, Any] = {}


def _initial(built: training.TrainSpec) -> Any:
    """Initial state on the host. It is the same on every mesh (a test of its own holds that), so it is made once.

    For one device, and with quick random numbers: that is compiled in a third of the time.
    """
    cfg = built.cfg
    model = cfg.model.model_dump(exclude={"mesh_shape"})
    key = repr((model, cfg.optimizer, cfg.training.dtypes["param"], cfg.training.ema_decay, built.guard, cfg.seed))
    if key not in _initial_states:
        mesh = device_mesh(ONE_DEVICE_SHAPE, cfg.dims, allow_idle=False, devices=jax.devices()[:1])
        with jax.set_mesh(mesh), mock.patch("jax.random.normal", _draw_quickly):
            arch = describe(cfg.model, build_layout(cfg, mesh))
            make = jax.jit(partial(new_state, arch, built.optimizer, built.ema, built.guard))
            _initial_states[key] = jax.tree.map(np.asarray, make(cfg.seed))
    return _initial_states[key]


def _draw_quickly(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Random numbers of mean 0 and variance 1, in ten operations: threefry has hundreds. A hash of each place."""
    first, second = jax.random.key_data(key)
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)) * np.uint32(0x9E3779B9) ^ first
    for factor in (0x7FEB352D, 0x846CA68B):
        bits = (bits ^ bits >> 16) * np.uint32(factor) + second
    uniform = (bits >> 8).astype(jnp.float32) / 2**24 - 0.5
    return (uniform * 12**0.5).reshape(shape).astype(dtype)


def loss_and_norm_of(built: training.TrainSpec, params: Any, rows: Any) -> dict[str, float]:
    """Loss, gradient norm and penalties of one microbatch, on the mesh in use."""
    gradients = built.gradients()

    @jax.jit
    def run(params, rows):
        grads, weight, sums = gradients(params, rows, jnp.zeros(1, jnp.int32))
        named = {name: value for name, value in sums.items() if name.endswith("loss")}
        return jax.tree.map(lambda x: x / weight, {"grad_norm": optax.tree.norm(grads), **named})

    return {name: float(value) for name, value in run(params, rows).items()}


def batch(
    sequences: int = 16, microbatches: int = 1, length: int = 32, vocab: int = 320, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random packed sequences [A, B, T]: several documents each, a third of the targets masked."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, vocab, (sequences, length + 1)).astype(np.int32)
    segments = np.sort(rng.integers(1, 4, (sequences, length)), axis=1).astype(np.int32)
    positions = np.stack(
        [np.concatenate([np.arange(n) for n in np.unique(row, return_counts=True)[1]]) for row in segments]
    )
    leaves = {
        "tokens": text[:, :-1], "targets": text[:, 1:], "positions": positions.astype(np.int32), "segment_ids": segments,
        "loss_mask": (rng.random((sequences, length)) > 0.3).astype(np.float32),
    }  # fmt: skip
    return {name: np.ascontiguousarray(leaf.reshape(microbatches, -1, length)) for name, leaf in leaves.items()}


def cli(
    *words: str, cwd: Path, devices: int = 8, timeout: float = 300, optimized: bool = False, fork: bool = True
) -> subprocess.CompletedProcess:
    """`python run_training.py ...` in a folder and a process of its own; see `run_python`."""
    flags = xla_flags(devices, optimized=optimized)
    return run_python(str(ROOT / "run_training.py"), *words, cwd=cwd, timeout=timeout, fork=fork, XLA_FLAGS=flags)


def run_python(
    *words: str, cwd: Path, timeout: float = 300, fork: bool = True, **environment: str
) -> subprocess.CompletedProcess:
    """`python WORDS` in a folder and a process of its own, to its end; words that begin with -m name a module.

    Without `fork` the process is started by exec, as users start it (see support/forks.py).
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    with tempfile.TemporaryDirectory() as outside:
        out, err = Path(outside, "stdout"), Path(outside, "stderr")
        process = start(words, cwd, environment, out, err, fork=fork)
        try:
            code = process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def errors(done: subprocess.CompletedProcess) -> list[str]:
    """Lines of stderr, but for those that say what takes long: on a busy machine, imports do."""
    return [line for line in done.stderr.splitlines() if not line.endswith(" s so far")]


def cli_here(*words: str, cwd: Path, devices: int | None = None) -> subprocess.CompletedProcess:
    """`cli` by the same program inside this process: a process of its own takes seconds to import everything.

    Not for a training that ends with another code than 0: it shuts logging down, pytest's too.
    With `devices` the run takes so many of this process's eight, on axis fsdp.
    """
    if devices:
        words = (*words, f"model.mesh_shape=[[{devices}],[fsdp]]", "distributed.allow_idle_devices=true")
    out, err = io.StringIO(), io.StringIO()
    with state_of_process(), contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = [str(ROOT / "run_training.py"), *words]
        try:
            code = main()
        except SystemExit as end:  # where Hydra ends the process, after --help
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def state_of_process() -> Iterator[None]:
    """Put back what a program that has its process for itself changes: arguments, signals, logging, Hydra's config."""
    argv, unraisable, raises, hydra = sys.argv, sys.unraisablehook, logging.raiseExceptions, HydraConfig.instance().cfg
    signals = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGINT)}
    loggers = [(logger, logger.level, logger.handlers[:]) for logger in (logging.root, logging.getLogger("tunix"))]
    logging.root.handlers.clear()  # a run closes those that it finds, and they are pytest's
    try:
        yield
    finally:
        sys.argv, sys.unraisablehook, logging.raiseExceptions = argv, unraisable, raises
        HydraConfig.instance().cfg = hydra  # that of a sweep stays there
        for number, handler in signals.items():
            signal.signal(number, handler)
        for logger, level, handlers in loggers:
            logger.setLevel(level)
            logger.handlers[:] = handlers


def metrics(folder: Path, split: str | None = None) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl: of training, or of an evaluation split."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("split") == split]
