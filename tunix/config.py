"""Types, units and checks of every config key. Values live in conf/, each in one place; knows no jax.

Classes here have no defaults on purpose: `--cfg job` then shows everything that a run uses.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tunix import layout


class UserError(ValueError):
    """What the user asked for cannot be done. Shown as it is, without a traceback; exit code 2."""


def _reject_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


Count = Annotated[int, BeforeValidator(_reject_bool), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_reject_bool), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_reject_bool), Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, BeforeValidator(_reject_bool), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_reject_bool), Field(ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Regex = Annotated[str, AfterValidator(_regex)]
MeshShape = Annotated[Any, AfterValidator(layout.parse)]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class Model(Section):
    """A decoder's architecture and size, and the mesh it is laid out on."""

    family: Literal["gemma3"] = Field(description="Architecture: how the parts below are put together.")
    vocab_size: Count = Field(description="Rows of the embedding table; at least the tokenizer's words.")
    embed_dim: Count = Field(description="Width of the residual stream (D).")
    mlp_dim: Count = Field(description="Hidden width of the gated MLP (F).")
    num_layers: Count = Field(description="Decoder blocks (L).")
    num_heads: Count = Field(description="Query heads (N).")
    num_kv_heads: Count = Field(description="Key/value heads (K); each serves num_heads / num_kv_heads query heads.")
    head_dim: Count = Field(description="Width of one head (H), even.")
    sliding_window: Count = Field(description="Tokens that a local layer attends to, itself included.")
    global_every: Count = Field(description="Every n-th layer attends to all earlier tokens; the others are local.")
    rope_theta: Positive = Field(description="RoPE base of global layers.")
    local_rope_theta: Positive = Field(description="RoPE base of local layers.")
    rope_scale: Positive = Field(description="Positions of global layers are divided by this (linear RoPE scaling).")
    query_scale: Positive = Field(description="Queries are multiplied by query_scale ** -0.5.")
    norm_eps: Positive = Field(description="Added to the mean square in RMSNorm.")
    attention: Literal["xla", "cudnn"] = Field(description="Attention kernel: plain XLA anywhere, cuDNN flash on GPUs.")
    mesh_shape: MeshShape = Field(description=f"Device mesh: {layout.type_hint}. Axes dp, fsdp, tp; one -1 fills.")

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension of the weights by its letter (`layout.LETTERS`)."""
        return {
            "V": self.vocab_size, "D": self.embed_dim, "F": self.mlp_dim, "L": self.num_layers,
            "N": self.num_heads, "K": self.num_kv_heads, "H": self.head_dim,
        }  # fmt: skip

    @model_validator(mode="after")
    def _check(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: RoPE rotates pairs")
        sizes = layout.explicit_sizes(self.mesh_shape)
        if sizes:
            layout.check_divides(self.dims, sizes)
        return self


class PythonStdlib(Section):
    """The source of the running interpreter's standard library: real text on every machine."""

    source: Literal["python_stdlib"] = Field(description="Where documents come from.")
    held_out_fraction: Share = Field(description="Share of documents (files) kept for evaluation, chosen by hash of the name.")
    decode_errors: Literal["skip", "error", "replace"] = Field(description="A file that is not UTF-8: left out and counted, refused, or read with U+FFFD.")
    cache_dir: str = Field(description="Folder for trained tokenizers and tokenized corpora, named by content hash.")
    read_threads: Count = Field(description="Threads that pack batches ahead of the step.")
    prefetch_batches: Count = Field(description="Batches kept ready on the host.")


class TextFiles(PythonStdlib):
    """Text files below folders, one document a file."""

    source: Literal["text"] = Field(description="Where documents come from.")  # type: ignore[assignment]
    paths: tuple[str, ...] = Field(min_length=1, description="Files, folders or globs.")
    extensions: tuple[str, ...] = Field(description="Endings of the files that are read below a folder.")


class Tokenizer(Section):
    """A byte-level BPE: read from a file, or trained on the corpus and cached."""

    path: str | None = Field(description="A tokenizer.json of the tokenizers library; null trains one on the corpus.")
    vocab_size: Annotated[Count, Field(ge=259)] = Field(description="Words of a tokenizer trained here; 256 bytes and 3 special tokens are among them.")
    train_bytes: Count = Field(description="Bytes of training documents that a tokenizer trained here sees.")
    bos_token: str = Field(description="Token put before each document.")
    eos_token: str = Field(description="Token put after each document.")


