"""Every mesh of a cluster: what fits, which is fastest, and why not the others."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.config import Config
from tunix.costs.derived import Costs, derive
from tunix.costs.transfers import seconds
from tunix.plan.compiled import Compiled, compile_all
from tunix.plan.topology import Cluster
from tunix.sharding.mesh_shape import check_divides, format_mesh_shape, meshes, resolve

GIB = 2**30
PRODUCTS_SHARE = 0.8  # of a step's arithmetic that matrix products take, where nothing is compiled
DERIVED_MARGIN = 1.5  # derived memory is up to so much more than that of the compiled step
LARGEST_MICRO_BATCH = 1024
HELP = {  # what would make a step fit, by what takes most
    "temporary": "a smaller training.micro_batch_size or training.loss_chunk_size, training.remat=full",
    "gradients": "training.sharding_strategy=full_shard with training.sync_gradients_every=1",
    "weights": "training.sharding_strategy=full_shard, more of the mesh on fsdp",
    "optimizer": "optimizer=lion or adafactor (smaller moments), training.sharding_strategy=full_shard",
}


@dataclass(frozen=True)
class Candidate:
    """A mesh, what a step on it costs, and the time that this is predicted to take."""

    sizes: dict[str, int]
    cfg: Config  # with this mesh
    costs: Costs
    cluster: Cluster
    compiled: Compiled | None = None
    note: str = ""  # why it is not compiled, where that was tried

    @property
    def num_bytes(self) -> dict[str, int]:
        """Of one device, by purpose. Weights and optimizer are exact; once compiled, so is the total."""
        held = self.costs.num_bytes
        state = held["weights"] + held["optimizer"]
        if self.compiled is None:
            rest = held["gathered"] + held["activations"]
        else:
            rest = max(0, self.compiled.memory - state - held["gradients"])
        return {**{name: held[name] for name in ("weights", "optimizer", "gradients")}, "temporary": rest}

    @property
    def memory(self) -> int:
        return self.compiled.memory if self.compiled else self.costs.memory

    @property
    def source(self) -> str:
        """Where its numbers are from."""
        if self.compiled is None:
            return "derived"
        return "compiled" if self.compiled.timeline else "compiled by CPU"

    @property
    def compute_s(self) -> float:
        if self.compiled and self.compiled.timeline:
            return self.compiled.timeline.compute_s
        kind, held = self.cluster.kind, self.costs.num_bytes
        update = 2 * (held["weights"] + held["optimizer"]) / (kind.hbm_gb_per_s * 1e9)
        return self.costs.flops / (kind.peak_tflops * 1e12 * kind.efficiency * PRODUCTS_SHARE) + update

    @property
    def communication_s(self) -> float:
        """Of all collectives, hidden behind arithmetic or not."""
        if self.compiled and self.compiled.timeline:
            return self.compiled.timeline.communication_s
        return self._derived_s(overlaps=True) + self._derived_s(overlaps=False)

    @property
    def exposed_s(self) -> float:
        """Seconds that arithmetic waits: by the schedule, or for what cannot overlap and the excess of what can."""
        if self.compiled and self.compiled.timeline:
            return self.compiled.timeline.exposed_s
        return max(0.0, self._derived_s(overlaps=True) - self.compute_s) + self._derived_s(overlaps=False)

    def _derived_s(self, *, overlaps: bool) -> float:
        chosen = [transfer for transfer in self.costs.transfers if transfer.overlaps == overlaps]
        return sum(seconds(each, self.sizes, self.cluster.kind, self.cluster.per_node) for each in chosen)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        return self.costs.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        return self.costs.model_flops / self.step_s / (self.cluster.kind.peak_tflops * 1e12)

    @property
    def flops(self) -> float:
        """Of one device in one step, with what is computed again."""
        return self.compiled.timeline.flops if self.compiled and self.compiled.timeline else self.costs.flops


@dataclass(frozen=True)
class Ranking:
    """All meshes of a cluster: those that fit, best first, and why not the others."""

    fit: list[Candidate]  # compiled ones before derived ones
    too_large: list[Candidate]  # nearest first
    refused: dict[str, str]  # reason by mesh
    limit: float  # bytes that a device may use


def rank(cfg: Config, cluster: Cluster, progress: Callable[[str], None] = lambda line: None) -> Ranking:
    """Every mesh of the cluster's devices, or the one that the config names; the best of them are compiled."""
    limit = cluster.kind.memory_gib * GIB * cfg.plan.memory_share
    candidates, refused = [], {}
    for sizes in _asked(cfg, cluster):
        try:
            check_divides(cfg.dims, sizes)
            candidates.append(_derived(cfg, sizes, cluster, limit))
        except UserError as error:
            refused[format_mesh_shape(sizes)] = str(error)
    chosen = _to_compile(candidates, cfg.plan.num_compiled, limit)
    for place, candidate in _compiled(cfg, [candidates[place] for place in chosen], cluster, limit, progress):
        candidates[chosen[place]] = candidate
    fit = [each for each in candidates if each.memory <= limit]
    return Ranking(
        sorted(fit, key=lambda each: (each.compiled is None, -each.tokens_per_s)),
        sorted((each for each in candidates if each.memory > limit), key=lambda each: each.memory),
        refused,
        limit,
    )


