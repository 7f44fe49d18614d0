"""Speed on one GPU, in one command: `python -m benchmarks.gpu`, at most 8 minutes.

TRANSFORMERS_PYTHON, if it is set, is a Python with torch and transformers, which then trains the same models in the
same run. Each part has a process of its own, so that it has all of the memory:

    prepare     all programs are compiled, several at a time, into a folder of compiled programs
    kernel      kernels of attention and of experts' products beside the plain ones: numbers and times
    step        train steps of each model on random tokens: tokens/s, MFU, memory, beside what the plan predicts
    peers       the same model and batch by transformers and torch.compile

The table comes last. A part for which no time is left, or which fails, has the reason in its row. `--tiny` runs every
part on any device at sizes that a test can afford.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_S = 460.0  # of the whole command
PREPARE_S, PART_S = 200.0, 120.0  # of all programs together, and of one part
STEPS, WARMUP = 10, 2

# Name -> config. The last one needs the memory of an H200; a case that does not fit says so in its row.
CASES = {
    "gemma3_270m": ["model=gemma3_270m", "training.seq_len=2048", "training.micro_batch_size=8"],
    "gemma3_1b": ["model=gemma3_1b", "training.seq_len=4096", "training.micro_batch_size=4"],
    "llama3_1b": ["model=llama3_1b", "training.seq_len=4096", "training.micro_batch_size=4"],
    "qwen3_0_6b": ["model=qwen3_0_6b", "training.seq_len=8192", "training.micro_batch_size=2"],
    "llama3_8b": ["model=llama3_8b", "training.seq_len=4096", "training.micro_batch_size=1", "training.remat=full",
                  "training.param_dtype=bfloat16"],
    # As long as there is time: products of 8-bit floats, which an A100 lacks, and experts.
    "llama3_1b, fp8": ["model=llama3_1b", "training.seq_len=4096", "training.micro_batch_size=4",
                       "training.matmul_dtype=fp8"],
    "qwen3_30b_a3b, 4 layers": ["model=qwen3_30b_a3b", "model.num_layers=4", "training.seq_len=4096",
                                "training.micro_batch_size=1", "training.remat=full"],
}  # fmt: skip
COMMON = ["training.remat=dots", "training.max_steps=1000", "scheduler=constant", "tokenizer.vocab_size=300"]
TINY = ["model.vocab_size=320", "model.embed_dim=32", "model.mlp_dim=64", "model.num_layers=2", "model.num_heads=4",
        "model.num_kv_heads=2", "model.head_dim=16", "model.context_length=64", "training.seq_len=64",
        "training.micro_batch_size=2"]  # fmt: skip
# Heads, key/value heads, numbers of a head, tokens, window.
SHAPES = [(32, 8, 64, 4096, 4096), (16, 8, 128, 8192, 8192), (4, 1, 256, 4096, 4096), (4, 1, 256, 4096, 512)]
TINY_SHAPES = [(4, 2, 16, 64, 24)]
TINY_OF = {"gemma3": ["model.global_every=2", "model.sliding_window=16"]}
TINY_EXPERTS = ["model.mlp.num_experts=4", "model.mlp.experts_per_token=2", "model.mlp.expert_dim=16"]
# Experts, rows of all experts, numbers that go in and come out.
GROUPS = [(32, 8192, 2048, 768)]
TINY_GROUPS = [(4, 64, 32, 16)]


def words_of(name: str, tiny: bool) -> list[str]:
    """Return the words of the command line of a case."""
    one = ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]
    shrink = [*TINY, *TINY_OF.get(name.split("_")[0], []), *(TINY_EXPERTS if "a3b" in name else [])] if tiny else []
    words = {word.split("=")[0]: word for word in [*COMMON, *CASES[name], *shrink, *one]}  # the last of a key wins
    return sorted(words.values(), key=lambda word: not word.startswith("model="))


def timed(function: Any, *arguments: Any) -> float:
    """Return the median of the seconds of a call, after two that are not counted."""
    import jax

    seconds = []
    for _ in range(STEPS + WARMUP):
        start_time = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start_time)
    return statistics.median(seconds[WARMUP:])


def kernel(tiny: bool) -> dict[str, Any]:
    """Compare outputs and gradients of the kernel with those of the plain one in float32, and measure both."""
    import jax
    import jax.numpy as jnp

    from tunix.base.dotted_path import import_object
    from tunix.models.attention_mask import row_mask_rule
    from tunix.models.kernels import mesh_device, select_kernel
    from tunix.models.table import KERNELS

    rows = []
    with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])):
        for heads, kv_heads, head_dim, length, window in TINY_SHAPES if tiny else SHAPES:
            name = select_kernel("auto", head_dim, "bfloat16", mesh_device()).name
            keys = jax.random.split(jax.random.key(0), 4)
            q, k, v, d_out = (
                jax.random.normal(key, (1, length, count, head_dim), jnp.bfloat16)
                for key, count in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
            )
            q *= head_dim**-0.5
            segments = jnp.arange(length, dtype=jnp.int32)[None] // (length * 5 // 8)  # two documents

            def both(kernel, q, k, v, d_out, segments=segments, window=window):
                def attended(q, k, v):
                    return import_object(KERNELS[kernel])(q, k, v, row_mask_rule(segments, window))

                out, pull_back = jax.vjp(attended, q, k, v)
                return out, *pull_back(d_out)

            run = jax.jit(both, static_argnums=0)
            fast, exact = run(name, q, k, v, d_out), run("xla", *(x.astype(jnp.float32) for x in (q, k, v, d_out)))
            off = max(float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))) for x, y in zip(fast, exact, strict=True))
            times = [timed(run, which, q, k, v, d_out) for which in (name, "xla")]
            rows.append(
                {"shape": f"{heads}/{kv_heads} heads of {head_dim}, T {length}, window {window}", "kernel": name,
                 "difference": off, "kernel_ms": times[0] * 1e3, "plain_ms": times[1] * 1e3}
            )  # fmt: skip
        rows += [compare_experts(*shape) for shape in (TINY_GROUPS if tiny else GROUPS)]
    return {"rows": rows}


def compare_experts(num_experts: int, num_rows: int, width: int, out: int) -> dict[str, Any]:
    """Compare the product of experts and its gradients with the plain one in float32, and measure both.

    The experts have different numbers of rows, and the first one has none.
    """
    import jax
    import jax.numpy as jnp

    from tunix.models.kernels import mesh_device, select_expert_matmul
    from tunix.models.matmul import grouped_product

    name = select_expert_matmul("auto", "bfloat16", mesh_device()).name
    shapes = (num_rows, width), (num_experts, width, out), (num_rows, out)
    rows, w, d_out = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    )
    w *= width**-0.5
    ends = num_rows * jnp.arange(num_experts) ** 2 // (num_experts - 1) ** 2
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)

    def both(kind, sizes, rows, w, d_out):
        y, pull_back = jax.vjp(lambda rows, w: grouped_product(rows, w, sizes, kind), rows, w)
        return y, *pull_back(d_out)

    # A grouped product takes the arrays of one device, so it runs inside of a `shard_map`.
    run = {
        kind: jax.jit(jax.shard_map(partial(both, kind), in_specs=jax.P(), out_specs=jax.P())) for kind in {name, "xla"}
    }
    fast = run[name](sizes, rows, w, d_out)
    exact = run["xla"](sizes, *(x.astype(jnp.float32) for x in (rows, w, d_out)))
    off = max(float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))) for x, y in zip(fast, exact, strict=True))
    times = [timed(run[kind], sizes, rows, w, d_out) for kind in (name, "xla")]
    return {
        "shape": f"{num_experts} experts, {num_rows} rows, {width} to {out}",
        "kernel": name,
        "difference": off,
        "kernel_ms": times[0] * 1e3,
        "plain_ms": times[1] * 1e3,
    }


def step(name: str, tiny: bool, only_compile: bool = False) -> dict[str, Any]:
    """Compile the train step of a case, and measure it; return figures beside those that the plan predicts."""
    import jax

    from tunix.config.compose import compose
    from tunix.costs.devices import Cluster, find_kind, read_device_kinds
    from tunix.plan.compile import compile_for

    cfg = compose(words_of(name, tiny)).config
    device = jax.devices()[0]
    figures: dict[str, Any] = {"device": device.device_kind}
    if device.platform != "gpu":  # a plan predicts GPUs
        return figures | ({} if only_compile else train(cfg, device, 2 if tiny else STEPS))
    kind = find_kind(device.device_kind) or read_device_kinds()["h100"]
    predicted, _ = compile_for(cfg, Cluster(kind, 1, 1), [device])
    limit = (device.memory_stats() or {}).get("bytes_limit")
    figures |= {
        "predicted_gib": predicted.memory / 2**30,
        "predicted_s": predicted.step_time.step_s if predicted.step_time else None,
        "compile_s": predicted.compile_s,
    }
    if limit and predicted.memory > limit:
        return figures | {"error": f"does not fit: {predicted.memory / 2**30:.0f} GiB of {limit / 2**30:.0f}"}
    if only_compile:
        return figures
    return figures | train(cfg, device, 2 if tiny else STEPS)


def train(cfg: Any, device: Any, num_steps: int) -> dict[str, Any]:
    """Train on random tokens on one device, and return medians of some steps after those that are not counted."""
    import jax
    import numpy as np

    from tunix.costs.devices import find_kind
    from tunix.sharding.arrays import to_global
    from tunix.training.choices import build_mesh
    from tunix.training.train_spec import assemble, derive_sizes

    mesh, length = build_mesh(cfg, [device]), cfg.training.seq_len
    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
        shapes, sizes = program.abstract_batch, derive_sizes(program, None)
        train_step = jax.jit(program.step([(1000, sizes.batch.num_tokens)]), donate_argnums=0)
        options: Any = cfg.training.compiler_options
        compiled = train_step.lower(program.abstract, shapes).compile(compiler_options=options)
        shape = shapes["tokens"].shape
        text = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (*shape[:2], length + 1), np.int32)
        rows = {
            "tokens": text[..., :-1],
            "targets": text[..., 1:],
            "positions": np.broadcast_to(np.arange(length), shape),
            "segment_ids": np.ones(shape),
            "loss_mask": np.ones(shape),
        }
        batch = to_global({name: np.ascontiguousarray(rows[name], shapes[name].dtype) for name in shapes}, mesh)
        state, seconds = program.new_state(0), []
        for _ in range(WARMUP + num_steps):
            start_time, cpu = time.perf_counter(), time.process_time()
            state, numbers = compiled(state, batch)
            loss = float(numbers["loss"])
            seconds.append((time.perf_counter() - start_time, time.process_time() - cpu))
    step_s, cpu_s = (statistics.median(each) for each in zip(*seconds[WARMUP:], strict=True))
    kind, in_use = find_kind(device.device_kind), (device.memory_stats() or {}).get("peak_bytes_in_use")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # on a CPU, of the process
    return {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "tokens_per_s": sizes.batch.num_tokens / step_s,
        "mfu": sizes.tflop_per_step / step_s / kind.peak_tflops if kind else None,
        "peak_gib": (in_use if device.platform == "gpu" and in_use else resident) / 2**30,
        "loss": loss,
    }


def peer_question(name: str, tiny: bool) -> dict[str, Any]:
    """Return config.json and batch of a case, as `benchmarks/trained_by_transformers.py` takes them."""
    from tunix.config.compose import compose
    from tunix.huggingface.config_json import write_config

    cfg = compose(words_of(name, tiny)).config
    return {
        "config": write_config(cfg.model),
        "rows": cfg.training.sequences_per_shard,
        "length": cfg.training.seq_len,
        "steps": 2 if tiny else STEPS,
        "warmup": WARMUP,
        "param_dtype": cfg.training.dtypes["param"],
        "compiled": not tiny,
        "checkpointed": cfg.training.remat != "none",
    }


class Parts:
    """Runs parts in processes of their own until the time of the command is over."""

    def __init__(self, tiny: bool, cache: str):
        self.tiny, self.cache, self.start_time = tiny, cache, time.monotonic()

    @property
    def left_s(self) -> float:
        return LIMIT_S - (time.monotonic() - self.start_time)

    def ask(self, command: list[str], limit_s: float, question: dict | None = None, shared: bool = False) -> dict:
        """Return the answer of a process, the last line of its output as JSON, or {"error": reason}."""
        limit_s = min(limit_s, self.left_s)
        if limit_s < 10:
            return {"error": "no time left"}
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": self.cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false" if shared else "true",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        }
        text = None if question is None else json.dumps(question)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, input=text, capture_output=True, text=True, timeout=limit_s,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"more than {limit_s:.0f} s"}
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return {"error": next((line for line in reversed(lines) if "rror" in line), f"code {done.returncode}")[:90]}
        return json.loads(done.stdout.splitlines()[-1])

    def own(self, *words: str, limit_s: float = PART_S, shared: bool = False) -> dict:
        """Return the answer of a part of this file."""
        tiny = ["--tiny"] if self.tiny else []
        return self.ask([sys.executable, "-m", "benchmarks.gpu", *words, *tiny], limit_s, shared=shared)

    def prepare(self, names: list[str]) -> dict[str, dict]:
        """Compile the programs of all cases, several at a time; the parts that follow read them."""
        workers = 1 if self.tiny else max(1, min(4, (os.cpu_count() or 2) // 4))
        end = time.monotonic() + PREPARE_S

        def compile_case(name: str) -> dict:
            return self.own("compile", name, limit_s=end - time.monotonic(), shared=True)

        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(names, pool.map(compile_case, names), strict=True))


def number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def measure(tiny: bool, names: list[str], python: str | None) -> str:
    """Run all parts and return the table."""
    with tempfile.TemporaryDirectory() as cache:
        parts = Parts(tiny, cache)

        def say(line: str) -> None:
            print(f"{LIMIT_S - parts.left_s:5.0f} s  {line}", flush=True)

        say(f"compiling {', '.join(names)}")
        prepared = parts.prepare(names)
        say("kernel")
        compared = parts.own("kernel")
        steps, peers = {}, {}
        for name in names:
            say(f"step of {name}")
            ready = prepared[name]
            steps[name] = ready if "does not fit" in ready.get("error", "") else parts.own("step", name)
        for name in names if python else []:
            say(f"transformers: {name}")
            question = peer_question(name, tiny)
            command = [str(python), str(ROOT / "benchmarks" / "trained_by_transformers.py")]
            peers[name] = parts.ask(command, PART_S, question)
        device = next((each["device"] for each in [*steps.values(), *prepared.values()] if "device" in each), "unknown")
        lines = [f"\n{device}, {LIMIT_S - parts.left_s:.0f} s in all", "", *_kernels(compared)]
        return "\n".join([*lines, "", *_steps(steps, peers)])


def _kernels(compared: dict) -> list[str]:
    rows = ["| forward and backward | kernel | ms | plain, ms | times as fast | largest difference |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    if "error" in compared:
        return [*rows, f"| {compared['error']} | | | | | |"]
    for row in compared["rows"]:
        speedup = row["plain_ms"] / row["kernel_ms"]
        rows.append(
            f"| {row['shape']} | {row['kernel']} | {row['kernel_ms']:.2f} | {row['plain_ms']:.2f} | {speedup:.2f} | "
            f"{row['difference']:.2%} |"
        )
    return rows


def _steps(steps: dict[str, dict], peers: dict[str, dict]) -> list[str]:
    heads = "model", "step, s", "predicted, s", "tokens/s", "MFU", "memory, GiB", "predicted, GiB"
    peer_heads = "transformers, tokens/s", "ratio"
    rows = [f"| {' | '.join((*heads, *peer_heads))} |", "|---" * len((*heads, *peer_heads)) + "|"]
    for name, row in steps.items():
        peer = peers.get(name, {})
        of_peer, ratio = peer.get("error", number(peer.get("tokens_per_s"), ",.0f")), None
        if "tokens_per_s" in peer and "tokens_per_s" in row:
            ratio = row["tokens_per_s"] / peer["tokens_per_s"]
        rows.append(
            f"| {name} | {row.get('error') or number(row.get('step_s'))} | {number(row.get('predicted_s'))} | "
            f"{number(row.get('tokens_per_s'), ',.0f')} | {number(row.get('mfu'), '.1%')} | "
            f"{number(row.get('peak_gib'), '.1f')} | {number(row.get('predicted_gib'), '.1f')} | {of_peer} | "
            f"{number(ratio, '.2f')} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["kernel", "step", "compile"], help="one part, in this process")
    parser.add_argument("case", nargs="?", choices=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="sizes that any device can afford")
    chosen = parser.parse_args()
    parts = {
        "kernel": lambda: kernel(chosen.tiny),
        "step": lambda: step(chosen.case, chosen.tiny),
        "compile": lambda: step(chosen.case, chosen.tiny, only_compile=True),
    }
    if chosen.part:
        print(json.dumps(parts[chosen.part]()))
    else:
        print(measure(chosen.tiny, list(CASES), os.environ.get("TRANSFORMERS_PYTHON")))


if __name__ == "__main__":
    main()
