"""Settings of `python -m tunix.NAME key=value ...`; values stand in conf/command/NAME.yaml."""

import ipaddress
import re
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from omegaconf import OmegaConf
from pydantic import BeforeValidator, Field, SecretStr, model_validator

from tunix.base.config_types import CONF, Count, CountOrZero, Flag, Positive, Section, Seed, Share, Temperature, row_of
from tunix.config.model import MeshShape
from tunix.config.rewards import RewardTerms
from tunix.config.task import Decoding, Guessing
from tunix.data.files import Pixels
from tunix.huggingface.table import FAMILIES, Family
from tunix.rl.table import ENVIRONMENTS, REWARDS


class ReadWeights(Section):
    """Keys of a command that reads weights."""

    checkpoint: str
    """A run's folder, RUN_DIR/checkpoints/STEP, latest, or a Hugging Face directory or ID; also in a bucket."""
    weights: str
    """Of a run: trained, or the name of a copy that it has kept of them, like ema (training.ema_decay)."""


class ReadModel(ReadWeights):
    """Keys of a command that reads a whole model."""

    family: row_of(FAMILIES, Family) | None  # type: ignore[valid-type]
    """Of a Hugging Face directory: its family of models, or your own, `package.module:name`; null finds the family by
    model_type in config.json."""
    adapter: str | None
    """Of a Hugging Face directory: low-rank updates beside its weights, a folder as PEFT or tunix.export writes it, or
    an ID of the Hugging Face hub; null for none."""


class WrittenModel(Section):
    """Keys of a command that writes a Hugging Face directory."""

    output: str
    """The folder to write, or its address in a bucket (s3://BUCKET/NAME); it must not exist, or be empty."""
    shard_gb: Positive
    """Largest size of one safetensors file, in GB."""


class Export(WrittenModel, ReadModel):
    """Write a trained model as a Hugging Face directory, as a GGUF file, or the whole state of a run as one file."""

    format: Literal["huggingface", "gguf", "state"]
    """huggingface is a directory; gguf, a directory with model.gguf for llama.cpp and a Modelfile for Ollama; state is
    one safetensors file `output` with all arrays of a run's checkpoint: parameters, moments of the optimizer, averages;
    its metadata have position, config and tokenizer as JSON."""
    dtype: Literal["float32", "bfloat16", "float16", "q8_0"] | None
    """dtype of the written weights; null is the one of the files that the run began with, else float32;
    float32 for an adapter. q8_0, 8 bits with a scale for each 32 weights, is for format=gguf."""
    merge_lora: Flag
    """Of a model with low-rank updates: add them to the matrices; false writes only them, as an adapter for PEFT."""
    push: str | None
    """OWNER/NAME of a model on the Hugging Face hub, which gets the files and a page about the run; null for none.
    HF_TOKEN is the key, HF_ENDPOINT another hub."""
    private: Flag
    """Whether a model that `push` makes is seen by its owner alone."""

    @model_validator(mode="after")
    def _check(self) -> "Export":
        if self.dtype == "q8_0" and self.format != "gguf":
            raise ValueError("dtype=q8_0 is for format=gguf; add it, or take bfloat16")
        if self.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push):
            raise ValueError(f"push={self.push}: expected OWNER/NAME, the model's name on the hub")
        if self.push is not None and self.format == "state":
            raise ValueError(f"push={self.push} sends a model, and format=state is none; leave one out")
        if self.push is not None and self.output.startswith(("s3://", "gs://")):
            raise ValueError(f"push={self.push} sends a folder of this machine, and output={self.output} is none")
        return self