class Task(Section):
    """What is learnt: where batches come from and which loss they get."""

    name: Literal["pretrain"] = Field(description="pretrain: next-token loss on every token of packed documents.")


class Training(Section):
    """The step: batch, precision, sharding strategy, length of the run."""

    seq_len: Count = Field(description="Tokens per sequence (T).")
    micro_batch_size: Count = Field(description="Sequences per data shard per microbatch.")
    gradient_accumulation_steps: Count | None = Field(description="Microbatches per optimizer step (A); null derives it from a global batch, or is 1.")
    global_batch_size: Count | None = Field(description="Sequences per optimizer step over the whole mesh; null derives it.")
    global_batch_tokens: Count | None = Field(description="Tokens per optimizer step over the whole mesh; null derives it.")
    sync_gradients_every: Count = Field(description="Microbatches between gradient reductions within a step; divides the accumulation. The result stays, memory grows, traffic falls.")
    sharding_strategy: Literal["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"] = Field(description="ZeRO stage 3, 2, 1 or 0 on the fsdp axis.")
    mixed_precision: Literal["bf16", "fp32"] = Field(description="Preset of the three dtypes below where they are null.")
    param_dtype: Dtype | None = Field(description="Master weights and optimizer state (presets: float32).")
    compute_dtype: Dtype | None = Field(description="Weights and activations in matrix products (bf16: bfloat16).")
    reduce_dtype: Dtype | None = Field(description="Gradients while they are summed over devices (presets: float32).")
    max_steps: Count | None = Field(description="Optimizer steps of the run; with several of the three limits the first reached ends it.")
    max_tokens: Count | None = Field(description="Tokens of the run.")
    num_epochs: Positive | None = Field(description="Passes over the training data.")
    max_grad_norm: Positive | None = Field(description="Gradients are scaled down to this global norm; null does not clip.")
    z_loss: PositiveOrZero = Field(description="Weight of the squared log-partition added to the loss (PaLM, arXiv:2204.02311: 1e-4).")
    remat: Literal["none", "full", "dots", "attention"] = Field(description="What the backward pass recomputes: nothing, whole blocks, all but matrix products, all but attention outputs.")
    loss_chunk_size: Count = Field(description="Positions of each sequence whose logits exist at one time; divides seq_len or is larger.")
    max_skipped_steps: CountOrZero = Field(description="Steps in a row with a loss or gradient that is not finite, each skipped, before the run stops with exit code 77.")
    compiler_options: dict[str, bool | int | float | str] = Field(description="XLA options of the training step by name; an unknown name is an error.")

    @property
    def dtypes(self) -> dict[str, str]:
        """Resolved param, compute and reduce dtypes."""
        compute = {"bf16": "bfloat16", "fp32": "float32"}[self.mixed_precision]
        return {
            "param": self.param_dtype or "float32",
            "compute": self.compute_dtype or compute,
            "reduce": self.reduce_dtype or "float32",
        }

    def accumulation(self, data_shards: int) -> int:
        """Microbatches per optimizer step (A) on a mesh of `data_shards` = dp x fsdp."""
        steps = self.gradient_accumulation_steps or 1
        sequences = self.micro_batch_size * data_shards
        factors = f"micro_batch_size={self.micro_batch_size} x {data_shards} data shards"
        for key, batch, micro in (
            ("global_batch_size", self.global_batch_size, sequences),
            ("global_batch_tokens", self.global_batch_tokens, sequences * self.seq_len),
        ):
            if batch is None:
                continue
            if batch % micro:
                low = max(1, batch // micro) * micro
                unit = factors if micro == sequences else f"{factors} x seq_len={self.seq_len}"
                raise UserError(f"training.{key}={batch} is not divisible by {micro} = {unit}; nearest: {low} or {low + micro}")
            steps = batch // micro
        if steps % self.sync_gradients_every:
            legal = [n for n in range(1, steps + 1) if steps % n == 0]
            raise UserError(
                f"training.sync_gradients_every={self.sync_gradients_every} does not divide the {steps} microbatches of a "
                f"step; it may be {', '.join(map(str, legal))}"
            )
        return steps

    @model_validator(mode="after")
    def _check(self) -> "Training":
        batch_keys = ("gradient_accumulation_steps", "global_batch_size", "global_batch_tokens")
        given = [f"training.{key}={getattr(self, key)}" for key in batch_keys if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both set; keep one and leave the others null")
        if self.max_steps is None and self.max_tokens is None and self.num_epochs is None:
            raise ValueError("the run has no end; set one of training.max_steps, training.max_tokens, training.num_epochs")
        if self.loss_chunk_size < self.seq_len and self.seq_len % self.loss_chunk_size:
            legal = [n for n in range(1, self.seq_len + 1) if self.seq_len % n == 0]
            near = sorted(legal, key=lambda n: abs(n - self.loss_chunk_size))[:2]
            raise ValueError(
                f"training.loss_chunk_size={self.loss_chunk_size} does not divide training.seq_len={self.seq_len}; "
                f"nearest: {' or '.join(map(str, sorted(near)))}"
            )
        return self


class ParameterGroup(Section):
    """Parameters with an optimizer setting of their own. The one class with defaults: lists have no file in conf/."""

    params: Regex = Field(description="Regular expression searched for in the parameter's dotted path.")
    weight_decay: PositiveOrZero | None = Field(default=None, description="Weight decay of these parameters.")
    learning_rate: Positive | None = Field(default=None, description="Peak learning rate of these parameters.")


class Optimizer(Section):
    learning_rate: Positive = Field(description="Peak learning rate; the scheduler scales it.")
    weight_decay: PositiveOrZero = Field(description="Decoupled weight decay, times the learning rate; not for vectors (norm scales).")
    groups: tuple[ParameterGroup, ...] = Field(description="Settings for some parameters; the first pattern that matches wins, one that matches nothing is an error.")


class AdamW(Optimizer):
    """Loshchilov & Hutter 2019, arXiv:1711.05101."""

    name: Literal["adamw"] = Field(description="Update rule.")
    b1: Share = Field(description="Decay of the mean of gradients.")
    b2: Share = Field(description="Decay of the mean of squared gradients.")
    eps: Positive = Field(description="Added to the root of the second moment.")


class Adafactor(Optimizer):
    """Shazeer & Stern 2018, arXiv:1804.04235: second moments as row and column means."""

    name: Literal["adafactor"] = Field(description="Update rule.")
    decay_rate: Share = Field(description="Exponent of the second moment's decay, 1 - step ** -decay_rate.")
    clipping_threshold: Positive = Field(description="Root mean square above which an update is scaled down.")


class Lion(Optimizer):
    """Chen et al. 2023, arXiv:2302.06675: the sign of an interpolated momentum."""

    name: Literal["lion"] = Field(description="Update rule.")
    b1: Share = Field(description="Weight of the momentum in the update.")
    b2: Share = Field(description="Decay of the momentum.")


class Muon(Optimizer):
    """Jordan et al. 2024: orthogonalised momentum for matrices, AdamW for embeddings and vectors."""

    name: Literal["muon"] = Field(description="Update rule.")
    beta: Share = Field(description="Decay of the momentum of matrices.")
    ns_steps: Count = Field(description="Newton-Schulz iterations.")
    b1: Share = Field(description="AdamW's decay of the mean, for embeddings and vectors.")
    b2: Share = Field(description="AdamW's decay of the squares, for embeddings and vectors.")
    eps: Positive = Field(description="AdamW's epsilon, for embeddings and vectors.")


class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = Field(description="Update rule.")
    momentum: Share = Field(description="Decay of the momentum; 0 keeps none.")
    nesterov: Flag = Field(description="Look ahead along the momentum.")


class Scheduler(Section):
    """Learning rate over the run, as a multiple of its peak."""

    name: Literal["warmup_cosine", "warmup_linear", "constant", "wsd", "inverse_sqrt", "sqrt_decay"] = Field(description="Shape after the warmup.")
    warmup_ratio: Share = Field(description="Share of the run over which the rate rises from 0; the next two win over it.")
    warmup_steps: CountOrZero | None = Field(description="Warmup in steps.")
    warmup_tokens: CountOrZero | None = Field(description="Warmup in tokens.")
    decay_ratio: Share = Field(description="Share of the run, at its end, over which wsd and sqrt_decay fall; the next two win over it.")
    decay_steps: CountOrZero | None = Field(description="That decay in steps.")
    decay_tokens: CountOrZero | None = Field(description="That decay in tokens.")
    final_ratio: Share = Field(description="Rate at the end as a share of the peak (not for constant and inverse_sqrt).")

    @model_validator(mode="after")
    def _check(self) -> "Scheduler":
        for phase in ("warmup", "decay"):
            if getattr(self, f"{phase}_steps") is not None and getattr(self, f"{phase}_tokens") is not None:
                raise ValueError(f"scheduler.{phase}_steps and scheduler.{phase}_tokens are both set; keep one")
        return self


class Checkpoint(Section):
    """When state is saved and what is kept. The last step is always saved."""

    save_every_steps: Count | None = Field(description="Steps between checkpoints; null saves only the last.")
    save_first: Flag = Field(description="Also save before the first step.")
    max_to_keep: Count = Field(description="Newest checkpoints kept.")
    keep_every_steps: Count | None = Field(description="Checkpoints at multiples of this are kept for good.")
    keep_best: Flag = Field(description="Also keep the checkpoint with the lowest held-out loss, of those at evaluated steps.")
    async_: Flag = Field(alias="async", description="Write in the background while training goes on.")


class Evaluation(Section):
    """Held-out loss on a fixed set, and a sampled continuation at the end."""

    every_steps: Count | None = Field(description="Steps between evaluations; null evaluates only at the end.")
    num_sequences: Count = Field(description="Held-out sequences of seq_len tokens, the same at every evaluation; fewer if there are fewer.")
    sample_tokens: CountOrZero = Field(description="Tokens sampled at the end as the continuation of a held-out document; 0 for none.")
    sample_temperature: PositiveOrZero = Field(description="Sampling temperature; 0 takes the likeliest token.")


class Logging(Section):
    every_steps: Count = Field(description="Steps between lines on the console and in train.log; metrics.jsonl gets every step.")
    tensorboard: Flag = Field(description="Write TensorBoard events into the run's folder.")


class Distributed(Section):
    """Processes of one run. Null leaves a value to the environment."""

    coordinator_address: str | None = Field(description="host:port of process 0.")
    num_processes: Count | None = Field(description="Processes of the run.")
    process_id: CountOrZero | None = Field(description="Number of this process, from 0.")
    local_device_ids: tuple[CountOrZero, ...] | None = Field(description="Devices of this host that belong to this process.")
    init_timeout_s: Count = Field(description="Seconds to wait for all processes at start.")
    allow_idle_devices: Flag = Field(description="Accept a mesh smaller than the machine.")

    @model_validator(mode="after")
    def _check(self) -> "Distributed":
        needed = ("coordinator_address", "num_processes", "process_id")
        given = [key for key in needed if getattr(self, key) is not None]
        if given and len(given) < len(needed):
            missing = " and ".join(f"distributed.{key}" for key in needed if key not in given)
            raise ValueError(f"distributed.{given[0]} is set; {missing} must be set too")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise ValueError(f"distributed.process_id={self.process_id} must be below distributed.num_processes={self.num_processes}")
        return self


AnyData = Annotated[PythonStdlib | TextFiles, Field(discriminator="source")]
AnyOptimizer = Annotated[AdamW | Adafactor | Lion | Muon | SGD, Field(discriminator="name")]


class Config(Section):
    """One run."""

    project_name: str = Field(description="Runs are grouped under outputs/PROJECT_NAME.")
    run_name: str | None = Field(description="Name shown in reports; null takes the run folder's.")
    seed: CountOrZero = Field(description="Initial weights, data order and sampling follow from it.")
    dry_run: Flag = Field(description="Print every derived number, start nothing, write nothing.")
    resume: str | None = Field(description="A run folder, RUN_DIR/checkpoints/STEP, or latest: go on from there.")
    model: Model = Field(description="Architecture, size and mesh.")
    data: AnyData = Field(description="Documents.")
    tokenizer: Tokenizer = Field(description="Text to tokens.")
    task: Task = Field(description="Batches and loss.")
    training: Training = Field(description="The step and the run's length.")
    optimizer: AnyOptimizer = Field(description="Update rule.")
    scheduler: Scheduler = Field(description="Learning rate over time.")
    checkpoint: Checkpoint = Field(description="Saving.")
    evaluation: Evaluation = Field(description="Held-out evaluation.")
    logging: Logging = Field(description="Console, files, TensorBoard.")
    distributed: Distributed = Field(description="Processes.")

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.tokenizer.path is None and self.tokenizer.vocab_size > self.model.vocab_size:
            raise ValueError(f"tokenizer.vocab_size={self.tokenizer.vocab_size} is more than model.vocab_size={self.model.vocab_size}")
        sizes = layout.explicit_sizes(self.model.mesh_shape)
        if sizes:
            self.training.accumulation(sizes["dp"] * sizes["fsdp"])
        return self
