"""Rank every mesh of a cluster: which fit into memory, which is the fastest, and why the others are refused.

    list meshes -> derive the costs of each -> compile the most promising -> sort

Deriving takes milliseconds and is approximate; compiling takes up to a minute and is exact for memory. So all meshes
are derived, and plan.num_compiled of them are compiled.

The best one is that of a run that leaves open its mesh (plan.choose_mesh=true), its micro batch
(training.micro_batch_size=auto), or what blocks keep (training.remat=budget): `plan_run` in trainer.py.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tunix.base.errors import UserError
from tunix.base.progress import announcing
from tunix.config import Config
from tunix.config.task import Grpo, Taught
from tunix.config.training import REMAT
from tunix.costs.compiled_time import StepTime
from tunix.costs.devices import PLATFORM, Cluster, compute_peak_tflops
from tunix.costs.rollout import RolloutPlan, plan_rollout
from tunix.costs.step import Costs, check_matmul_dtype, derive, derive_costs, find_train_spec
from tunix.data.batches import BEGINNING, make_data_schedule
from tunix.plan.compile import GET_COMPILER, MAX_CPU_DEVICES, WORKERS, Compiled, compile_all, find_backend
from tunix.plan.derived_time import derive_time, resolve_exchange
from tunix.sharding.mesh import format_mesh_shape, meshes, resolve, token_shards
from tunix.training.choices import Choices, check_rollout_devices, select_rollout_sizes
from tunix.training.logprobs import MORE_ROWS, count_chunk_positions
from tunix.training.train_spec import check_on_mesh, check_shared_rows, last_step

MAX_MICRO_BATCH = 1024  # that training.micro_batch_size=auto chooses


def find_open_key(cfg: Config) -> str | None:
    """Return the key of `training` whose value is the largest that fits; None if every value is given."""
    if cfg.training.remat == "budget":
        return "remat"
    return "micro_batch_size" if cfg.training.micro_batch_size == "auto" else None


def replace_mesh(cfg: Config, sizes: dict[str, int], choice: Any = None) -> Config:
    """Return the config with this mesh and, if given, this value of its open key."""
    key, mesh_shape = find_open_key(cfg), (tuple(sizes.values()), tuple(sizes))
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"mesh_shape": mesh_shape})})
    return cfg if choice is None or key is None else cfg.with_training(**{key: choice, "remat_memory_gib": None})


def list_choices(cfg: Config, sizes: dict[str, int]) -> list[Any]:
    """Return the values that the open key of a config may take, the one of least memory first."""
    return _list_policies(cfg, sizes) if find_open_key(cfg) == "remat" else list_micro_batch_sizes(cfg, sizes)


def _list_policies(cfg: Config, sizes: dict[str, int]) -> list[str]:
    """Return the policies that training.remat=budget chooses from, the one that keeps the least first."""
    policies = list(REMAT)  # most first: of two that need the same, the one that keeps less comes first here

    def least_first(policy: str) -> tuple[int, int]:
        num_bytes = derive(replace_mesh(cfg, sizes, policy), sizes, PLATFORM).num_bytes["activations"]
        return num_bytes, -policies.index(policy)

    return sorted(policies, key=least_first)


def list_micro_batch_sizes(cfg: Config, sizes: dict[str, int]) -> list[int]:
    """Return the values that training.micro_batch_size=auto may take, smallest first.

    They are the powers of two that divide the global batch; where answers share rows, into two parts or more.

    Raises:
        UserError: there is none.
    """
    allowed, first_error = [], None
    for size in (2**power for power in range(MAX_MICRO_BATCH.bit_length())):
        try:
            check_shared_rows(cfg, cfg.with_training(micro_batch_size=size).training.batch_shape(sizes))
        except UserError as error:
            first_error = first_error or error
        else:
            allowed.append(size)
    if not allowed:
        assert first_error is not None
        raise first_error
    return allowed


def describe_choice(cfg: Config, chosen: Config) -> str:
    """Return the open key of a config with the value that `chosen` has for it."""
    key = find_open_key(cfg)
    return f"training.{key}={getattr(chosen.training, key or '')}"


GIB = 2**30
# What `training.remat=auto` takes on devices whose memory is known, where the step fits: the fastest policy, by the
# predictions of docs/performance.md.
REMAT_THAT_FITS = "dots"


@dataclass(frozen=True)
class Candidate:
    """A mesh, the costs of a step on it, and the predicted time.

    Its memory is that of the step or of a rollout, whichever is larger; its time is both, one after the other, or the
    longer one where answers are drawn on devices of their own.
    """

    sizes: dict[str, int]  # devices along each mesh axis
    cfg: Config  # with this mesh
    choices: Choices
    costs: Costs
    cluster: Cluster
    rollout: RolloutPlan | None = None  # with task=grpo
    compiled: Compiled | None = None
    note: str = ""  # the reason, if its compile failed
    stages: tuple["Candidate", ...] = ()  # the mesh with each other batch of training.batch_stages; derived

    @property
    def reference_bytes(self) -> int:
        """Bytes of a second model that stays beside the state (task.kl_coefficient); 0 without one."""
        return self.rollout.reference_bytes if self.rollout else 0

    @property
    def teacher_bytes(self) -> int:
        """Bytes of task.teacher, which stays beside the state; 0 without one."""
        return self.costs.num_bytes.get("teacher", 0)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of one device by purpose. Weights and optimizer are exact, and the total of a compiled step is too."""
        derived = self.costs.num_bytes
        state = derived["weights"] + derived["optimizer"] + (self.teacher_bytes if self._teacher_in_step else 0)
        if self.compiled is None:
            remaining = derived["gathered"] + derived["activations"]
        else:
            remaining = max(0, self.compiled.memory - state - derived["gradients"])
        others = {"reference": self.reference_bytes, "teacher": self.teacher_bytes}
        others = {name: size for name, size in others.items() if size}
        return {name: derived[name] for name in ("weights", "optimizer")} | others | {
            "gradients": derived["gradients"], "temporary": remaining,
        }  # fmt: skip

    @property
    def memory(self) -> int:
        return max(self._step_memory, self.rollout_memory, self.costs.standalone_bytes)

    @property
    def _step_memory(self) -> int:
        step = self.costs.memory
        if self.compiled:  # which knows a teacher only where the step takes it
            step = self.compiled.memory + (0 if self._teacher_in_step else self.teacher_bytes)
        # What a stage of the batch takes beyond the batch behind it is derived.
        more = max((stage.costs.memory - self.costs.memory for stage in self.stages), default=0)
        return step + max(0, more) + self.reference_bytes

    @property
    def rollout_memory(self) -> int:
        """Bytes of one device in a rollout: what rests there, and what the rollout needs beside it; 0 without one."""
        if self.rollout is None:
            return 0
        drawing = self.rollout.costs.memory + self.rollout.copy_bytes
        if self.rollout.apart is not None:  # on devices of its own
            return drawing
        if self.rollout.copy_bytes:  # beside a step
            return self._step_memory + drawing
        state = self.costs.num_bytes["weights"] + self.costs.num_bytes["optimizer"] + self.teacher_bytes
        return state + self.reference_bytes + drawing

    @property
    def _teacher_in_step(self) -> bool:
        return isinstance(self.cfg.task, Taught) and self.cfg.task.teacher_in_loss

    @property
    def rollout_s(self) -> float:
        """Seconds of rollouts for each step, if every answer is as long as it may be."""
        if self.rollout is None:
            return 0.0
        return (self.rollout.costs.predict_seconds(self.cluster.kind) + sum(self.weights_s)) / self.rollout.steps

    @property
    def weights_s(self) -> tuple[float, float]:
        """Seconds in which new weights go to devices that draw alone, and in which these gather them."""
        task = self.cfg.task
        if self.rollout is None or not isinstance(task, Grpo) or task.rollout_devices is None:
            return 0.0, 0.0
        return self.rollout.predict_weights_s(replace(self.cluster, per_node=task.rollout_devices))

    @property
    def source(self) -> str:
        """Origin of the numbers: derived, compiled, or compiled by CPU."""
        if self.compiled is None:
            return "derived"
        return "compiled" if self.compiled.step_time else "compiled by CPU"

    @cached_property
    def time(self) -> StepTime:
        """Time of a step, without rollouts: of the compiled step's schedule, or derived."""
        if self.compiled and self.compiled.step_time:
            return self.compiled.step_time
        return derive_time(self.cfg, self.sizes, self.costs, self.cluster)

    @property
    def outside_s(self) -> float:
        """Seconds of forward passes outside of the step, for each step."""
        peak = compute_peak_tflops(self.cluster.kind, self.cfg.training.matmul_dtype, self.costs.matmul_share)
        return self.costs.outside_flops / (peak * 1e12 * self.cluster.kind.efficiency)

    @property
    def tokens_per_s(self) -> float:
        draws_apart, step_s = self.rollout is not None and self.rollout.apart is not None, self.time.step_s
        seconds = max(step_s, self.rollout_s) if draws_apart else step_s + self.rollout_s
        seconds += self.outside_s
        return self.costs.tokens_per_step / seconds

    @property
    def mfu(self) -> float:
        """Share of the peak: of `training.matmul_dtype` where products have it, of bf16 elsewhere."""
        peak = compute_peak_tflops(self.cluster.kind, self.cfg.training.matmul_dtype, self.costs.matmul_share)
        return self.costs.model_flops / self.time.step_s / (peak * 1e12)

    def predict_run(self) -> tuple[int, float] | None:
        """Return the steps of a run and the seconds that they take; None where only the data tell how many they are."""
        schedule = self.cfg.training.batch_schedule(self.sizes)
        data_schedule = make_data_schedule(self.cfg, schedule, BEGINNING)
        steps = last_step(self.cfg.training, data_schedule, schedule.periods[-1].shape.num_tokens, None)
        if steps is None:
            return None
        by_shape = {each.choices.shape: each for each in (*self.stages, self)}
        counts = [(len(period.steps(1, steps)), by_shape[period.shape]) for period in schedule.periods]
        return steps, sum(count * each.costs.tokens_per_step / each.tokens_per_s for count, each in counts)


