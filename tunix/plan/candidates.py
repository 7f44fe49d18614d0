"""A mesh with the costs and the predicted time of a step on it, derived or compiled."""

from dataclasses import dataclass
from typing import Any

from tunix.config import Config
from tunix.config.task import Grpo
from tunix.costs.derived import Costs, derive_costs
from tunix.costs.devices import compute_peak_tflops
from tunix.costs.program_cache import find_program
from tunix.costs.rollout_memory import RolloutPlan, plan_rollout
from tunix.costs.transfers import predict_seconds
from tunix.models.expert_exchanges import choose_expert_exchange
from tunix.plan.compiled import Compiled
from tunix.plan.exchange_times import predict_beyond_mean_s, settle_exchange
from tunix.plan.open_keys import find_open_key, list_choices, replace_mesh
from tunix.plan.topology import PLATFORM, Cluster
from tunix.training.mesh_choices import set_remat

GIB = 2**30
# What `training.remat=auto` takes on devices whose memory is known, where the step fits: the fastest policy, by the
# predictions of docs/performance.md. Derived memory is more than compiled (docs/plan.md), so what fits by it fits.
REMAT_THAT_FITS = "dots"
PRODUCTS_SHARE = 0.8  # share of a step's arithmetic time that matrix products take, if the step is not compiled


@dataclass(frozen=True)
class Candidate:
    """A mesh, the costs of a step on it, and the predicted time."""

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

    @property
    def compute_s(self) -> float:
        if self.compiled and self.compiled.step_time:
            return self.compiled.step_time.compute_s
        kind, num_bytes = self.cluster.kind, self.costs.num_bytes
        # The optimizer's update reads and writes all of the state once; its arithmetic is small beside that.
        update_s = 2 * (num_bytes["weights"] + num_bytes["optimizer"]) / (kind.hbm_gb_per_s * 1e9)
        bf16 = kind.peak_tflops * 1e12 * kind.efficiency
        products_s = self.costs.flops / (self._peak_tflops * 1e12 * kind.efficiency)
        # What is no product takes as long beside products of 8-bit floats as beside others.
        others_s = self.costs.flops / bf16 * (1 / PRODUCTS_SHARE - 1)
        beyond_mean_s = predict_beyond_mean_s(self.cfg, self.sizes, self.cluster, bf16 * PRODUCTS_SHARE)
        return products_s + others_s + update_s + beyond_mean_s

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives, hidden behind arithmetic or not."""
        if self.compiled and self.compiled.step_time:
            return self.compiled.step_time.communication_s
        return self._derived_s(overlaps=True) + self._derived_s(overlaps=False)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication for which arithmetic waits.

        The compiled step's schedule shows them. Derived, they are all communication that cannot overlap arithmetic,
        and the part of the rest that takes longer than arithmetic.
        """
        if self.compiled and self.compiled.step_time:
            return self.compiled.step_time.exposed_s
        return max(0.0, self._derived_s(overlaps=True) - self.compute_s) + self._derived_s(overlaps=False)

    def _derived_s(self, *, overlaps: bool) -> float:
        chosen = [transfer for transfer in self.costs.transfers if transfer.overlaps == overlaps]
        return sum(predict_seconds(each, self.sizes, self.cluster.kind, self.cluster.per_node) for each in chosen)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        return self.costs.tokens_per_step / (self.step_s + self.rollout_s)

    @property
    def _peak_tflops(self) -> float:
        return compute_peak_tflops(self.cluster.kind, self.cfg.training.matmul_dtype, self.costs.matmul_share)

    @property
    def mfu(self) -> float:
        """Share of the peak: of `training.matmul_dtype` where products have it, of bf16 elsewhere."""
        return self.costs.model_flops / self.step_s / (self._peak_tflops * 1e12)

    @property
    def flops(self) -> float:
        """FLOPs of one device in one step, including those that rematerialisation computes twice."""
        return self.compiled.step_time.flops if self.compiled and self.compiled.step_time else self.costs.flops


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
