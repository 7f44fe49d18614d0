"""Compile the loop that draws answers for one H100 that is not there: `python compile_rollout.py WORD...`.

There are 64 rows of 4,096 slots, or of as many tokens in pages (sampling.cache). Prints as JSON the bytes of the cache as derived, those of the arguments that the program
writes in place, and what it holds beside its arguments (`temporary`).
"""

import json
import re
import sys

import jax
from support.decoding import compile_decode

from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.costs.rollout import CacheSpec, count_pages, derive_rollout_costs
from tunix.inference.rollout import Sampler
from tunix.inference.sampling import Sampling
from tunix.plan.compile import describe_devices
from tunix.training.choices import build_mesh
from tunix.training.train_spec import assemble

ROWS, SLOTS = 64, 4096


def main(words: list[str]) -> None:
    cfg = compose(["tokenizer.path=x.json", "model.mesh_shape=[[1],[fsdp]]", *words]).config
    mesh = build_mesh(cfg, describe_devices(read_topology("h100:1")))
    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
        keys = {"cache": cfg.sampling.cache, "cache_dtype": cfg.sampling.cache_dtype}
        sampler, sampling = Sampler(program.arch, SLOTS, mesh), Sampling(SLOTS // 2, **keys)
        compiled = compile_decode(sampler, program.abstract["params"], ROWS, SLOTS, sampling)
        has_pages, num_pages = any(sampler.programs.find_paged(sampling)), ROWS * count_pages(SLOTS)
        sizes = ROWS, ROWS // 8, 8, SLOTS // 2, SLOTS // 2
        cache = CacheSpec(cfg.sampling.cache_dtype, False, has_pages, num_pages)
        costs = derive_rollout_costs(program.arch, mesh, *sizes, cache)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    found = {"cache": costs.num_bytes["cache"], "in_place": memory.alias_size_in_bytes}
    kernels = len(re.findall(r'custom_call_target="__gpu\$xla.gpu.triton"', text))
    print(json.dumps({**found, "temporary": memory.temp_size_in_bytes, "kernels": kernels}))


if __name__ == "__main__":
    main(sys.argv[1:])