def derive_candidate(cfg: Config, sizes: dict[str, int], cluster: Cluster, limit: float) -> Candidate:
    """Derive the costs of a mesh. Where a key is open, take its largest value that fits by derived costs."""
    if find_open_key(cfg) is None:
        return make_candidate(cfg, sizes, None, cluster)
    best: Candidate | None = None
    for choice in list_choices(cfg, sizes):
        candidate = make_candidate(cfg, sizes, choice, cluster)
        # Choices come in the order of their memory. The smallest is kept even where it does not fit: a table shows it.
        if best is not None and candidate.memory > limit:
            break
        best = candidate
    assert best is not None
    return best


def make_candidate(
    cfg: Config,
    sizes: dict[str, int],
    choice: Any,
    cluster: Cluster,
    with_activations: bool = True,
    is_stage: bool = False,
) -> Candidate:
    """Derive the costs of a mesh, with this value of the key that the config leaves open.

    `training.remat=auto` becomes `REMAT_THAT_FITS` where the step then fits into a device, else the policy that needs
    the least memory. Without activations nothing says what fits, so it is the latter. Then `_enlarge_chunks`, but not
    for a stage of the batch, which has the chunks of logits of the run.
    """
    # Copies of activations to the host take longer than computing them again: the fewer there are the better.
    if cfg.training.remat == "auto":
        if with_activations and cfg.training.offload != "activations":
            fast = make_candidate(cfg.with_training(remat=REMAT_THAT_FITS), sizes, choice, cluster)
            if is_known_to_fit(fast):
                return fast
        cfg = cfg.with_training(remat="full")  # not what a CPU would take that compiles for the plan
    with_mesh, _ = resolve_exchange(replace_mesh(cfg, sizes, choice), sizes, cluster)
    train_spec = find_train_spec(with_mesh, sizes, PLATFORM)
    costs, rollout = derive_costs(train_spec, with_activations), None
    if isinstance(cfg.task, Grpo):
        train_spec = replace(train_spec, num_hosts=cluster.num_nodes)
        rollout = plan_rollout(train_spec, round(count_usable_bytes(cfg, cluster)))
    # Each other shape of the batch is a candidate of its own: a stage with longer sequences may need the most memory.
    stages = {}
    for period in train_spec.cfg.training.batch_schedule(sizes).periods[:-1]:
        with_batch = train_spec.cfg.model_copy(update={"training": period.batch})
        stages[period.shape] = make_candidate(with_batch, sizes, None, cluster, with_activations, is_stage=True)
    parts = tuple(stages.values())
    candidate = Candidate(sizes, train_spec.cfg, train_spec.choices, costs, cluster, rollout, stages=parts)
    return _enlarge_chunks(candidate) if with_activations and choice is None and not is_stage else candidate


