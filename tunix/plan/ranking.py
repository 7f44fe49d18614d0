"""Rank every mesh of a cluster: which fit into memory, which is the fastest, and why the others are refused.

    list meshes -> derive the costs of each -> compile the most promising -> sort

Deriving takes milliseconds and is approximate; compiling takes up to a minute and is exact for memory. So all meshes
are derived, and plan.num_compiled of them are compiled.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.training import REMAT
from tunix.costs.matmul_dtypes import check_matmul_dtype
from tunix.plan.candidates import GIB, Candidate, count_usable_bytes, derive_candidate, list_smaller, make_candidate
from tunix.plan.compile_process import WORKERS, compile_all
from tunix.plan.open_keys import describe_choice, find_open_key, list_choices
from tunix.plan.topology import Cluster
from tunix.sharding.mesh_shape import format_mesh_shape, meshes, resolve
from tunix.training.program_checks import check_on_mesh

DERIVED_MARGIN = 1.5  # derived memory can be this many times the memory of the compiled step
MANY = 48  # meshes that are shown: of more than these, the fastest that fit by derived costs
SMALLEST = 4  # and those that need the least memory
# Keys that make a step smaller, by the purpose that takes the most memory.
HELP = {
    "temporary": "a smaller training.micro_batch_size or training.loss_chunk_size, training.remat=full",
    "gradients": "training.sharding_strategy=full_shard with training.sync_gradients_every=1",
    "weights": "training.sharding_strategy=full_shard, more of the mesh on fsdp",
    "optimizer": "optimizer=lion or adafactor (smaller moments), training.sharding_strategy=full_shard",
    "reference": "model.lora.rank=32, whose base is the reference, or task.kl_coefficient=0",
}


@dataclass(frozen=True)
class Ranking:
    """All meshes of a cluster: those that fit, those that are too large, and those that are refused."""

    fit: list[Candidate]  # fastest first, compiled ones before derived ones
    too_large: list[Candidate]  # smallest first
    refused: dict[str, str]  # the reason, keyed by mesh
    limit: float  # bytes that a device may use
    global_batch_size: int | None = None  # sequences on which the meshes are compared, where the config named none
    num_slower: int = 0  # meshes that divide the model, and are left out because they are predicted to be slower
    num_hopeless: int = 0  # and those whose weights, optimizer and gradients alone are too large
    open_key: str | None = None  # key of `training` whose value each mesh chose for itself
    limit_key: str = "plan.memory_share"  # the key that sets the limit
    chooses_remat: bool = False  # each mesh chose its `training.remat`


def rank(cfg: Config, cluster: Cluster, progress: Callable[[str], None] = lambda line: None) -> Ranking:
    """Rank every mesh of the cluster's devices, or the one that the config names. The best of them are compiled.

    If any is compiled, meshes are compiled until none that is only derived is predicted to be faster than the first.
    Meshes are compared on one global batch.

    `progress` is called with a line of text after each compile.
    """
    check_matmul_dtype(cfg, "gpu", cluster.kind.name)
    given, cfg = cfg, fix_batch(cfg, cluster.num_devices)
    budget_gib = cfg.training.remat_memory_gib
    limit = GIB * budget_gib if budget_gib else count_usable_bytes(cfg, cluster)
    candidates: list[Candidate] = []
    refused = {}
    legal = []
    for sizes in _list_meshes(cfg, cluster):
        try:
            check_on_mesh(cfg, sizes)
            legal.append(sizes)
        except UserError as error:
            refused[format_mesh_shape(sizes)] = str(error)
    promising, num_slower, num_hopeless = legal, 0, 0
    if len(legal) > MANY:
        progress(f"{len(legal)} meshes divide the model")
        promising, num_slower, num_hopeless = _narrow(cfg, legal, cluster, limit)
    for sizes in promising:
        try:
            candidates.append(derive_candidate(cfg, sizes, cluster, limit))
        except UserError as error:
            refused[format_mesh_shape(sizes)] = str(error)
    # A derived time may be too short. So the fastest are compiled, and then those that seem faster than the best one,
    # until a compiled mesh is first.
    chosen = _pick_to_compile(candidates, cfg.plan.num_compiled, limit)
    while chosen:
        compiled = _compile_candidates(cfg, [candidates[place] for place in chosen], cluster, limit, progress)
        for place, candidate in zip(chosen, compiled, strict=True):
            candidates[place] = candidate
        chosen = _find_faster(candidates, limit)
    fit = [each for each in candidates if each.memory <= limit]
    return Ranking(
        fit=sorted(fit, key=lambda each: (each.compiled is None, -each.tokens_per_s)),
        too_large=sorted((each for each in candidates if each.memory > limit), key=lambda each: each.memory),
        refused=refused,
        limit=limit,
        global_batch_size=cfg.training.global_batch_size if cfg is not given else None,
        num_slower=num_slower,
        num_hopeless=num_hopeless,
        open_key=find_open_key(cfg),
        limit_key="training.remat_memory_gib" if budget_gib else "plan.memory_share",
        chooses_remat=cfg.training.remat in ("auto", "budget"),
    )


def _narrow(
    cfg: Config, legal: list[dict[str, int]], cluster: Cluster, limit: float
) -> tuple[list[dict[str, int]], int, int]:
    """Return the `MANY` fastest meshes that fit and the smallest ones, and how many are slower, and how many too large.

    All is derived. The time of a step does not depend on the memory of activations, so all meshes are put in the order
    of their times first, and activations are traced of one after the other until enough of them fit.
    """
    bounds = []
    for sizes in legal:
        choices: dict[str | None, Any] = {None: None, "remat": min(REMAT, key=lambda policy: len(REMAT[policy]))}
        key = find_open_key(cfg)
        least = choices[key] if key in choices else list_choices(cfg, sizes)[0]
        try:
            bounds.append(make_candidate(cfg, sizes, least, cluster, with_activations=False))
        except UserError:  # a part of the program refuses this mesh; the others are hundreds
            continue
    # Without activations memory is a lower bound: what does not fit even so is hopeless.
    may_fit = [each for each in bounds if each.memory <= limit]
    smallest = sorted(bounds, key=lambda each: each.memory)[:SMALLEST]
    chosen: list[dict[str, int]] = []
    for each in sorted(may_fit, key=lambda each: -each.tokens_per_s):
        with_activations = derive_candidate(cfg, each.sizes, cluster, limit)
        if with_activations.memory <= DERIVED_MARGIN * limit:
            chosen.append(each.sizes)
        if len(chosen) == MANY:
            break
    chosen += [each.sizes for each in smallest if each.sizes not in chosen]
    num_hopeless = len(bounds) - len(may_fit)
    return chosen, max(0, len(may_fit) - len(chosen)), num_hopeless


def fix_batch(cfg: Config, num_devices: int) -> Config:
    """Return the config with the global batch, in sequences, that it has where each device is a data shard.

    With a batch that depends on the mesh, meshes would be compared on different steps, and train differently. A config
    that names its mesh or its global batch, or leaves the micro batch open, is returned as it is.
    """
    training = cfg.training
    is_given = training.global_batch_size is not None or training.global_batch_tokens is not None
    if is_given or training.micro_batch_size == "auto" or cfg.model.mesh_shape != "auto":
        return cfg
    sequences = num_devices * training.micro_batch_size * (training.gradient_accumulation_steps or 1)
    fixed = training.model_copy(update={"global_batch_size": sequences, "gradient_accumulation_steps": None})
    return cfg.model_copy(update={"training": fixed})


def _list_meshes(cfg: Config, cluster: Cluster) -> list[dict[str, int]]:
    if cfg.model.mesh_shape == "auto":
        return list(meshes(cluster.num_devices))
    return [resolve(cfg.model.mesh_shape, cluster.num_devices, cfg.dims, False, "in plan.topology")]


def _pick_to_compile(candidates: list[Candidate], count: int, limit: float) -> list[int]:
    """Return the places of `count` candidates: the fastest that may fit, and the one that needs the least memory.

    The smallest is compiled even if it seems too large: if it fits, the model fits.
    """
    places = sorted(range(len(candidates)), key=lambda place: -candidates[place].tokens_per_s)
    may_fit = [place for place in places if candidates[place].memory <= DERIVED_MARGIN * limit]
    smallest = sorted(places, key=lambda place: candidates[place].memory)[:1]
    first = max(1, count - 1)
    return list(dict.fromkeys([*may_fit[:first], *smallest, *may_fit[first:]]))[:count]


def _find_faster(candidates: list[Candidate], limit: float) -> list[int]:
    """Return the places of the next candidates to compile: those predicted faster than the fastest compiled one.

    At most as many as are compiled side by side; none where the first place is settled.
    """
    compiled = [each.tokens_per_s for each in candidates if each.compiled and each.memory <= limit]
    fastest = max(compiled, default=0.0)
    places = [
        place
        for place, each in enumerate(candidates)
        if each.compiled is None and not each.note and each.memory <= limit and each.tokens_per_s > fastest
    ]
    return sorted(places, key=lambda place: -candidates[place].tokens_per_s)[:WORKERS]


def _compile_candidates(
    cfg: Config, chosen: list[Candidate], cluster: Cluster, limit: float, progress: Callable[[str], None]
) -> list[Candidate]:
    """Compile the candidates.

    With an open key each starts at the largest value that may fit. While the compiled step is too large, it is compiled
    again with the next smaller one. All candidates of a round compile side by side.
    """
    results = list(chosen)
    if find_open_key(cfg):
        results = [derive_candidate(cfg, each.sizes, cluster, DERIVED_MARGIN * limit) for each in chosen]
    places = list(range(len(results)))  # of the candidates that this round compiles
    while places:
        answers = compile_all([results[place].cfg for place in places], cluster)
        too_large = []
        for place, answer in zip(places, answers, strict=True):
            candidate = results[place]
            if isinstance(answer, str):
                progress(f"{format_mesh_shape(candidate.sizes)} not compiled: {answer}")
                results[place] = replace(candidate, note=answer)
                continue
            choice = "" if find_open_key(cfg) is None else f" with {describe_choice(cfg, candidate.cfg)}"
            progress(f"{format_mesh_shape(candidate.sizes)}{choice} compiled in {answer.compile_s:.0f} s")
            results[place] = replace(candidate, compiled=answer)
            if results[place].memory > limit and list_smaller(cfg, candidate):
                too_large.append(place)
        for place in too_large:
            smaller = list_smaller(cfg, results[place])[-1]
            results[place] = make_candidate(cfg, results[place].sizes, smaller, cluster)
        places = too_large
    return results


def explain_no_fit(ranking: Ranking, cluster: Cluster, where: str = "plan.topology") -> str:
    """Return the message for a ranking in which nothing fits: how much is missing, and what would make it fit."""
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
        f"take {devices}, {HELP[largest]}, or raise {ranking.limit_key}"
    )
