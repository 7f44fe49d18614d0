"""Speed on one GPU, in one command: `python -m benchmarks.gpu`, at most 8 minutes.

TRANSFORMERS_PYTHON, if it is set, is a Python with torch and transformers, which then trains the same models in the
same run. Each part has a process of its own, so that it has all of the memory:

    prepare     all programs are compiled, several at a time, into a folder of compiled programs; rollouts draw once
    kernel      kernels of attention and of experts beside plain operations: numbers and times (gpu_kernels.py)
    step        train steps of each model on random tokens: tokens/s, MFU, memory, beside what the plan predicts
    rollout     answers drawn with each cache: tokens/s, beside those of the bytes that a token reads
    peers       the same model and batch by transformers and torch.compile

The table comes last. `--traces FOLDER` keeps a profile of one step of each model. A part for which no time is left, or
which fails, has the reason in its row. `--tiny` runs every part on any device at sizes that a test can afford.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_S = 460.0  # of the whole command, where `--limit-s` says nothing
PREPARE_S, PART_S = 200.0, 120.0  # of all programs together, and of one part
STEPS, WARMUP = 10, 2
# Caches of rollouts by name: keys of `Sampling`. So many answers to one prompt each, of many lengths.
ROLLOUTS = {
    "slots": {"cache": "slots"},
    "pages": {"cache": "pages"},
    "pages, int8": {"cache": "pages", "cache_dtype": "int8"},
}
ROLLOUT = {"rows": 64, "prompt": 256, "longest": 1024}
TINY_ROLLOUT = {"rows": 4, "prompt": 16, "longest": 32}

# Name -> config. Those of 8 billion parameters need the memory of an H200; a case that does not fit says so in its row.
CASES = {
    "llama3_1b": ["model=llama3_1b", "training.seq_len=4096", "training.micro_batch_size=8"],
    "gemma3_1b": ["model=gemma3_1b", "training.seq_len=4096", "training.micro_batch_size=8"],
    "qwen3_0_6b": ["model=qwen3_0_6b", "training.seq_len=8192", "training.micro_batch_size=2"],
    "llama3_8b": ["model=llama3_8b", "training.seq_len=4096", "training.micro_batch_size=1", "training.remat=full",
                  "training.param_dtype=bfloat16"],
    # One microbatch of 16 of a step for which NeMo AutoModel publishes 10.51 s on one H100.
    "llama3_8b, LoRA": ["model=llama3_8b", "model.lora.rank=16", "training.seq_len=4096", "training.micro_batch_size=2",
                        "training.remat=none", "training.param_dtype=bfloat16"],
    "qwen3_30b_a3b, 4 layers": ["model=qwen3_30b_a3b", "model.num_layers=4", "training.seq_len=4096",
                                "training.micro_batch_size=2", "training.remat=full"],
    "llama3_1b, fp8": ["model=llama3_1b", "training.seq_len=4096", "training.micro_batch_size=8",
                       "training.matmul_dtype=fp8"],  # an A100 has no products of 8-bit floats
    "gemma3_270m": ["model=gemma3_270m", "training.seq_len=2048", "training.micro_batch_size=8"],
}  # fmt: skip
PEERS = "llama3_1b", "gemma3_1b", "qwen3_0_6b"  # cases that transformers trains too, as long as there is time
COMMON = ["training.remat=dots", "training.max_steps=1000", "scheduler=constant", "tokenizer.vocab_size=300"]
TINY = ["model.vocab_size=320", "model.embed_dim=32", "model.mlp_dim=64", "model.num_layers=2", "model.num_heads=4",
        "model.num_kv_heads=2", "model.head_dim=16", "model.context_length=64", "training.seq_len=64",
        "training.micro_batch_size=2"]  # fmt: skip
TINY_OF = {"gemma3": ["model.global_every=2", "model.sliding_window=16"]}
TINY_EXPERTS = ["model.mlp.num_experts=4", "model.mlp.experts_per_token=2", "model.mlp.expert_dim=16"]


def words_of(name: str, tiny: bool) -> list[str]:
    """Return the words of the command line of a case."""
    one = ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]
    shrink = [*TINY, *TINY_OF.get(name.split("_")[0], []), *(TINY_EXPERTS if "a3b" in name else [])] if tiny else []
    words = {word.split("=")[0]: word for word in [*COMMON, *CASES[name], *shrink, *one]}  # the last of a key wins
    return sorted(words.values(), key=lambda word: not word.startswith("model="))


def predict(name: str, tiny: bool) -> dict[str, Any]:
    """Compile the train step of a case, and return the figures that the plan predicts for it."""
    import jax

    from tunix.config.compose import compose
    from tunix.costs.devices import Cluster, find_kind, read_device_kinds
    from tunix.plan.compile import compile_for

    cfg = compose(words_of(name, tiny)).config
    device = jax.devices()[0]
    figures: dict[str, Any] = {"device": device.device_kind}
    if device.platform != "gpu":  # a plan predicts GPUs
        return figures
    kind = find_kind(device.device_kind) or read_device_kinds()["h100"]
    predicted, _ = compile_for(cfg, Cluster(kind, 1, 1), [device])
    limit = (device.memory_stats() or {}).get("bytes_limit")
    figures |= {
        "predicted_gib": predicted.memory / 2**30,
        "predicted_s": predicted.step_time.step_s if predicted.step_time else None,
        "compile_s": predicted.compile_s,
    }
    if limit and predicted.memory > limit:
        figures["error"] = f"does not fit: {predicted.memory / 2**30:.0f} GiB of {limit / 2**30:.0f}"
    return figures


def step(name: str, tiny: bool, traces: str | None = None) -> dict[str, Any]:
    """Measure the train step of a case."""
    import jax

    from tunix.config.compose import compose

    return train(compose(words_of(name, tiny)).config, jax.devices()[0], 2 if tiny else STEPS, traces)


def train(cfg: Any, device: Any, num_steps: int, trace: str | None = None) -> dict[str, Any]:
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
        if trace:
            with jax.profiler.trace(trace):
                jax.block_until_ready(compiled(state, batch))
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


def rollout(name: str, tiny: bool, only_compile: bool = False) -> dict[str, Any]:
    """Draw answers from Qwen 3 0.6B with random weights, and return tokens/s beside those of a token's bytes.

    With `only_compile` they are drawn once, and the seconds of that are returned.
    """
    import jax
    import numpy as np

    from tunix.config.compose import compose
    from tunix.costs.devices import find_kind
    from tunix.costs.rollout import CacheSpec, derive_rollout_costs
    from tunix.inference.rollout import Sampler
    from tunix.inference.sampling import Sampling
    from tunix.training.choices import build_mesh
    from tunix.training.train_spec import assemble

    sizes = TINY_ROLLOUT if tiny else ROLLOUT
    rows, prompt, longest = sizes["rows"], sizes["prompt"], sizes["longest"]
    cfg = compose([*words_of("qwen3_0_6b", tiny), "training.param_dtype=bfloat16"]).config
    mesh, rng, device = build_mesh(cfg, jax.devices()[:1]), np.random.default_rng(0), jax.devices()[0]
    lengths = np.linspace(longest // 8, longest, rows).astype(int).tolist()
    prompts = rng.integers(3, cfg.model.vocab_size, (rows, prompt)).tolist()
    sampling = Sampling(longest, **ROLLOUTS[name])  # type: ignore[arg-type]
    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
        sampler = Sampler(program.arch, prompt + longest, mesh)
        weights = sampler.gather(program.new_state(0)["params"])
        shape, of_cache = (rows, rows, 1, prompt, longest), CacheSpec(sampling.cache_dtype)
        parts = derive_rollout_costs(program.arch, mesh, *shape, of_cache).num_bytes

    def draw() -> float:
        start_time = time.perf_counter()
        engine = sampler.engine(weights, sampling, 0, prompt + longest, rows)
        for number, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
            engine.admit(tokens, [number], length)
        while engine.is_busy:
            for number, _ in engine.run():
                engine.release(number)
        return time.perf_counter() - start_time

    first_s = draw()  # with the compiling of a program for each number of rows, and for twice as many slots
    if only_compile:
        return {"device": device.device_kind, "first_s": first_s}
    seconds = min(draw() for _ in range(2))
    # Each token reads the weights and the logits, and of the cache what the rows at work have.
    read = longest * (parts["gathered weights"] + parts["logits"])
    read += parts["cache"] / rows / (prompt + longest) * sum(length * (prompt + length / 2) for length in lengths)
    kind = find_kind(device.device_kind)
    return {
        "tokens_per_s": sum(lengths) / seconds,
        "least_s": read / kind.hbm_gb_per_s / 1e9 if kind else None,
        "seconds": seconds,
        "device": device.device_kind,
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

    def __init__(self, tiny: bool, cache: str, limit_s: float = LIMIT_S):
        self.tiny, self.cache, self.end_time = tiny, cache, time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self.end_time - time.monotonic()

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
        workers = 1 if self.tiny else max(1, (os.cpu_count() or 2) // 3)
        end = time.monotonic() + PREPARE_S

        def compile_case(name: str) -> dict:
            return self.own("compile", name, limit_s=end - time.monotonic(), shared=True)

        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(names, pool.map(compile_case, names), strict=True))


def number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def measure(tiny: bool, names: list[str], python: str | None, traces: str | None, limit_s: float) -> str:
    """Run all parts and return the table."""
    with tempfile.TemporaryDirectory() as cache:
        parts = Parts(tiny, cache, limit_s)

        def say(line: str) -> None:
            print(f"{limit_s - parts.left_s:5.0f} s  {line}", flush=True)

        say(f"compiling {', '.join(names)}")
        prepared = parts.prepare([*names, *ROLLOUTS])
        say("kernel")
        compared = parts.own("kernel")
        steps, peers, rollouts = {}, {}, {}
        for name in names:
            say(f"step of {name}")
            ready, kept = prepared[name], ["--traces", f"{traces}/{name}"] if traces else []
            if "does not fit" not in ready.get("error", ""):
                ready.pop("error", None)  # it was not compiled in time; it may be now
                ready |= parts.own("step", name, *kept)
            steps[name] = ready
        for name in ROLLOUTS:
            say(f"rollout with {name}")
            rollouts[name] = parts.own("rollout", name)
        for name in PEERS if python else ():
            say(f"transformers: {name}")
            question = peer_question(name, tiny)
            command = [str(python), str(ROOT / "benchmarks" / "trained_by_transformers.py")]
            peers[name] = parts.ask(command, PART_S, question)
        device = next((each["device"] for each in [*steps.values(), *prepared.values()] if "device" in each), "unknown")
        lines = [f"\n{device}, {limit_s - parts.left_s:.0f} s in all", "", *_kernels(compared)]
        return "\n".join([*lines, "", *_steps(steps, peers), "", *_rollouts(rollouts)])


def _kernels(compared: dict) -> list[str]:
    rows = ["| forward and backward | kernel | ms | plain, ms | times as fast | largest difference |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    if "error" in compared:
        return [*rows, f"| {compared['error']} | | | | | |"]
    speeds = f"{compared['product_tflops']:.0f} TFLOP/s of a product, {compared['copy_gb_per_s']:,.0f} GB/s of a copy"
    rows = [speeds, "", *rows]
    for row in compared["rows"]:
        if "error" in row:
            rows.append(f"| {row['shape']} | {row['error']} | | | | |")
            continue
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


def _rollouts(rollouts: dict[str, dict]) -> list[str]:
    sizes = "{rows} rows, prompts of {prompt}, answers of up to {longest} tokens".format_map(ROLLOUT)
    rows = [f"| {sizes} | tokens/s | seconds | seconds of the bytes read |", "|---|---|---|---|"]
    for name, row in rollouts.items():
        of_row = row.get("error") or number(row["tokens_per_s"], ",.0f")
        rows.append(f"| {name} | {of_row} | {number(row.get('seconds'))} | {number(row.get('least_s'))} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "part", nargs="?", choices=["kernel", "step", "compile", "rollout"], help="one part, in this process"
    )
    parser.add_argument("case", nargs="?", choices=[*CASES, *ROLLOUTS])
    parser.add_argument("--traces", metavar="FOLDER", help="keep a profile of one step of each model there")
    parser.add_argument("--tiny", action="store_true", help="sizes that any device can afford")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of the whole command")
    chosen = parser.parse_args()

    # Parts import JAX, and the command itself does not: it would take the memory of the device.
    def compare_all(tiny: bool) -> dict[str, Any]:
        from benchmarks import gpu_kernels

        return gpu_kernels.compare_all(tiny)

    parts = {
        "kernel": lambda: compare_all(chosen.tiny),
        "step": lambda: step(chosen.case, chosen.tiny, traces=chosen.traces),
        "rollout": lambda: rollout(chosen.case, chosen.tiny),
        "compile": lambda: (
            rollout(chosen.case, chosen.tiny, only_compile=True)
            if chosen.case in ROLLOUTS
            else predict(chosen.case, chosen.tiny)
        ),
    }
    if chosen.part:
        print(json.dumps(parts[chosen.part]()))
    else:
        python = os.environ.get("TRANSFORMERS_PYTHON")
        print(measure(chosen.tiny, list(CASES), python, chosen.traces, chosen.limit_s))


if __name__ == "__main__":
    main()
