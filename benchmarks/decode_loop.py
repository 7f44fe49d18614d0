"""Bytes that a GPU moves for a token of a rollout, beside the least: compiled for a GPU that need not be there.

    PYTHONPATH=tests python -m benchmarks.decode_loop [model=gemma3_1b] [rows=256] [slots=1024] [cache_dtype=int8]

JAX's CUDA plugin must be installed (requirements/cuda12.txt). The program is the loop of `inference.engine` (decode)
for one H100. Its bytes are counted in its compiled text as the costs of a step are: what each instruction reads and
writes, once. The least is weights and cache read once, and logits written once and read twice.
"""

import os
import re
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}

ANSWERS = 8  # to each prompt


def main(words: list[str]) -> None:
    import jax
    from support.decoding import compile_decode

    from benchmarks.arguments import read_values
    from tunix.config.compose import compose
    from tunix.costs.compiled_time import Speeds, predict_time
    from tunix.costs.devices import read_topology
    from tunix.costs.rollout import CacheSpec, derive_rollout_costs
    from tunix.inference.rollout import Sampler
    from tunix.inference.sampling import Sampling
    from tunix.plan.compile import describe_devices
    from tunix.training.choices import build_mesh
    from tunix.training.train_spec import assemble

    given = read_values(words, model="gemma3_1b", rows="256", slots="1024", cache_dtype="")
    rows, slots, cache_dtype = int(given["rows"]), int(given["slots"]), given["cache_dtype"] or None
    sampling = Sampling(slots // 2, cache_dtype=cache_dtype)
    cfg = compose([f"model={given['model']}", "tokenizer.path=x.json", "model.mesh_shape=[[1],[fsdp]]"]).config
    mesh = build_mesh(cfg, describe_devices(read_topology("h100:1")))
    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
        sampler = Sampler(program.arch, slots, mesh)
        params = program.abstract["params"]
        compiled = compile_decode(sampler, params, rows, slots, sampling)
    hlo = compiled.as_text() or ""
    # At one byte a second, and products for nothing, the time of a program is the bytes that it moves.
    counting = Speeds(float("inf"), float("inf"), float("inf"), 1.0, 1.0, 0.0, lambda collective: 0.0)
    moved = predict_time(_body_of_loop(hlo), [], counting).compute_s
    sizes = rows, rows // ANSWERS, ANSWERS, slots // 2, slots // 2
    parts = derive_rollout_costs(program.arch, mesh, *sizes, CacheSpec(cache_dtype)).num_bytes
    kept = {"weights": parts["gathered weights"], "keys and values": parts["cache"]}
    kept["logits"] = 3 * 4 * rows * cfg.model.vocab_size  # written once; read for their largest and for their weights
    least = sum(kept.values())
    each = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in kept.items())
    label = f"{given['model']}, {rows} rows, {slots} slots of {cache_dtype or 'bfloat16'}"
    temporary = compiled.memory_analysis().temp_size_in_bytes
    print(f"{label}: a token moves {moved / 1e9:.2f} GB; the least is {least / 1e9:.2f}: {each}")
    print(f"temporary memory: {temporary / 1e9:.2f} GB")


def _body_of_loop(hlo: str) -> str:
    """Return the program whose first computation is the body of the loop over tokens, the inner one of two."""
    for _ in range(2):
        entry = hlo[hlo.index("\nENTRY ") :]
        body = re.search(r" while\(.*body=%?([\w.\-]+)", entry[: entry.index("\n}")])
        assert body, "the program has no loop"
        hlo = hlo.replace("\nENTRY ", "\n")
        hlo = re.sub(rf"\n(%?{re.escape(body[1])} \()", r"\nENTRY \1", hlo)
    return hlo


if __name__ == "__main__":
    main(sys.argv[1:])
