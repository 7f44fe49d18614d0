"""The compiled loop that draws tokens, without a rollout: for tests and measurements of what it computes and moves."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from tunix.costs.rollout import MIN_PROMPT, count_pages
from tunix.inference.gathered import gather
from tunix.inference.kv_cache import make_cache, prefill
from tunix.inference.rollout import Sampler
from tunix.inference.sampling import Drawing, Extent, Sampling
from tunix.sharding.arrays import abstract_results, lay_out
from tunix.sharding.layout import activation_spec


def compile_decode(sampler: Sampler, params: Any, num_rows: int, num_slots: int, sampling: Sampling):
    """Compile the loop of `num_rows` rows over the whole mesh with `num_slots` slots; return what jax compiled.

    Pages are as many as slots would be, or `num_pages` of the sampler. It takes parameters or their shapes. The
    devices need not exist.
    """
    programs, arch, mesh = sampler.programs, sampler.arch, sampler.mesh
    shards, paged, width = programs.num_shards, programs.find_paged(sampling), count_pages(num_slots)
    num_pages = (sampler.num_pages or width * num_rows // shards) * shards

    def of_rows(dtype="int32", *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, activation_spec("BT"[: len(shape)])))

    def after_prompts(params, tokens, count):
        weights = gather(arch, params, as_matrices)
        entries = prefill(weights.module(arch), weights, tokens, count, num_slots, sampling.cache_dtype)[1]
        return weights, make_cache(entries, num_rows, windows, paged, num_pages)

    windows = tuple(arch.model.list_windows(num_slots))
    with jax.set_mesh(mesh):
        params = lay_out(params, mesh)
        as_matrices = sampler._fit_as_matrices(params)
        prompts = of_rows("int32", shards, MIN_PROMPT), of_rows("int32", shards)
        weights, cache = abstract_results(mesh, after_prompts, params, *prompts)
        fields = dict.fromkeys(Drawing._fields, of_rows("int32", num_rows)) | {"working": of_rows("bool", num_rows)}
        rows = Drawing(**fields | {"table": of_rows("int32", num_rows, width) if any(paged) else None})
        scalar = jax.ShapeDtypeStruct((), "int32")
        extent = Extent(scalar, scalar, jax.ShapeDtypeStruct((1,), "int32"))
        key = jax.eval_shape(lambda: jax.random.key(0))
        return programs.decode.lower(weights, cache, rows, key, extent, sampling=sampling).compile()