def _enlarge_chunks(candidate: Candidate) -> Candidate:
    """Return the candidate with `MORE_ROWS` rows in a chunk of logits, if `auto` takes fewer and the step then fits."""
    cfg, shape, chunk_size = candidate.cfg, candidate.choices.batch, candidate.cfg.training.loss_chunk_size
    if chunk_size != "auto" or candidate.stages or candidate.choices.pipeline.num_stages > 1:
        return candidate
    num_rows, num_tokens = shape.sequences_per_shard, cfg.training.seq_len // token_shards(candidate.sizes)
    larger = min(MORE_ROWS // num_rows, num_tokens // 2)  # whole logits never exist
    if larger <= count_chunk_positions("auto", num_rows, num_tokens):
        return candidate
    enlarged = make_candidate(cfg.with_training(loss_chunk_size=larger), candidate.sizes, None, candidate.cluster)
    return enlarged if is_known_to_fit(enlarged) else candidate


def count_usable_bytes(cfg: Config, cluster: Cluster) -> float:
    """Return the bytes of a device that a run may use."""
    return cluster.kind.memory_gib * GIB * cfg.plan.memory_share


DERIVED_MARGIN = 1.25  # derived memory can be this many times the memory of the compiled step
KNOWN_TO_FIT = 0.9  # share of a limit that is surely enough: derived memory is seldom less of the compiled


def is_known_to_fit(candidate: Candidate) -> bool:
    """Return whether a step that is not compiled fits by its derived memory."""
    return candidate.memory <= KNOWN_TO_FIT * count_usable_bytes(candidate.cfg, candidate.cluster)


MANY = 48  # meshes that are shown: of more than these, the fastest that fit by derived costs
NUM_SMALLEST = 4  # and those that need the least memory
# Keys that make a step smaller, by the purpose that takes the most memory.
HELP = {
    "temporary": "a smaller training.micro_batch_size or training.loss_chunk_size, training.remat=full",
    "gradients": "training.sharding_strategy=full_shard with training.sync_gradients_every=1",
    "weights": "training.sharding_strategy=full_shard, more of the mesh on fsdp",
    "optimizer": "optimizer=lion or adafactor (smaller moments), training.sharding_strategy=full_shard",
    "teacher": "a smaller task.teacher, training.sharding_strategy=full_shard",
    "reference": "model.lora.rank=32, whose base is the reference, or task.kl_coefficient=0",
    "rollout": "task.rollout_rows=auto, a smaller sampling.max_new_tokens, sampling.cache_dtype=int8",
}


@dataclass(frozen=True)
class Ranking:
    """All meshes of a cluster: those that fit, those that are too large, and those that are refused."""

    fit: list[Candidate]  # fastest first, compiled ones before derived ones
    too_large: list[Candidate]  # smallest first
    refused: dict[str, str]  # the reason, keyed by mesh
    limit: float  # bytes that a device may use
    global_batch_size: int | None = None  # sequences on which the meshes are compared, where the config named none
    replaces_accumulation: bool = False  # that batch stands in the place of training.gradient_accumulation_steps
    num_slower: int = 0  # meshes that divide the model, and are left out because they are predicted to be slower
    num_hopeless: int = 0  # and those whose weights, optimizer and gradients alone are too large
    open_key: str | None = None  # key of `training` whose value each mesh chose for itself
    limit_key: str = "plan.memory_share"  # the key that sets the limit
    chooses_remat: bool = False  # each mesh chose its `training.remat`


def leave_to_learning(cfg: Config, cluster: Cluster) -> Cluster:
    """Return the cluster without the devices of task.rollout_devices.

    Raises:
        UserError: they would be all of a node's.
    """
    return replace(cluster, per_node=check_rollout_devices(cfg, cluster.per_node))


def rank(cfg: Config, cluster: Cluster, progress: Callable[[str], None] = lambda line: None) -> Ranking:
    """Rank every mesh of the cluster's devices, or the one that the config names. The best of them are compiled.

    If any is compiled, meshes are compiled until none that is only derived is predicted to be faster than the first.
    Meshes are compared on one global batch.

    `progress` is called with a line of text after each compile.
    """
    check_matmul_dtype(cfg, "gpu", cluster.kind.name)
    original, cfg = cfg, fix_batch(cfg, cluster.num_devices)
    budget_gib = cfg.training.remat_memory_gib
    limit = GIB * budget_gib if budget_gib else count_usable_bytes(cfg, cluster)
    candidates, refused, valid = list[Candidate](), {}, []
    if cfg.model.mesh_shape == "auto":
        all_sizes = list(meshes(cluster.num_devices, cfg.dims))
    else:
        all_sizes = [resolve(cfg.model.mesh_shape, cluster.num_devices, cfg.dims, False, "in plan.topology")]
    for sizes in all_sizes:
        try:
            check_on_mesh(cfg, sizes)
            if isinstance(cfg.task, Grpo) and cfg.task.rollout_devices is not None:
                select_rollout_sizes(cfg, sizes, cluster.num_nodes)
            valid.append(sizes)
        except UserError as error:
            refused[format_mesh_shape(sizes)] = str(error)
    remaining, num_slower, num_hopeless = valid, 0, 0
    if len(valid) > MANY:
        progress(f"{len(valid)} meshes divide the model")
    with announcing(f"deriving memory and time of {len(valid)} mesh{'es' if len(valid) != 1 else ''}", progress):
        if len(valid) > MANY:
            candidates, remaining, num_slower, num_hopeless = _narrow(cfg, valid, cluster, limit)
        for sizes in remaining:
            try:
                candidates.append(derive_candidate(cfg, sizes, cluster, KNOWN_TO_FIT * limit))
            except UserError as error:
                refused[format_mesh_shape(sizes)] = str(error)
    # A derived time may be too short. So the fastest are compiled, and then those that seem faster than the best one,
    # until a compiled mesh is first.
    num_compiled = cfg.plan.num_compiled
    if num_compiled and cluster.num_devices > MAX_CPU_DEVICES and find_backend() == "cpu":
        progress(
            f"nothing is compiled: XLA's CPU backend compiles for at most {MAX_CPU_DEVICES:,} devices, and JAX's CUDA "
            f"plugin is not installed: {GET_COMPILER}"
        )
        num_compiled = 0
    chosen = _pick_to_compile(candidates, num_compiled, limit)
    while chosen:
        compiled = _compile_candidates(cfg, [candidates[index] for index in chosen], cluster, limit, progress)
        for index, candidate in zip(chosen, compiled, strict=True):
            candidates[index] = candidate
        chosen = _find_faster(candidates, limit)
    fit = [each for each in candidates if each.memory <= limit]
    return Ranking(
        fit=sorted(fit, key=lambda each: (each.compiled is None, -each.tokens_per_s)),
        too_large=sorted((each for each in candidates if each.memory > limit), key=lambda each: each.memory),
        refused=refused,
        limit=limit,
        global_batch_size=cfg.training.global_batch_size if cfg is not original else None,
        replaces_accumulation=cfg is not original and original.training.gradient_accumulation_steps is not None,
        num_slower=num_slower,
        num_hopeless=num_hopeless,
        open_key=find_open_key(cfg),
        limit_key="training.remat_memory_gib" if budget_gib else "plan.memory_share",
        chooses_remat=cfg.training.remat in ("auto", "budget"),
    )


def _narrow(
    cfg: Config, valid: list[dict[str, int]], cluster: Cluster, limit: float
) -> tuple[list[Candidate], list[dict[str, int]], int, int]:
    """Return the `MANY` fastest meshes that fit, and the sizes of the smallest ones, for which nothing is derived yet;
    and how many are slower, and how many too large.

    All is derived. The time of a step does not depend on the memory of activations, so all meshes are put in the order
    of their times first, and activations are traced of one after the other until enough of them fit.
    """
    bounds = []
    for sizes in valid:
        choices: dict[str | None, Any] = {None: None, "remat": min(REMAT, key=lambda policy: len(REMAT[policy]))}
        key = find_open_key(cfg)
        try:
            least = choices[key] if key in choices else list_choices(cfg, sizes)[0]
            bounds.append(make_candidate(cfg, sizes, least, cluster, with_activations=False))
        except UserError:  # a part of the program refuses this mesh; the others are hundreds
            continue
    # Without activations memory is a lower bound: what does not fit even so is hopeless.
    may_fit = [each for each in bounds if each.memory <= limit]
    smallest = sorted(bounds, key=lambda each: each.memory)[:NUM_SMALLEST]
    chosen: list[Candidate] = []
    for each in sorted(may_fit, key=lambda each: -each.tokens_per_s):
        try:
            with_activations = derive_candidate(cfg, each.sizes, cluster, KNOWN_TO_FIT * limit)
        except UserError:  # as above
            continue
        if with_activations.memory <= DERIVED_MARGIN * limit:
            chosen.append(with_activations)
        if len(chosen) == MANY:
            break
    if not bounds:  # `rank` says why each is refused
        return [], valid, 0, 0
    remaining = [each.sizes for each in smallest if all(each.sizes != other.sizes for other in chosen)]
    num_slower = max(0, len(may_fit) - len(chosen) - len(remaining))
    return chosen, remaining, num_slower, len(bounds) - len(may_fit)


def fix_batch(cfg: Config, num_devices: int) -> Config:
    """Return the config with the global batch, in sequences, that it has where each device is a data shard.

    With a batch that depends on the mesh, meshes would be compared on different steps, and train differently. A config
    that names its mesh or its global batch, or leaves the micro batch open, is returned as it is.
    """
    training = cfg.training
    is_given = training.global_batch_size is not None or training.global_batch_tokens is not None
    if is_given or training.micro_batch_size == "auto" or cfg.model.mesh_shape != "auto":
        return cfg
    sequences = num_devices * training.sequences_per_shard * (training.gradient_accumulation_steps or 1)
    return cfg.with_training(global_batch_size=sequences, gradient_accumulation_steps=None)


def _pick_to_compile(candidates: list[Candidate], count: int, limit: float) -> list[int]:
    """Return the places of `count` candidates: the fastest that may fit, and the one that needs the least memory.

    The smallest is compiled even if it seems too large: if it fits, the model fits.
    """
    indices = sorted(range(len(candidates)), key=lambda index: -candidates[index].tokens_per_s)
    may_fit = [index for index in indices if candidates[index].memory <= DERIVED_MARGIN * limit]
    smallest = sorted(indices, key=lambda index: candidates[index].memory)[:1]
    first = max(1, count - 1)
    return list(dict.fromkeys([*may_fit[:first], *smallest, *may_fit[first:]]))[:count]


def _find_faster(candidates: list[Candidate], limit: float) -> list[int]:
    """Return the places of the next candidates to compile: those predicted faster than the fastest compiled one.

    At most as many as are compiled side by side; none where the first place is settled, or where every compile failed.
    """
    if not any(each.compiled for each in candidates):
        return []
    compiled = [each.tokens_per_s for each in candidates if each.compiled and each.memory <= limit]
    fastest = max(compiled, default=0.0)
    indices = [
        index
        for index, each in enumerate(candidates)
        if each.compiled is None and not each.note and each.memory <= limit and each.tokens_per_s > fastest
    ]
    return sorted(indices, key=lambda index: -candidates[index].tokens_per_s)[:WORKERS]


def _compile_candidates(
    cfg: Config, chosen: list[Candidate], cluster: Cluster, limit: float, progress: Callable[[str], None]
) -> list[Candidate]:
    """Compile the candidates.

    With an open key each starts at the largest value that may fit. While the compiled step is too large, it is compiled
    again with the next smaller one. All candidates of a round compile side by side.
    """
    results, key = list(chosen), find_open_key(cfg)
    if key:
        results = [derive_candidate(cfg, each.sizes, cluster, DERIVED_MARGIN * limit) for each in chosen]
    indices = list(range(len(results)))  # of the candidates that this round compiles
    while indices:
        names = ", ".join(format_mesh_shape(results[index].sizes) for index in indices)
        what = f"{len(indices)} meshes" if len(indices) > 1 else names
        compiling = compile_all([results[index].cfg for index in indices], cluster)
        too_large = {}  # the next smaller value of the open key, by index
        if what != names:
            progress(f"compiling {names}")
        with announcing(f"compiling {what}", progress):
            for index, answer in zip(indices, compiling, strict=True):
                candidate = results[index]
                if isinstance(answer, str):
                    progress(f"{format_mesh_shape(candidate.sizes)} not compiled: {answer}")
                    results[index] = replace(chosen[index], note=answer)
                    continue
                choice = f" with {describe_choice(cfg, candidate.cfg)}" if key else ""
                progress(f"{format_mesh_shape(candidate.sizes)}{choice} compiled in {answer.compile_s:.0f} s")
                results[index] = replace(candidate, compiled=answer)
                if key and results[index].memory > limit:
                    choices = list_choices(cfg, candidate.sizes)
                    if position := choices.index(getattr(candidate.cfg.training, key)):
                        too_large[index] = choices[position - 1]
        for index, smaller in too_large.items():
            results[index] = make_candidate(cfg, results[index].sizes, smaller, cluster)
        indices = list(too_large)
    return results


def describe_no_fit(ranking: Ranking, cluster: Cluster, key: str = "plan.topology") -> str:
    """Return the message for a ranking in which nothing fits: how much is missing, and what would make it fit."""
    if not ranking.too_large:
        reasons = Counter(ranking.refused.values())
        [(reason, _)] = reasons.most_common(1)
        if len(reasons) == 1:  # of the mesh that the config names, or whatever the mesh is
            return reason
        return f"no mesh of {cluster.num_devices} devices divides this model and batch: {reason}"
    best = ranking.too_large[0]
    sizes = best.num_bytes
    if best.memory == best.costs.standalone_bytes:
        sizes = {"teacher": best.memory}
    elif best.rollout is not None and best.memory == best.rollout_memory:
        resting = {name: size for name, size in sizes.items() if name not in ("gradients", "temporary")}
        sizes = resting | {"rollout": best.rollout.costs.memory + best.rollout.copy_bytes}
    largest = max(sizes, key=lambda name: sizes[name])
    over = best.memory - ranking.limit
    state = best.num_bytes["weights"] + best.num_bytes["optimizer"]
    devices = "more devices"
    if state > ranking.limit:
        least = -(-state * cluster.num_devices // max(1, round(ranking.limit)))
        devices = f"more devices ({least:,} hold weights and optimizer alone)"
    return (
        f"the model fits on no mesh of {key}: {format_mesh_shape(best.sizes)} needs {best.memory / GIB:.1f} GiB, "
        f"{over / GIB:.1f} more than the {ranking.limit / GIB:.1f} GiB that a device may use, most of it {largest}; "
        f"take {devices}, {HELP[largest]}, or raise {ranking.limit_key}"
    )