def _asked(cfg: Config, cluster: Cluster) -> list[dict[str, int]]:
    if cfg.model.mesh_shape == "auto":
        return list(meshes(cluster.num_devices))
    return [resolve(cfg.model.mesh_shape, cluster.num_devices, cfg.dims, False, "in plan.topology")]


def on_mesh(cfg: Config, sizes: dict[str, int], micro_batch_size: int | None = None) -> Config:
    """The config with this mesh and, if given, this micro batch."""
    values: dict[str, Any] = cfg.model_dump(mode="json", by_alias=True)
    values["model"]["mesh_shape"] = [list(sizes.values()), list(sizes)]
    if micro_batch_size is not None:
        values["training"]["micro_batch_size"] = micro_batch_size
    values["launcher"] = {"name": "local"}
    return compose.build(values)


def _derived(cfg: Config, sizes: dict[str, int], cluster: Cluster, limit: float) -> Candidate:
    """With training.micro_batch_size=auto, the largest that fits by derived costs."""
    if cfg.training.micro_batch_size != "auto":
        ours = on_mesh(cfg, sizes)
        return Candidate(sizes, ours, derive(ours, sizes), cluster)
    best: Candidate | None = None
    for size in micro_batch_sizes(cfg, sizes):
        ours = on_mesh(cfg, sizes, size)
        candidate = Candidate(sizes, ours, derive(ours, sizes), cluster)
        if best is not None and candidate.memory > limit:
            break
        best = candidate
    assert best is not None
    return best


def micro_batch_sizes(cfg: Config, sizes: dict[str, int]) -> list[int]:
    """Those that training.micro_batch_size=auto may take, ascending: powers of two that divide the global batch."""
    found, mistake = [], None
    for size in (2**power for power in range(LARGEST_MICRO_BATCH.bit_length())):
        training = cfg.training.model_copy(update={"micro_batch_size": size})
        try:
            training.batch_shape(sizes)
        except UserError as error:
            mistake = mistake or error
        else:
            found.append(size)
    if not found:
        assert mistake is not None
        raise mistake
    return found


def _to_compile(candidates: list[Candidate], count: int, limit: float) -> list[int]:
    """Places of the fastest candidates that may fit, and of the one that needs least memory."""
    places = sorted(range(len(candidates)), key=lambda place: -candidates[place].tokens_per_s)
    may_fit = [place for place in places if candidates[place].memory <= DERIVED_MARGIN * limit]
    smallest = sorted(places, key=lambda place: candidates[place].memory)[:1]
    first = max(1, count - 1)
    return list(dict.fromkeys([*may_fit[:first], *smallest, *may_fit[first:]]))[:count]


def _compiled(
    cfg: Config, chosen: list[Candidate], cluster: Cluster, limit: float, progress: Callable[[str], None]
) -> Iterator[tuple[int, Candidate]]:
    """The candidates as they compile. An automatic micro batch begins at the largest that may fit, and shrinks."""
    waiting = dict(enumerate(chosen))
    if cfg.training.micro_batch_size == "auto":
        waiting = {n: _derived(cfg, each.sizes, cluster, DERIVED_MARGIN * limit) for n, each in waiting.items()}
    while waiting:
        answers, again = compile_all([each.cfg for each in waiting.values()], cluster), {}
        for (place, candidate), answer in zip(waiting.items(), answers, strict=True):
            if isinstance(answer, str):
                progress(f"{format_mesh_shape(candidate.sizes)} not compiled: {answer}")
                yield place, replace(candidate, note=answer)
                continue
            progress(f"{format_mesh_shape(candidate.sizes)} compiled in {answer.compile_s:.0f} s")
            candidate = replace(candidate, compiled=answer)
            yield place, candidate
            smaller = _smaller(cfg, candidate)
            if candidate.memory > limit and smaller:
                ours = on_mesh(cfg, candidate.sizes, smaller[-1])
                again[place] = Candidate(candidate.sizes, ours, derive(ours, candidate.sizes), cluster)
        waiting = again


def _smaller(cfg: Config, candidate: Candidate) -> list[int]:
    if cfg.training.micro_batch_size != "auto":
        return []
    now = candidate.cfg.training.sequences_per_shard
    return [size for size in micro_batch_sizes(cfg, candidate.sizes) if size < now]


def nothing_fits(ranking: Ranking, cluster: Cluster, where: str = "plan.topology") -> str:
    """By how much, and what would make it fit."""
    if not ranking.too_large:
        [(reason, _)] = Counter(ranking.refused.values()).most_common(1)
        return f"no mesh of {cluster.num_devices} devices divides this model and batch: {reason}"
    best = ranking.too_large[0]
    largest = max(best.num_bytes, key=lambda name: best.num_bytes[name])
    over = best.memory - ranking.limit
    state = best.num_bytes["weights"] + best.num_bytes["optimizer"]
    devices = "more devices"
    if state > ranking.limit:
        least = -(-state * cluster.num_devices // round(ranking.limit))
        devices = f"more devices ({least:,} hold weights and optimizer alone)"
    return (
        f"the model fits on no mesh of {where}: {format_mesh_shape(best.sizes)} needs {best.memory / GIB:.1f} GiB, "
        f"{over / GIB:.1f} more than the {ranking.limit / GIB:.1f} GiB that a device may use, most of it {largest}; "
        f"take {devices}, {HELP[largest]}, or raise plan.memory_share"
    )
