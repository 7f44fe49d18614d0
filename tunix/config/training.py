"""The section `training`: the step, its batch and its precision; the length of the run."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from tunix.base.config_types import Count, CountOrZero, Decay, Flag, NonNegative, Positive, Section
from tunix.base.errors import near_multiples
from tunix.config.batch import BatchKeys, check_batch_stages
from tunix.models.table import MATMUL_DTYPES


def read_steps(text: str) -> range:
    """Return the steps of `1200:1250`, both ends included, or of `1200`. Raises `ValueError` where the text is
    neither."""
    first, _, last = text.partition(":")
    if not first.isdecimal() or not (last or first).isdecimal() or not 1 <= int(first) <= int(last or first):
        raise ValueError("expected a step, or a range of steps FIRST:LAST that includes both")
    return range(int(first), int(last or first) + 1)


def _check_steps(text: str) -> str:
    read_steps(text)
    return text


Steps = Annotated[str, AfterValidator(_check_steps)]
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


def _differ(decays: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(decays)) < len(decays):
        raise ValueError("expected each decay once")
    return decays


class StepKeys(Section):
    """Keys of `training` that say how a step computes, whatever its batch is."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"]
    """ZeRO stage 3, 2, 1 or 0 on the fsdp axis."""
    mixed_precision: Literal["bf16", "fp32"]
    """Preset of the three dtypes below where they are null."""
    param_dtype: Dtype | None
    """Master weights and optimizer state (presets: float32). bfloat16 halves their memory, and a weight does not follow
    a step that changes it by less than a 512th of it, as the rates of fine-tuning do: it suits frozen weights."""
    compute_dtype: Dtype | None
    """Weights and activations in matrix products (bf16: bfloat16)."""
    matmul_dtype: Literal[tuple(MATMUL_DTYPES)] | None  # type: ignore[valid-type]
    """Numbers that the products of attention and MLP multiply: null, those of compute_dtype; fp8, 8-bit floats with one
    scale an array; mxfp8, 8-bit floats with a scale for each 32 numbers; both on chips that multiply them. CPUs
    emulate them, slowly. Logits, embeddings, routers and experts keep compute_dtype."""
    reduce_dtype: Dtype | None
    """Gradients while they are summed over devices (presets: float32)."""
    max_grad_norm: Positive | None
    """Gradients are scaled down to this global norm; null does not clip."""
    ema_decay: Decay | Annotated[tuple[Decay, ...], Field(min_length=1), AfterValidator(_differ)] | None
    """Also keep a moving average of the parameters, of which each step keeps this share (0.999); `weights=ema` reads
    it. A list keeps several: [0.99,0.999] are read by `weights=ema_0.99` and `weights=ema_0.999`. null keeps none."""
    ema_dtype: Literal["float32", "bfloat16"]
    """dtype in which averages are kept. bfloat16 halves their memory, and does not follow steps whose part of the
    average is less than a 256th of it: it suits decays up to 0.99."""
    ema_memory: Literal["device", "host"]
    """Where averages are between two steps: device, beside the parameters; host, in the pinned memory of the host,
    sharded alike. Each step then moves them to the devices and back."""
    z_loss: NonNegative
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
    """Apply training.remat to every n-th block only; the others keep what remat=none keeps. n must divide the number of
    layers; 1 applies it to all."""
    unroll_layers: bool
    """Whether each layer is a piece of the program of its own: a faster step, and a compile that grows with the
    layers. false: layers with equal shapes are one piece of program in a loop."""
    offload: Literal["none", "optimizer", "activations"]
    """What waits in the host's memory while a device does not need it: optimizer, its moments, between two updates;
    activations, what each block takes and what training.remat keeps, between its forward and its backward pass."""
    loss_chunk_size: Count | Literal["auto"]
    """Positions of each sequence whose logits exist at one time; auto: as many as make 4,096 rows of logits on a
    device, at most half of a sequence, and on GPUs 8,192 rows where derived memory fits."""
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


LIMITS = "max_steps", "max_tokens", "num_epochs"  # the first that is reached ends the run


class Training(StepKeys, BatchKeys):
    """The step: batch, precision, sharding strategy, length of the run."""

    max_steps: Annotated[Count, Field(lt=2**31)] | None
    """Optimizer steps of the run; with several of the three limits the first reached ends it."""
    max_tokens: Annotated[Count, Field(lt=2**63)] | None
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
    compile_cache_gib: NonNegative
    """Disk space for compiled programs in loading.cache_dir, in GiB: a second start reads them. 0 keeps none."""

    @model_validator(mode="after")
    def _check(self) -> "Training":
        """Refuse keys that contradict one another, whatever the mesh is."""
        batch_keys = ("gradient_accumulation_steps", "global_batch_size", "global_batch_tokens")
        given = [f"training.{key}={getattr(self, key)}" for key in batch_keys if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both set; keep one and leave the others null")
        if self.micro_batch_tokens is not None:
            text = f"training.micro_batch_tokens={self.micro_batch_tokens}"
            if self.micro_batch_size == "auto":
                raise ValueError(f"{text} and training.micro_batch_size=auto are both set; leave one out")
            if self.micro_batch_tokens % self.seq_len:
                near = near_multiples(self.micro_batch_tokens, self.seq_len)
                raise ValueError(f"{text} is no multiple of training.seq_len={self.seq_len}; nearest: {near}")
        if not self.limits:
            raise ValueError(f"the run has no end; set one of {', '.join(f'training.{key}' for key in LIMITS)}")
        if self.remat == "budget" and self.micro_batch_size == "auto":
            raise ValueError(
                "training.remat=budget and training.micro_batch_size=auto both take what memory is left; give a number "
                "of sequences, or one policy"
            )
        if self.remat_memory_gib is not None and self.remat != "budget":
            raise ValueError(
                f"training.remat_memory_gib={self.remat_memory_gib:g} says how much training.remat=budget may take; "
                f"training.remat={self.remat} takes what it needs: leave it out, or set training.remat=budget"
            )
        check_batch_stages(self)
        for before, after in pairwise(read_steps(text) for text in self.skip_steps):
            if after[0] <= before[-1]:
                raise ValueError(
                    f"training.skip_steps={','.join(self.skip_steps)}: the range from {after[0]} begins before the one "
                    f"to {before[-1]} ends; write them in order"
                )
        return self

    @property
    def limits(self) -> list[str]:
        """The limits of the run's length that are set, as users type them."""
        values = {key: getattr(self, key) for key in LIMITS}
        return [f"training.{key}={value}" for key, value in values.items() if value is not None]

    def describe_first_limit(self) -> str:
        """Return, to stand behind a number of steps, that the first of several limits ends the run; nothing for one."""
        return f" (the first of {' and '.join(self.limits)} ends the run)" if len(self.limits) > 1 else ""
