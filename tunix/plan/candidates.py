"""A mesh with the costs and the predicted time of a step on it, derived or compiled."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tunix.config import Config
from tunix.config.task import Grpo
from tunix.costs.derived import Costs, derive_costs
from tunix.costs.devices import compute_peak_tflops
from tunix.costs.program_cache import find_program
from tunix.costs.rollout_memory import RolloutPlan, plan_rollout
from tunix.costs.schedule import StepTime
from tunix.models.expert_exchanges import choose_expert_exchange
from tunix.plan.compiled import Compiled
from tunix.plan.derived_time import derive_time
from tunix.plan.exchange_times import settle_exchange
from tunix.plan.open_keys import find_open_key, list_choices, replace_mesh
from tunix.plan.topology import PLATFORM, Cluster
from tunix.training.mesh_choices import set_remat

GIB = 2**30
# What `training.remat=auto` takes on devices whose memory is known, where the step fits: the fastest policy, by the
# predictions of docs/performance.md. Derived memory is more than compiled (docs/plan.md), so what fits by it fits.
REMAT_THAT_FITS = "dots"


@dataclass(frozen=True)
class Candidate:
    """A mesh, the costs of a step on it, and the predicted time.

    Its memory is that of the step or of a rollout, whichever is larger; its time is both, one after the other.
    """

    sizes: dict[str, int]  # devices along each mesh axis
    cfg: Config  # with this mesh
    costs: Costs
    cluster: Cluster
    rollout: RolloutPlan | None = None  # with task=grpo
    compiled: Compiled | None = None
    note: str = ""  # the reason, if its compile failed
    stages: tuple["Candidate", ...] = ()  # the mesh with each other batch of training.batch_stages; derived

    @property
    def expert_exchange(self) -> str:
        """Exchange of experts on this mesh: a key of `EXPERT_EXCHANGES`."""
        return choose_expert_exchange(self.cfg.model, self.sizes, PLATFORM).name

    @property
    def reference_bytes(self) -> int:
        """Bytes of a second model that stays beside the state (task.kl_coefficient); 0 without one."""
        return self.rollout.reference_bytes if self.rollout else 0

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of one device by purpose. Weights and optimizer are exact, and the total of a compiled step is too."""
        derived = self.costs.num_bytes
        state = derived["weights"] + derived["optimizer"]
        if self.compiled is None:
            rest = derived["gathered"] + derived["activations"]
        else:
            rest = max(0, self.compiled.memory - state - derived["gradients"])
        reference = {"reference": self.reference_bytes} if self.reference_bytes else {}
        return {name: derived[name] for name in ("weights", "optimizer")} | reference | {
            "gradients": derived["gradients"], "temporary": rest,
        }  # fmt: skip

    @property
    def memory(self) -> int:
        step = self.compiled.memory if self.compiled else self.costs.memory
        # What a stage of the batch takes beyond the batch behind it is derived.
        more = max((stage.costs.memory - self.costs.memory for stage in self.stages), default=0)
        return max(step + max(0, more) + self.reference_bytes, self.rollout_memory)

    @property
    def rollout_memory(self) -> int:
        """Bytes of one device in a rollout: what rests there, and what the rollout needs beside it; 0 without one."""
        if self.rollout is None:
            return 0
        state = self.costs.num_bytes["weights"] + self.costs.num_bytes["optimizer"]
        return state + self.reference_bytes + self.rollout.costs.memory

    @property
    def rollout_s(self) -> float:
        """Seconds of rollouts for each step, if every answer is as long as it may be."""
        if self.rollout is None:
            return 0.0
        return self.rollout.waves * self.rollout.costs.predict_seconds(self.cluster.kind) / self.rollout.steps

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
    def tokens_per_s(self) -> float:
        return self.costs.tokens_per_step / (self.time.step_s + self.rollout_s)

    @property
    def mfu(self) -> float:
        """Share of the peak: of `training.matmul_dtype` where products have it, of bf16 elsewhere."""
        peak = compute_peak_tflops(self.cluster.kind, self.cfg.training.matmul_dtype, self.costs.matmul_share)
        return self.costs.model_flops / self.time.step_s / (peak * 1e12)


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
    cfg: Config, sizes: dict[str, int], choice: Any, cluster: Cluster, with_activations: bool = True
) -> Candidate:
    """Derive the costs of a mesh, with this value of the key that the config leaves open.

    `training.remat=auto` becomes `REMAT_THAT_FITS` where the step then fits into a device, else the policy that needs
    the least memory. Without activations nothing says what fits, so it is the latter.
    """
    # Copies of activations to the host take longer than computing them again: the fewer there are the better.
    if cfg.training.remat == "auto" and with_activations and cfg.training.offload != "activations":
        fast = make_candidate(set_remat(cfg, REMAT_THAT_FITS), sizes, choice, cluster)
        if fast.memory <= count_usable_bytes(cfg, cluster):
            return fast
    with_mesh, _ = settle_exchange(replace_mesh(cfg, sizes, choice), sizes, cluster)
    program = find_program(with_mesh, sizes, PLATFORM)
    costs, rollout = derive_costs(program, with_activations), None
    if isinstance(cfg.task, Grpo):
        rollout = plan_rollout(program, round(count_usable_bytes(cfg, cluster)))
    # Each other shape of the batch is a candidate of its own: a stage with longer sequences may need the most memory.
    stages = {}
    for period in program.cfg.training.batch_schedule(sizes).periods[:-1]:
        with_batch = program.cfg.model_copy(update={"training": period.training})
        stages[period.shape] = make_candidate(with_batch, sizes, None, cluster, with_activations)
    return Candidate(sizes, program.cfg, costs, cluster, rollout, stages=tuple(stages.values()))


def count_usable_bytes(cfg: Config, cluster: Cluster) -> float:
    """Return the bytes of a device that a run may use."""
    return cluster.kind.memory_gib * GIB * cfg.plan.memory_share


def list_smaller(cfg: Config, candidate: Candidate) -> list[Any]:
    """Return the values of the open key below the candidate's, smallest first; none if the config gives all values."""
    key = find_open_key(cfg)
    if key is None:
        return []
    choices = list_choices(cfg, candidate.sizes)
    return choices[: choices.index(getattr(candidate.cfg.training, key))]
