"""The step, its batch and its precision; the length of the run."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunix.base.errors import UserError
from tunix.base.section import Count, CountOrZero, Flag, Positive, PositiveOrZero, Section, Share
from tunix.config.batch_stages import (
    BatchSchedule,
    BatchShape,
    BatchStage,
    schedule_batches,
)
from tunix.config.kernel_tables import MATMUL_DTYPES
from tunix.config.pipeline_shape import PIPELINE_SCHEDULES, PipelineShape, choose_schedule, count_parts
from tunix.config.step_ranges import Steps
from tunix.config.training_checks import check_training, find_batch_shape
from tunix.sharding.mesh_shape import num_stages, stream_shards, token_shards

Dtype = Literal["float32", "bfloat16"]

# Rematerialization: the values of a block that a policy keeps from its forward pass until its backward pass, by name.
# The backward pass computes everything else again. models/remat.py says which value has which name; a name stands for
# all names that begin with it and a dot.
REMAT = {
    "none": ("product", "attention", "norm", "residual", "exchange"),
    "dots": ("product", "attention"),
    "projections": ("product.attention", "product.mlp.down", "attention"),
    "attention": ("attention",),
    "full": (),
}
# What `training.remat=auto` takes by platform. Elsewhere it is "full", which needs the least memory, unless "dots" is
# known to fit (plan/candidates.py). A CPU computes slowly and has much memory: benchmarks/results.md has the figures.
REMAT_BY_PLATFORM = {"cpu": "dots"}


class Training(Section):
    """The step: batch, precision, sharding strategy, length of the run."""

    seq_len: Count
    """Tokens per sequence (T)."""
    micro_batch_size: Count | Literal["auto"]
    """Sequences per data shard per microbatch; auto is the largest that is predicted to fit (the keys of plan)."""
    gradient_accumulation_steps: Count | None
    """Microbatches per optimizer step (A); null derives it from a global batch, or is 1."""
    global_batch_size: Count | None
    """Sequences per optimizer step over the whole mesh; null derives it."""
    global_batch_tokens: Count | None
    """Tokens per optimizer step over the whole mesh; null derives it."""
    batch_stages: tuple[BatchStage, ...]
    """Stages with another batch before that of the run, in order:
    [{until_step:1000,global_batch_size:64,seq_len:512},{until_step:4000,global_batch_size:128}]. For a batch or
    sequences that grow: the batch of the run follows the last stage."""
    sync_gradients_every: Count | Literal["auto"]
    """Microbatches between gradient reductions within a step; divides the accumulation. The result stays, memory
    grows, traffic falls. auto is once a step where that costs no memory: where no axis splits the gradients, as on dp
    alone; else once a microbatch."""
    pipeline_microbatches: Count | Literal["auto"]
    """Parts in which the sequences of a microbatch stream through the stages of the pp axis: a multiple of the stages,
    which divides micro_batch_size x stages. More parts leave stages idle for less time; auto is one sequence of each
    shard at a time, the most there can be."""
    pipeline_schedule: Literal[("auto", *PIPELINE_SCHEDULES)]  # type: ignore[valid-type]
    """When stages of the pp axis go forward and backward: gpipe, all parts of a microbatch forward, then all backward;
    1f1b, backward through a part while others go forward, so that memory does not grow with their number, and stages
    fill once a step; interleaved, 1f1b with several chunks of layers on each stage, which fill sooner. auto is 1f1b
    where stages (times cp) divide seq_len, else gpipe."""
    pipeline_chunks: Annotated[int, Field(ge=2)]
    """pipeline_schedule=interleaved: chunks of layers that each stage has, every S-th chunk of the model; S times this
    number divides the layers. The bubble is divided by it, and the rows that stages keep are multiplied."""
    sequence_parallel: Flag | Literal["auto"]
    """Devices that share products (tp) split the tokens of the residual stream: norms, sums and dropout of own tokens,
    a reduce-scatter and an all-gather in the place of each all-reduce. auto is true where tp (times cp and pp) divides
    seq_len."""
    sharding_strategy: Literal["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"]
    """ZeRO stage 3, 2, 1 or 0 on the fsdp axis."""
    mixed_precision: Literal["bf16", "fp32"]
    """Preset of the three dtypes below where they are null."""
    param_dtype: Dtype | None
    """Master weights and optimizer state (presets: float32)."""
    compute_dtype: Dtype | None
    """Weights and activations in matrix products (bf16: bfloat16)."""
    matmul_dtype: Literal[tuple(MATMUL_DTYPES)] | None  # type: ignore[valid-type]
    """Numbers that the products of attention and MLP multiply: null, those of compute_dtype; fp8, 8-bit floats with one
    scale an array, on chips that multiply them. CPUs emulate it, slowly. Logits, embeddings, routers and experts keep
    compute_dtype."""
    reduce_dtype: Dtype | None
    """Gradients while they are summed over devices (presets: float32)."""
    max_steps: Count | None
    """Optimizer steps of the run; with several of the three limits the first reached ends it."""
    max_tokens: Count | None
    """Tokens of the run."""
    num_epochs: Positive | None
    """Passes over the training data."""
    time_limit_s: Positive | None
    """Seconds after which the run saves, stops and exits with 75, to be resumed."""
    hard_stop: Count | None
    """Step after which the run saves, stops and exits with 75. The schedule is still that of the whole run, and resume
    goes on with it."""
    skip_steps: tuple[Steps, ...]
    """Steps whose data are left out: [1200:1250,1300]. Step 1200 takes the samples that step 1251 would have taken, and
    those behind them follow. For the data of a spike, together with resume=RUN_DIR/checkpoints/STEP."""
    max_grad_norm: Positive | None
    """Gradients are scaled down to this global norm; null does not clip."""
    ema_decay: Share | Annotated[tuple[Share, ...], Field(min_length=1)] | None
    """Also keep a moving average of the parameters, of which each step keeps this share (0.999); `weights=ema` reads
    it. A list keeps several: [0.99,0.999] are read by `weights=ema_0.99` and `weights=ema_0.999`. null keeps none."""
    ema_dtype: Literal["float32", "bfloat16"]
    """dtype in which averages are kept. bfloat16 halves their memory, and does not follow steps whose part of the
    average is less than a 256th of it: it suits decays up to 0.99."""
    ema_memory: Literal["device", "host"]
    """Where averages are between two steps: device, beside the parameters; host, in the pinned memory of the host,
    sharded alike. Each step then moves them to the devices and back."""
    z_loss: PositiveOrZero
    """Weight of the squared log-partition added to the loss (PaLM, arXiv:2204.02311: 1e-4)."""
    remat: Literal[("auto", "budget", *REMAT)]  # type: ignore[valid-type]
    """What the backward pass computes again: none, only activations and other cheap operations; dots, all but matrix
    products and attention; projections, all but attention, its products and the MLP's last one; attention, all but
    attention; full, whole blocks. auto is dots on CPUs; on GPUs it is dots where derived memory fits into
    plan.memory_share of the device, else full. budget takes the one that keeps the most and fits when compiled."""
    remat_memory_gib: Positive | None
    """remat=budget: memory of a device that the step may take in all, in GiB; null is plan.memory_share of the
    device."""
    remat_every: Count
    """One of this many blocks in a row computes again what training.remat says, and the others keep what remat=none
    keeps. It divides the layers; 1 means every block."""
    offload: Literal["none", "optimizer", "activations"]
    """What waits in the host's memory while a device does not need it: optimizer, its moments, between two updates;
    activations, what each block takes and what training.remat keeps, between its forward and its backward pass."""
    loss_chunk_size: Count | Literal["auto"]
    """Positions of each sequence whose logits exist at one time; auto: as many as make 4,096 rows of logits on a
    device, at most half of a sequence."""
    check_attention: Flag
    """Compare the kernels of attention and of experts' products with the plain ones before the first step; a difference
    ends the run."""
    max_skipped_steps: CountOrZero
    """Steps in a row with a loss or gradient that is not finite, each skipped, before the run stops with exit code
    77."""
    spike_deviations: Positive | None
    """A step whose loss or gradient norm lies more than this many standard deviations above the mean of the last
    training.spike_window steps is a spike: its update is skipped. 6 is a common value; null skips none."""
    spike_window: Annotated[Count, Field(ge=4)]
    """Steps that a spike is compared with; until half of them are there, no step is a spike."""
    max_spikes: CountOrZero
    """Spikes in a row, each skipped, before the run stops with exit code 77."""
    profile_communication: Flag
    """Trace the steps of `profile` and write into the run's folder what its collectives take."""
    compile_cache_gib: PositiveOrZero
    """Disk space for compiled programs in loading.cache_dir, in GiB: a second start reads them. 0 keeps none."""
    overlap: Literal["auto", "none", "options", "prefetch"]
    """How communication hides behind arithmetic: options, XLA options for these devices; prefetch, these and layers
    that gather weights and sum gradients while the next layer computes; none, neither; auto, what fits the mesh."""
    compiler_options: dict[str, bool | int | float | str]
    """XLA options of the training step by name; they win over those of training.overlap. An unknown name is an
    error."""

    @property
    def ema_names(self) -> dict[str, float]:
        """The decay of each moving average, by the name that `weights=NAME` takes."""
        if isinstance(self.ema_decay, tuple):
            return {f"ema_{decay:g}": decay for decay in self.ema_decay}
        return {} if self.ema_decay is None else {"ema": self.ema_decay}

    @property
    def dtypes(self) -> dict[str, str]:
        """Resolved param, compute and reduce dtypes."""
        compute = {"bf16": "bfloat16", "fp32": "float32"}[self.mixed_precision]
        return {
            "param": self.param_dtype or "float32",
            "compute": self.compute_dtype or compute,
            "reduce": self.reduce_dtype or "float32",
        }

    @property
    def remat_policy(self) -> str:
        """`remat` as a key of `REMAT`.

        Raises:
            UserError: it is `budget`, and nothing has chosen a policy yet.
        """
        assert self.remat != "auto", "settle_remat chooses a policy where the mesh is known"
        if self.remat == "budget":
            raise UserError(
                f"training.remat=budget is chosen by a run and by tunix.plan only; choose from {', '.join(REMAT)}"
            )
        return self.remat

    @property
    def sequences_per_shard(self) -> int:
        """`micro_batch_size` as a number.

        Raises:
            UserError: it is `auto`, and nothing has chosen a number yet.
        """
        if self.micro_batch_size == "auto":
            raise UserError("training.micro_batch_size=auto is chosen by a run and by tunix.plan only; give a number")
        return self.micro_batch_size

    def batch_shape(self, mesh_sizes: Mapping[str, int]) -> BatchShape:
        """Return the batch of a step on a mesh of these sizes (`find_batch_shape`)."""
        return find_batch_shape(self, mesh_sizes)

    def batch_schedule(self, mesh_sizes: Mapping[str, int], step: int = 0, tokens: int = 0) -> BatchSchedule:
        """Return the batch of each step of a run that has taken so many steps and tokens, on a mesh of these sizes.

        Raises:
            UserError: see `batch_shape`.
        """
        return schedule_batches(self, mesh_sizes, step, tokens)

    def pipeline(self, mesh_sizes: Mapping[str, int]) -> PipelineShape:
        """Return the pipeline on a mesh of these sizes; one stage has a microbatch as one part.

        Raises:
            UserError: see `batch_shape`.
        """
        microbatches = self.batch_shape(mesh_sizes).num_microbatches
        parts = count_parts(self, mesh_sizes)
        schedule = choose_schedule(self, mesh_sizes)
        # The key is read for each schedule, also where it has no effect: a key that nothing reads fails a test.
        chunks = self.pipeline_chunks
        if not PIPELINE_SCHEDULES[schedule].has_chunks:
            chunks = 1
        return PipelineShape(schedule, num_stages(mesh_sizes), parts, microbatches, chunks)

    def parts_per_stage(self, mesh_sizes: Mapping[str, int]) -> int | None:
        """Return the parts of a microbatch that wait at each stage; None: as many as a device has sequences."""
        if self.pipeline_microbatches == "auto":
            return None
        return count_parts(self, mesh_sizes) // num_stages(mesh_sizes)

    def splits_stream(self, mesh_sizes: Mapping[str, int]) -> bool:
        """Return whether devices split the tokens of the residual stream on a mesh; see `sequence_parallel`.

        Raises:
            UserError: it is true, and the devices do not divide the tokens.
        """
        if self.sequence_parallel is False or stream_shards(mesh_sizes) == 1:
            return False
        # Stages split the tokens of a part further, outside of the blocks.
        split = stream_shards(mesh_sizes) * token_shards(mesh_sizes) * num_stages(mesh_sizes)
        if self.sequence_parallel is True and self.seq_len % split:
            low = max(1, self.seq_len // split) * split
            raise UserError(
                f"training.sequence_parallel=true splits training.seq_len={self.seq_len} over {split} devices; "
                f"nearest: {low} or {low + split}, or training.sequence_parallel=auto"
            )
        return self.seq_len % split == 0

    @model_validator(mode="after")
    def _check(self) -> "Training":
        check_training(self)
        return self