class Average(WrittenModel):
    """Write the average of the weights of several checkpoints as a Hugging Face directory."""

    checkpoint: str | tuple[str, ...]
    """A run's folder, whose checkpoints `steps` names; or several runs and Hugging Face directories: [DIR,DIR]."""
    weights: str
    """Of a run: trained, or the name of a copy that it has kept of them, like ema (training.ema_decay)."""
    steps: tuple[Count, ...] | Literal["all"] | None
    """Of one run: the steps of the checkpoints to average, or all that are kept; null where several are named."""
    shares: tuple[Positive, ...] | None
    """Share of each checkpoint in the average, in their order; only the ratios count. null means equal shares."""
    family: row_of(FAMILIES, Family) | None  # type: ignore[valid-type]
    """Of Hugging Face directories: their family of models, or your own, `package.module:name`; null finds the family by
    model_type in config.json."""
    dtype: Literal["float32", "bfloat16", "float16"] | None
    """dtype of the written weights; null is the one of the files that the first run began with, else float32."""


class Generate(Guessing, Decoding, ReadModel):
    """Continue prompts with a trained model, or answer them."""

    prompt: str | None
    """One prompt; null takes them from `input`, or asks for them with `chat`."""
    input: str | None
    """A file of prompts: .csv, .tsv or .jsonl with a column `column`, or text with one prompt a line."""
    column: str
    """Column of the file that holds the prompts."""
    image: str | None
    """A file with an image, which the prompt asks about; null for none. It stands before the text, or where the text
    has the model's mark of an image, such as <start_of_image> or <image>."""
    image_column: str | None
    """Column of the file that holds the images of each prompt: a path that begins at the file's folder, or a list of
    them as JSON; null for prompts without images."""
    max_image_pixels: Pixels
    """Pixels of an image: one with more is an error."""
    output: str | None
    """A .csv or .jsonl file to write: the rows of the input, with prediction and log_probability; null prints."""
    chat: Flag
    """Prompts are messages of a user, put in the chat template; without prompt and input, a conversation."""
    system: str | None
    """The system's message before a chat."""
    chat_template: str | None
    """A Jinja file, or the name of one of the tokenizer's templates; null is the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] | None
    """Variables that the template gets beside the messages, like {enable_thinking: false}, added to those of the run
    (task.chat_template_kwargs); null for no others."""
    sampling: str | None
    """A file of conf/sampling, like greedy, standard or liberal: its temperature, top_k, top_p and min_p, unless they
    are typed too; null keeps the values of these keys."""
    seed: Seed
    """What is drawn follows from it."""
    cache_gib: Positive | None
    """Memory of each device for the pages of cache=pages, in GiB; answers wait where pages are few. null is what the
    weights and products leave of nine tenths of a GPU; on CPUs nothing bounds them."""
    batch_size: Count
    """Prompts answered at one time."""
    dtype: Literal["float32", "bfloat16"]
    """dtype of weights and products."""
    mesh_shape: MeshShape | None
    """Devices: the batch is split over dp and fsdp, weights and heads over tp; null is one device, and of several
    processes all of their devices on fsdp."""

    @model_validator(mode="after")
    def _check(self) -> "Generate":
        if self.prompt is not None and self.input is not None:
            raise ValueError("prompt and input are both given; keep one")
        if self.image is not None and self.prompt is None:
            raise ValueError(f"image={self.image} needs prompt=TEXT; for prompts of a file give image_column=NAME")
        if self.image_column is not None and self.input is None:
            raise ValueError(f"image_column={self.image_column} is a column of input=FILE, which is null; give it")
        if self.prompt == "":
            raise ValueError("prompt is empty: it has no token to continue from; give prompt=TEXT")
        if self.prompt is None and self.input is None and not self.chat:
            raise ValueError("give prompt=TEXT, input=FILE or chat=true")
        of_chat = ("system", "chat_template", "chat_template_kwargs")
        if not self.chat and (key := next((name for name in of_chat if getattr(self, name)), None)):
            raise ValueError(
                f"{key} is of a chat, and prompts are plain text without one; add chat=true, or drop {key}"
            )
        return self


class Play(Section):
    """Play an environment by hand, or let a checkpoint play it; keys of training, like data=jsonl, work too."""

    environment: row_of(ENVIRONMENTS, type) | tuple[row_of(ENVIRONMENTS, type), ...] | None  # type: ignore[valid-type]
    """What is played: an environment of docs/agents.md, like calculator, or `package.module:name`, or a list of them;
    null is that of the run."""
    checkpoint: str | None
    """A run's folder, RUN_DIR/checkpoints/STEP, latest, or a Hugging Face directory or ID: it plays. null: you play, a
    line is a turn."""
    weights: str
    """Of a run: trained, or the name of a copy that it has kept of them, like ema (training.ema_decay)."""
    episodes: Count | None
    """Episodes to play; null is 1 by hand, and 10 by a checkpoint."""
    row: CountOrZero
    """By hand: the first prompt of the data to play, from 0 on."""
    seed: Seed
    """What an environment does by chance, and what is drawn, follows from it."""
    overrides: tuple[str, ...]
    """Keys of training, like task.environment_options."""


class Samples(Section):
    """Write one HTML file with the answers that a run of task=grpo has learnt from, which needs no server."""

    run: str
    """The folder of a run; the word before the keys names it: `python -m tunix.samples RUN`."""
    against: str | None
    """The folder of another run on the same data, whose answers to the same prompts stand beside; null for none."""
    output: str
    """The HTML file to write."""
    steps: tuple[Count, ...] | None
    """Steps to show; null takes `num_steps` of them, evenly, with the first and the last."""
    num_steps: Count
    """Largest number of steps that are chosen."""
    num_groups: Count
    """Prompts of each step with their answers; those whose rewards are furthest apart come first."""
    max_mb: Positive
    """Largest size of the answers in the page, in MB; the first groups of all steps come first."""


def _to_text(value: Any) -> Any:
    # A key of digits, or one out of a file, which ends with a line break.
    return str(value).strip() if type(value) in (int, str) else value


class Server(Section):
    """Where the server listens, and its bounds."""

    host: str
    """Address to listen on. One that other machines reach needs `api_key`."""
    port: Annotated[int, Field(ge=0, le=65535)]
    """Port to listen on; 0 takes a free one, which is printed."""
    api_key: Annotated[SecretStr, BeforeValidator(_to_text), Field(min_length=1)] | None
    """Key that clients send as `Authorization: Bearer KEY`; the environment variable TUNIX_API_KEY hides it from the
    list of processes. null asks for none."""
    model_name: str | None
    """Name of the model in requests; null is the name of its folder, or its ID."""
    max_rows: Count
    """Answers that are drawn at one time; each has a row of the cache."""
    max_length: Count | None
    """Longest prompt with its answer, in tokens; null is the context of the model. The cache grows to the longest."""
    max_waiting: CountOrZero
    """Answers that wait for a row; a request beyond them gets 503 with Retry-After."""
    max_answers: Count
    """Largest `n` of a request, with its prompts: answers of one request."""
    max_body_mb: Positive
    """Largest request, in MB; a longer one gets 413. So many MB may the files of its images have, too."""
    image_folders: tuple[str, ...]
    """Folders with images that requests may name by their paths (file:///photos/cat.jpg); data URLs need none."""
    max_image_pixels: Pixels
    """Pixels of the largest image of a request, before it is resized; a larger one gets 400."""
    request_timeout_s: Positive
    """Seconds from the arrival of a request to its last token; a slower one gets 504."""
    shutdown_timeout_s: Positive
    """Seconds that running requests have after SIGTERM."""


class Serve(Guessing, ReadModel):
    """Serve a model to clients of OpenAI's API."""

    server: Server
    """Where it listens, and its bounds."""
    chat_template: str | None
    """A Jinja file, or the name of one of the tokenizer's templates; null is the tokenizer's own."""
    sampling: str | None
    """A file of conf/sampling, like greedy, standard or liberal: its temperature, top_k, top_p and min_p, unless they
    are typed too; null keeps the values of these keys."""
    max_new_tokens: Count
    """Longest answer of a request that does not say, in tokens; where less fits behind the prompt, as many as fit."""
    temperature: Temperature
    """Of requests that do not say: logits are divided by it; 0 takes the likeliest token."""
    top_k: Count | None
    """Of requests that do not say: draw from the k likeliest tokens only."""
    top_p: Annotated[Share, Field(gt=0)] | None
    """Of requests that do not say: draw from the likeliest tokens that together have this probability."""
    min_p: Share | None
    """Of requests that do not say: draw from tokens with this share of the likeliest one's probability."""
    cache: Literal["auto", "pages", "slots"]
    """As `sampling.cache` of a run: pages or slots for keys and values; the answers stay the same."""
    cache_dtype: Literal["int8"] | None
    """As `sampling.cache_dtype` of a run: int8 halves the cache of bfloat16 and rounds probabilities."""
    cache_gib: Positive | None
    """As `cache_gib` of tunix.generate: memory of each device for pages."""
    dtype: Literal["float32", "bfloat16"]
    """dtype of weights and products."""
    mesh_shape: MeshShape | None
    """Devices: rows are split over dp and fsdp, weights and heads over tp; null is one device."""

    @model_validator(mode="after")
    def _check(self) -> "Serve":
        if not is_loopback(self.server.host) and self.server.api_key is None:
            raise ValueError(
                f"server.host={self.server.host} can be reached from other machines, and server.api_key is null; set "
                "the environment variable TUNIX_API_KEY, or server.host=127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Evaluate(ReadWeights):
    """Measure a trained model on the data of its run, or on others: keys of training, like data=jsonl, work too."""

    step: Count | tuple[Count, ...] | Literal["all"] | None
    """Of a run: the checkpoint of this step, of several steps, or all that are kept; null is the one that `checkpoint`
    names."""
    metric: row_of(("loss", "reward", "lm_eval", *REWARDS))  # type: ignore[valid-type]
    """loss: loss, perplexity and bits per byte; lm_eval: `tasks` of EleutherAI's harness; reward: the model answers the
    questions of conversations, and `rewards` score its answers; the name of one reward, or `package.module:name`, is
    the same with this reward alone."""
    tasks: tuple[str, ...]
    """lm_eval: names of tasks of the harness, which brings their data from the Hugging Face hub."""
    task_folder: str | None
    """lm_eval: a folder with YAML files of your own tasks, whose data may be local; null for none."""
    num_fewshot: CountOrZero | None
    """lm_eval: examples before each question; null is the number that a task names."""
    limit: Count | None
    """lm_eval: the first documents of each task; null for all."""
    rewards: Annotated[RewardTerms, Field(min_length=1)] | None
    """reward: what scores an answer, each a name or {function, weight}; the first says which answers are right. null
    takes the rewards of the run."""
    reward_processes: Count
    """reward: processes that score."""
    reward_timeout_s: Positive
    """reward: seconds that a reward may take for the answers of one batch."""
    reward_errors: Literal["zero", "stop"]
    """reward: an answer that cannot be scored counts as 0 and is counted in reward_errors, or ends the command."""
    split: Literal["held_out", "train", "all"]
    """loss and reward: held-out documents, those to train on, or all documents."""
    output: str
    """The JSON file to write."""
    samples: str | None
    """reward: a JSONL file to write, with each prompt, answer and score; null writes none."""
    best: str | None
    """reward: a JSONL file to write, with the best answer to each prompt as a conversation, which task=sft reads; cut
    answers are left out; null writes none."""
    best_from: Annotated[float, Field(allow_inf_nan=False)] | None
    """reward: least reward of an answer in that file; null takes the best of each prompt, however bad it is."""
    num_prompts: Count
    """reward: conversations to answer, spread evenly; fewer if there are fewer."""
    num_samples: Count
    """reward: answers drawn for each; pass@k is computed for k = 2, 4, 8, ... up to this."""
    system: str | None
    """reward: message of the system before each question that has none of its own; null takes that of the run."""
    max_new_tokens: Count | None
    """reward: longest answer, in tokens; null is that of a run of task=grpo, else 128."""
    temperature: Temperature | None
    """reward: logits are divided by it; 0 takes the likeliest token. null is that of `sampling`: a file of
    conf/sampling (sampling=standard) or single keys (sampling.top_k=5); without it, that of the run's evaluation."""
    batch_size: Count
    """reward and lm_eval: answers drawn, and scored, at one time."""
    overrides: tuple[str, ...]
    """Words with keys of training; those on the command line come here."""
    # Which metrics read a key; the others refuse a value that is not the one of conf/command/evaluate.yaml.
    _keys: ClassVar[dict[tuple[str, ...], tuple[str, ...]]] = {
        ("lm_eval",): ("task_folder", "num_fewshot", "limit"),
        ("reward",): (
            *("samples", "num_prompts", "num_samples", "system", "max_new_tokens", "temperature"),
            *("reward_processes", "reward_timeout_s", "reward_errors"),
        ),
        ("loss", "reward"): ("split",),
        ("lm_eval", "reward"): ("batch_size",),
    }

    @model_validator(mode="after")
    def _check(self) -> "Evaluate":
        metric = self.metric
        if self.rewards is not None and metric != "reward":
            raise ValueError(f"rewards are given, and metric={metric}; set metric=reward")
        if self.best is not None and metric in ("loss", "lm_eval"):
            raise ValueError(f"best={self.best} needs answers with rewards, and metric={metric}; set metric=reward")
        if self.best_from is not None and self.best is None:
            raise ValueError(f"best_from={self.best_from:g} is of the file that `best` names, and best=null")
        if bool(self.tasks) != (metric == "lm_eval"):
            raise ValueError(f"metric={metric} and tasks={list(self.tasks)}: metric=lm_eval takes tasks=[NAME,...]")
        kind = metric if metric in ("loss", "lm_eval") else "reward"
        defaults = OmegaConf.load(CONF / "command" / "evaluate.yaml")
        for readers, keys in self._keys.items():
            for key in keys if kind not in readers else ():
                if (value := getattr(self, key)) != OmegaConf.select(defaults, key):
                    name = " and metric=".join(readers)
                    raise ValueError(f"{key}={value} is of metric={name}, and metric={metric}; leave it out")
        return self


class Network(Section):
    """Properties of a kind of network between nodes: one file of conf/command/network."""

    nic_gb_per_s: Positive
    """One network card, one way, in GB/s."""
    share: Share
    """Share of it that carries data."""
    hop_us: CountOrZero
    """Microseconds that a hop takes beside those that NCCL counts for InfiniBand."""
    nics_per_node: Count | None
    """Cards of a node where the network decides it; null is the number of the kind of device."""
    source: str
    """Where the numbers are from."""


class DeviceKind(Section):
    """Properties of a kind of device, from its data sheet: one file of conf/command/device."""

    name: str
    """Part of the name that the driver gives it."""
    memory_gib: Positive
    """Memory of the device, as its driver reports it."""
    peak_tflops: Positive
    """Dense bf16 matrix products, in TFLOP/s, without sparsity."""
    fp8_tflops: Positive | None
    """Dense products of 8-bit floats, in TFLOP/s, without sparsity; null where the chip has none."""
    hbm_gb_per_s: Positive
    """Its memory's bandwidth, in GB/s."""
    link_gb_per_s: Positive
    """To the other devices of its node, one way, in GB/s: NVLink, or PCIe where there is none."""
    host_gb_per_s: Positive
    """To the memory of its host, one way, in GB/s: 64 with PCIe 5, 32 with PCIe 4 (16 lanes)."""
    nics_per_node: Count
    """Network cards of a node."""
    network: Network
    """To other nodes; in the file, the name of a file of conf/command/network."""
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

    @property
    def mxfp8_tflops(self) -> float | None:
        """Dense products of 8-bit floats of which each 32 have a scale, in TFLOP/s; None before Blackwell."""
        return self.fp8_tflops if int(self.compute_capability.split(".")[0]) >= 10 else None
