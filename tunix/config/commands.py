"""Settings of `python -m tunix.NAME key=value ...`; values stand in conf/command/NAME.yaml."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunix.base.dotted import entry_of
from tunix.base.section import Count, Flag, Positive, Section, Seed, Share, Temperature
from tunix.config.model import MeshShape
from tunix.rewards import REWARDS


class Export(Section):
    """Write a trained model as a Hugging Face directory."""

    checkpoint: str
    """A run's folder, RUN_DIR/checkpoints/STEP, latest, or a Hugging Face directory or ID."""
    weights: str
    """Of a run: trained, or the name of a copy that it has kept of them, like ema (training.ema_decay)."""
    output: str
    """The folder to write; it must not exist, or be empty."""
    dtype: Literal["float32", "bfloat16", "float16"] | None
    """dtype of the written weights; null is the one of the files that the run began with, else float32;
    float32 for an adapter."""
    merge_lora: Flag
    """Of a model with low-rank updates: add them to the matrices; false writes only them, as an adapter for PEFT."""
    shard_gb: Positive
    """Largest size of one safetensors file, in GB."""


class Generate(Section):
    """Continue prompts with a trained model, or answer them."""

    checkpoint: str
    """A run's folder, RUN_DIR/checkpoints/STEP, latest, or a Hugging Face directory or ID."""
    weights: str
    """Of a run: trained, or the name of a copy that it has kept of them, like ema (training.ema_decay)."""
    prompt: str | None
    """One prompt; null takes them from `input`, or asks for them with `chat`."""
    input: str | None
    """A file of prompts: .csv or .jsonl with a column `column`, or text with one prompt a line."""
    column: str
    """Column of the file that holds the prompts."""
    output: str | None
    """A .csv or .jsonl file to write: the rows of the input, with prediction and log_probability; null prints."""
    chat: Flag
    """Prompts are messages of a user, put in the chat template; without prompt and input, a conversation."""
    system: str | None
    """The system's message before a chat."""
    chat_template: str | None
    """A Jinja file, or the name of one of the tokenizer's templates; null is the tokenizer's own."""
    max_new_tokens: Count
    """Longest answer, in tokens."""
    temperature: Temperature
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: Count | None
    """Draw from the k likeliest tokens only."""
    top_p: Annotated[Share, Field(gt=0)] | None
    """Draw from the likeliest tokens that together have this probability."""
    min_p: Share | None
    """Draw from tokens with at least this share of the likeliest one's probability."""
    stop: tuple[str, ...]
    """Tokens that end an answer, beside those that the model names."""
    seed: Seed
    """What is drawn follows from it."""
    batch_size: Count
    """Prompts answered at one time."""
    dtype: Literal["float32", "bfloat16"]
    """dtype of weights and products."""
    mesh_shape: MeshShape
    """Devices: the batch is split over dp and fsdp, weights and heads over tp."""

    @model_validator(mode="after")
    def _check(self) -> "Generate":
        if self.prompt is not None and self.input is not None:
            raise ValueError("prompt and input are both given; keep one")
        if self.prompt is None and self.input is None and not self.chat:
            raise ValueError("give prompt=TEXT, input=FILE or chat=true")
        return self


class Evaluate(Section):
    """Measure a trained model on the data of its run, or on others: keys of training, like data=jsonl, work too."""

    checkpoint: str
    """A run's folder, RUN_DIR/checkpoints/STEP, latest, or a Hugging Face directory or ID."""
    weights: str
    """Of a run: trained, or the name of a copy that it has kept of them, like ema (training.ema_decay)."""
    metric: entry_of(("loss", *REWARDS))  # type: ignore[valid-type]
    """loss: loss, perplexity and bits per byte; exact_match: the share of conversations whose last answer is given
    word for word; `package.module:name`: a reward of your own for each answer (docs/extending.md)."""
    split: Literal["held_out", "all"]
    """Held-out documents, or all documents."""
    output: str
    """The JSON file to write."""
    num_prompts: Count
    """exact_match: conversations to answer, spread evenly; fewer if there are fewer."""
    num_samples: Count
    """exact_match: answers drawn for each; pass@k is told for k = 1, 2, 4, ... up to this."""
    max_new_tokens: Count
    """exact_match: longest answer, in tokens."""
    temperature: Temperature
    """exact_match: logits are divided by it; 0 takes the likeliest token."""
    batch_size: Count
    """exact_match: answers drawn at one time."""
    overrides: tuple[str, ...]
    """Words with keys of training; those on the command line come here."""

    @model_validator(mode="after")
    def _check(self) -> "Evaluate":
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(f"num_samples={self.num_samples} answers are all the same at temperature=0; raise it")
        return self


class DeviceKind(Section):
    """Properties of a kind of device, from its data sheet: one file of conf/command/device."""

    name: str
    """Part of the name that the driver gives it."""
    memory_gib: Positive
    """Memory of the device, as its driver reports it."""
    peak_tflops: Positive
    """Dense bf16 matrix products, in TFLOP/s, without sparsity."""
    hbm_gb_per_s: Positive
    """Its memory's bandwidth, in GB/s."""
    link_gb_per_s: Positive
    """To the other devices of its node, one way, in GB/s: NVLink, or PCIe where there is none."""
    network_gb_per_s: Positive
    """To other nodes, one way: one device's share, in GB/s."""
    efficiency: Share
    """Share of the peak that matrix products are assumed to reach."""
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    """Of the chip, like 9.0; this and what follows is what the compiler asks about it."""
    multiprocessors: Count
    """Streaming multiprocessors."""
    cores_per_multiprocessor: Count
    """float32 units of one."""
    threads_per_multiprocessor: Count
    """Threads that one holds at a time."""
    shared_memory_kib: Count
    """Shared memory of one."""
    l2_cache_mib: Count
    """Second-level cache of the chip."""
    clock_ghz: Positive
    """Highest clock rate."""
    source: str
    """Where the numbers are from."""
