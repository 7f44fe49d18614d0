"""A trained model ready for use, out of a run's folder or Hugging Face's files: `tunix.load_pretrained`."""

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, PartitionSpec, reshard
from tokenizers import Tokenizer

from tunix.base.digests import reject_damaged, sample_files
from tunix.base.errors import UserError
from tunix.base.files import list_numbers
from tunix.base.progress import announcing
from tunix.checkpoints.store import ADDRESS, describe_unreadable, find_parts, find_storage, reject_damaged_checkpoint
from tunix.config import Config, Model, pretrained_config
from tunix.config.mistakes import validate
from tunix.config.saved_runs import COPIED, find_run, read_saved
from tunix.config.task import Sampling as SamplingKeys
from tunix.data.image_processors import find_processor
from tunix.data.image_slots import place_images
from tunix.data.tokenizer import (
    Vocab,
    add_images,
    explaining_library,
    lacks_first_token,
    load_vocab,
    read_backend,
    tokenizer_digest,
)
from tunix.huggingface.adapter import check_adapter, write_updates
from tunix.huggingface.adapter_config import find_labels, read_adapter
from tunix.huggingface.hub import INFO_FILES, WEIGHTS, find
from tunix.huggingface.sentence_vectors import has_files as has_sentence_files
from tunix.huggingface.weights import CHANGED, check_weights, load_weights
from tunix.inference.engine import Answer
from tunix.inference.gathered import Gathered
from tunix.inference.rollout import CacheBound, Request, RowSizes, Sampler
from tunix.inference.sampling import Sampling, find_stop_ids
from tunix.models.kernels import choose_kernels, select_expert_matmul
from tunix.models.lora import merge
from tunix.models.scores import POOLINGS, embed_rows, score_rows
from tunix.models.vision import Images
from tunix.processes import peers
from tunix.run.folder import FILES, TOKENIZER
from tunix.sharding.arrays import rows_to_global
from tunix.sharding.layout import STRATEGIES, Layout
from tunix.sharding.mesh import ONE_DEVICE, device_mesh, unsplit_dims, whole_sequences
from tunix.training.state import Architecture, abstract_params, describe
from tunix.training.train_spec import TrainSpec

Params = dict[str, Any]
DTYPES = ("float32", "bfloat16")  # of weights and products
CHECKPOINT_FILES = ("state/manifest.ocdbt", "state/digests*.json", ADDRESS)  # small, and no other checkpoint has them


@dataclass(frozen=True)
class Pretrained:
    """Architecture, weights and tokenizer. Calling it gives logits."""

    cfg: Model
    mesh: Mesh
    layout: Layout
    arch: Architecture
    params: Params
    files: Path | None  # Hugging Face's files about it: where it comes from, or what the run began with
    tokenizer: Tokenizer | None
    tokenizer_files: Path  # of a run, its own folder of them
    stop_strings: tuple[str, ...] = ()  # sampling.stop of a run: its answers have ended there
    template_options: dict[str, Any] = field(default_factory=dict)  # task.chat_template_kwargs of a run
    gives_vectors: bool = False  # a run of task=embed, or an adapter of one

    def __call__(self, tokens: Any, pixel_values: Any = None, image_grid_thw: Any = None) -> jax.Array:
        """Return logits [B, T, V] float32 of tokens [B, T] int32.

        The other arrays are those that transformers' processor makes of the images of all rows, one after the other;
        `image_grid_thw` belongs to a tower that takes images of any size.

        Raises:
            UserError: the model gives scores; or these are no tokens of it, or no array of them; or no images of them.
        """
        if self.cfg.labels is not None:
            raise UserError(f"the model gives {', '.join(self.cfg.labels)} and no logits; call its method score")
        rows = self.read_tokens(tokens)
        if rows.ndim != 2 or not rows.size:
            raise UserError(f"tokens [B, T] are rows of one length, not an array of the shape {list(rows.shape)}")
        if self.cfg.positions == "learned" and rows.shape[1] > self.cfg.context_length:
            raise UserError(f"the model has no position behind token {self.cfg.context_length} of a row; cut its rows")
        images = None if pixel_values is None else self._place_images(rows, pixel_values, image_grid_thw)
        with jax.set_mesh(self.mesh):
            return self._logits(self.params, self.rows(rows), jax.tree.map(self.rows, images), len(rows))

    def _place_images(self, tokens: np.ndarray, pixel_values: Any, image_grid_thw: Any) -> Images:
        if self.cfg.vision is None:
            raise UserError(f"pixel_values are given, and this {self.cfg.family} is a model of text alone")
        processor = find_processor(self.cfg.vision)
        grids = None if image_grid_thw is None else np.asarray(image_grid_thw)
        try:
            units, grids = processor.take(np.asarray(pixel_values, np.float32), grids)
        except ValueError as error:
            shape = list(np.shape(pixel_values))
            raise UserError(f"pixel_values of the shape {shape}: the model takes {error}") from None
        try:
            return place_images(tokens, units, grids, processor, self.cfg.vision.image_token)
        except ValueError as error:
            raise UserError(f"tokens have {error} in pixel_values") from None

    def read_tokens(self, tokens: Any) -> np.ndarray:
        """Return token ids as an array of their own shape, int32.

        Raises:
            UserError: they are no numbers, or rows of unequal lengths; or one is no token of the model.
        """
        try:
            found = np.asarray(tokens)
        except ValueError:
            raise UserError("rows of tokens have unequal lengths; fill up the shorter ones behind their ends") from None
        if found.size and found.dtype.kind not in "iu":
            raise UserError(f"tokens are whole numbers, not {found.dtype}; the method encode makes them of a text")
        if found.size and not 0 <= found.min() <= found.max() < self.cfg.vocab_size:
            wrong = found.min() if found.min() < 0 else found.max()
            raise UserError(f"{wrong} is no token of the model: its tokens are 0 to {self.cfg.vocab_size - 1}")
        return found.astype(np.int32)

    def rows(self, tokens: np.ndarray) -> jax.Array:
        """Return [B, ...] on the mesh, with rows of zeros added until the data shards divide them."""
        return rows_to_global(tokens, self.mesh)

    @cached_property
    def vocab(self) -> Vocab | None:
        """The tokenizer as a run trained with it: with its marks and template; None for Hugging Face's files."""
        if self.tokenizer_files == self.files:
            return None
        vocab = load_vocab(str(self.tokenizer_files))
        processor = None if self.cfg.vision is None else find_processor(self.cfg.vision)
        if processor is None or vocab.backend.token_to_id(processor.soft) is None:
            return vocab
        return add_images(vocab, processor)

    @cached_property
    def has_source_tokenizer(self) -> bool:
        """True where the tokenizer is the one of Hugging Face's files, also in a run that began with them."""
        if self.vocab is None:
            return True
        source = None if self.files is None else read_backend(self.files)
        return source is not None and tokenizer_digest(source) == tokenizer_digest(self.vocab.backend)

    @cached_property
    def source_tokenizer(self) -> Tokenizer:
        """The tokenizer of Hugging Face's files, which adds the first token to a text."""
        assert self.tokenizer is not None
        if self.files is None or not lacks_first_token(self.files):
            return self.tokenizer
        return load_vocab(str(self.files)).with_bos()

    def find_stop_ids(self, stop_strings: tuple[str, ...] = ()) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer (`sampling.find_stop_ids`), with words of the user's."""
        assert self.tokenizer is not None
        words = *self.stop_strings, *stop_strings
        return find_stop_ids(self.vocab or self.tokenizer, words, self.files, "stop", self.template_options)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is to be continued.

        Raises:
            UserError: the text has half of a surrogate pair, or the model no tokenizer.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt {text[:40]!r} is no text: character {error.start + 1} is no character") from None
        if self.tokenizer is None:
            raise UserError(f"{self.tokenizer_files} has no tokenizer.json, so a text has no tokens; put it there")
        if self.vocab is None or self.has_source_tokenizer:
            return _encode(self.source_tokenizer, text, True)
        ids = self.encode_rendered(text)
        return ids if self.vocab.bos is None else [self.vocab.bos, *ids]  # as the documents in training

    def encode_rendered(self, text: str) -> list[int]:
        """Return the tokens of a text by a chat template, which has written all special tokens itself."""
        assert self.tokenizer is not None
        return _encode(self.tokenizer, text, False)

    def score(self, rows: Sequence[Sequence[int]], num_at_once: int = 8) -> np.ndarray:
        """Return the numbers [documents, v] float32 that the model gives to documents, lists of token ids.

        Raises:
            UserError: the model gives logits; a document is empty, too long, or has what is no token of the model.
        """
        if self.cfg.labels is None:
            raise UserError("the model gives logits and no scores; train it with task=reward or task=classify")
        scores = [self._run(self._scores, rows[at : at + num_at_once]) for at in range(0, len(rows), num_at_once)]
        return np.concatenate([np.zeros((0, len(self.cfg.labels)), np.float32), *scores])

    def embed(self, rows: Sequence[Sequence[int]], pooling: str, num_at_once: int = 8) -> np.ndarray:
        """Return the vectors [texts, D] float32, of length 1, of texts, lists of token ids that end with <eos>.

        `pooling` is that of task.pooling.

        Raises:
            UserError: the model gives scores; a text is empty, too long, or has what is no token of the model.
        """
        if self.cfg.labels is not None:
            raise UserError(f"the model gives {', '.join(self.cfg.labels)} and no vectors; call its method score")
        if pooling not in POOLINGS:
            raise UserError(f"pooling={pooling} is not understood; give {' or '.join(POOLINGS)}")
        embed = partial(self._embeddings, pooling=pooling)
        parts = [self._run(embed, rows[start : start + num_at_once]) for start in range(0, len(rows), num_at_once)]
        return np.concatenate([np.zeros((0, self.cfg.embed_dim), np.float32), *parts])

    def _run(self, function: Callable[..., jax.Array], rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Return what a function of (parameters, tokens, segments) gives for rows of unequal lengths."""
        read = [self.read_tokens(row) for row in rows]
        for row in read:
            if row.ndim != 1 or not 0 < len(row) <= self.cfg.context_length:
                raise UserError(
                    f"a row is a list of 1 to {self.cfg.context_length} token ids, the model's context, not an array "
                    f"of the shape {list(row.shape)}"
                )
        length = max(map(len, read))
        # Few lengths, so that few programs are compiled.
        tokens = np.zeros((len(rows), min(self.cfg.context_length, 1 << (length - 1).bit_length())), np.int32)
        segment_ids = np.zeros_like(tokens)
        for number, row in enumerate(read):
            tokens[number, : len(row)], segment_ids[number, : len(row)] = row, 1
        with jax.set_mesh(self.mesh):
            return np.asarray(function(self.params, self.rows(tokens), self.rows(segment_ids)))[: len(rows)]

    @cached_property
    def _embeddings(self):
        def embeddings(params, tokens, segment_ids, pooling):
            return reshard(embed_rows(self.arch.module(params), tokens, segment_ids, pooling), PartitionSpec())

        return jax.jit(embeddings, static_argnames="pooling")

    @cached_property
    def _scores(self):
        return jax.jit(lambda params, *rows: reshard(score_rows(self.arch.module(params), *rows), PartitionSpec()))

    @cached_property
    def sampler(self) -> Sampler:
        if self.cfg.labels is not None:
            raise UserError(f"the model gives {', '.join(self.cfg.labels)} and no text")
        return Sampler(self.arch, self.cfg.context_length, self.mesh)

    @cached_property
    def gathered(self) -> Gathered:
        """The parameters as all rollouts take them: beside `params`, which the other methods take."""
        return self.sampler.gather(self.params)

    def sample(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        seed: int = 0,
        answers_per_prompt: int = 1,
        rows_at_once: int | None = None,
        images: list[Images | None] | None = None,
    ) -> list[Answer]:
        """Return answers to prompts of token ids, and of images (`Engine.admit`); see `rollout`."""
        return self.rollout(Request(prompts, answers_per_prompt, seed, images=images), sampling, rows_at_once)

    def rollout(
        self,
        request: Request,
        sampling: Sampling,
        rows_at_once: int | None = None,
        cache_gib: float | None = None,
        say: Callable[[CacheBound], None] = lambda bound: None,
    ) -> list[Answer]:
        """Return the answers to a request; see `Sampler.rollout`.

        `cache_gib` is that of `Sampler.bound_cache`; `say` gets what it returns.

        Raises:
            UserError: a prompt has an image that the model cannot see, or what is no token of the model; see also
                `Sampler.rollout`.
        """
        for prompt in request.prompts:
            self.read_tokens(prompt)
        has_images = any(each is not None for each in request.images or ())
        if has_images and self.cfg.vision is None:
            raise UserError(f"a prompt has an image, and this {self.cfg.family} is a model of text alone")
        if not request.prompts:
            return []
        with jax.set_mesh(self.mesh):
            num_answers = len(request.prompts) * request.answers_per_prompt
            rows = min(num_answers, rows_at_once or num_answers)
            sizes = RowSizes(rows, request.max_prompt_length, request.find_max_length(sampling))
            bound = self.sampler.bound_cache(self.params, sampling, sizes, cache_gib, "max_new_tokens")
            say(bound)
            return self.sampler.rollout(self.gathered, request, sampling, rows_at_once, num_pages=bound.num_pages)

    @cached_property
    def _logits(self):
        def logits(params, tokens, images, num_rows):
            return reshard(self.arch.module(params)(tokens, images=images), PartitionSpec())[:num_rows]

        return jax.jit(logits, static_argnums=3)

    def merged(self) -> "Pretrained":
        """Return the model with its low-rank updates, if it has any, added to the matrices."""
        if not self.cfg.lora.rank:
            return self
        cfg = self.cfg.model_copy(update={"lora": self.cfg.lora.model_copy(update={"rank": 0, "quantize_base": None})})
        with jax.set_mesh(self.mesh):
            params = jax.jit(lambda params: merge(params, self.arch.weights, self.cfg.lora, self.layout))(self.params)
            return replace(self, cfg=cfg, arch=describe(cfg, self.layout), params=params)


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # `encode` holds Python's lock, so that no other thread runs for the 5 s of a megabyte; a batch does not.
    with explaining_library():
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def load_pretrained(
    source: str | Path,
    dtype: str = "float32",
    mesh_shape: Any = None,
    weights: str = "trained",
    strategy: str = "no_shard",
    family: str | None = None,
    adapter: str | Path | None = None,
    mtp: bool = False,
) -> Pretrained:
    """Load the model of a run's folder (or RUN_DIR/checkpoints/STEP), of a folder of Hugging Face's, or of an ID there.

    Weights and products are of `dtype`; weights are split over the tp axis of `mesh_shape`, and over fsdp between uses
    if the `strategy` says so. Axes of `mesh_shape` that split the tokens of a sequence split sequences instead: a text
    is of any length, and grows by one token at a time. Without a mesh, it is one device; of several processes, which
    all call this, fsdp over all of their devices. `weights` names a copy of the parameters that the run has kept, like
    `ema`, or those that it has trained. `family` is the dotted path of a family of one's own, of a folder of Hugging
    Face's, and `adapter` a folder of low-rank updates for such a folder's weights. With `mtp` the model has a layer of
    multi-token prediction, which is read of a folder of Hugging Face's too.

    Raises:
        UserError: the source is neither a run nor a folder or an ID of Hugging Face's; one of its files is missing,
            damaged, or of a model that tunix does not know; `adapter` is given for a run; there is no layer for `mtp`.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not understood; give {' or '.join(DTYPES)}")
    run = find_run(str(source), copied=COPIED)
    if run and adapter is not None:
        raise UserError(
            f"adapter={adapter}: checkpoint={source} is a run of tunix, which has updates of its own or none; leave it "
            "out, or write the run's model first: python -m tunix.export checkpoint=RUN_DIR output=DIR merge_lora=true"
        )
    folder = run[0] if run else _fetch(str(source), INFO_FILES)
    if mesh_shape is None:
        mesh_shape = ONE_DEVICE if jax.process_count() == 1 else "auto"
    cfg = pretrained_config.trained_model(folder, mesh_shape, family, mtp)
    if mtp and cfg.mtp is None:
        raise UserError(
            f"guess_by=mtp: checkpoint={source} has no layer of multi-token prediction; set guess_by=prompt_lookup"
        )
    if adapter is not None:
        updates = _fetch(str(adapter), INFO_FILES + WEIGHTS, key="adapter")
        lora = cfg.lora.model_copy(update=read_adapter(updates, cfg.family))
        # Nothing is trained here, and a frozen tower would have no updates.
        vision = cfg.vision and cfg.vision.model_copy(update={"freeze_tower": False})
        changes = {"lora": lora, "vision": vision, "labels": find_labels(updates, cfg.labels)}
        cfg = cfg.model_copy(update={**changes, "init_from": str(source), "init_adapter": str(updates)})
    # `allow_idle`: one device of several is enough for a small model.
    mesh = whole_sequences(device_mesh(cfg.mesh_shape, cfg.dims, allow_idle=True))
    unsplit = frozenset(unsplit_dims(cfg.dims, mesh.shape))
    device = mesh.abstract_mesh.abstract_device
    kernels = tuple((dim_name, each.name) for dim_name, each in choose_kernels(cfg, dtype, device).items())
    products = select_expert_matmul(cfg.expert_products, dtype, device, cfg).name
    layout = Layout(STRATEGIES[strategy], unsplit, dtype, dtype, "float32", kernels=kernels, expert_products=products)
    layout = layout.for_generation()
    with jax.set_mesh(mesh), announcing(f"reading {source}", peers.print_progress):
        arch = describe(cfg, layout)
        params, tokenizer = load_params(str(source), cfg, arch, layout, mesh, weights)
    files = folder / FILES if run else folder
    tokenizer_files = folder / TOKENIZER if run else folder
    has_files = (files / "config.json").is_file()  # not in a run that went on from one without them
    model = Pretrained(cfg, mesh, layout, arch, params, files if has_files else None, tokenizer, tokenizer_files)
    if not run:
        return replace(model, gives_vectors=adapter is not None and has_sentence_files(updates))
    saved = read_saved(folder)
    options = saved["task"].get("chat_template_kwargs")
    return replace(
        model,
        stop_strings=validate(SamplingKeys, saved["sampling"], "sampling").stop,
        template_options=options if isinstance(options, dict) else {},
        gives_vectors=saved["task"]["name"] == "embed",
    )


def load_language_model(source: str | Path, *arguments: Any, **named_arguments: Any) -> Pretrained:
    """Load a model that gives logits, with the arguments of `load_pretrained`.

    Raises:
        UserError: as `load_pretrained`; or the model gives scores.
    """
    model = load_pretrained(source, *arguments, **named_arguments)
    if (labels := model.cfg.labels) is not None:
        raise UserError(
            f"checkpoint={source} gives {', '.join(labels)} and no text; python -m tunix.evaluate measures it"
        )
    return model


def reject_nan(log_probs: Iterable[Sequence[float] | np.ndarray], source: str, precise: str, first: int = 1) -> None:
    """Raise `UserError` where scores of tokens are no numbers: what is drawn from them is always token 0.

    `log_probs` are those of several texts, of which the first one has the number `first`; `source` is the value of the
    key checkpoint, and `precise` sets products of float32.
    """
    for number, scores in enumerate(log_probs, first):
        if np.isnan(scores).any():
            raise UserError(
                f"checkpoint={source}: the scores of tokens of text {number} are no numbers (NaN): weights are not "
                f"finite, or numbers overflow; take another checkpoint, or {precise}"
            )


def load_params(
    source: str, cfg: Model, arch: Architecture, layout: Layout, mesh: Mesh, weights: str = "trained"
) -> tuple[Params, Tokenizer | None]:
    """Load the parameters as `layout` has them at rest, and the tokenizer, of a run or of Hugging Face's files.

    Low-rank updates beside Hugging Face's files are those of `model.init_adapter`.
    """
    if run := find_run(source):
        checkpoint = agree_on_checkpoint(run[0] / "checkpoints", run[1])
        reject_other_files(checkpoint, f"checkpoint={source}")
        if peers.first_of_host():
            reject_damaged_checkpoint(checkpoint)
        with describe_unreadable(checkpoint):
            params = _restore_params(checkpoint, arch, abstract_params(arch, mesh), weights)
            index, step = find_storage(checkpoint)
            return params, Tokenizer.from_str(index.read(step, "tokenizer/metadata"))
    folder = _fetch(source, INFO_FILES + WEIGHTS)
    reject_other_files(folder, f"checkpoint={source}")
    if weights != "trained":
        raise UserError(f"weights={weights}: {folder} is no run of tunix and has one set of weights; weights=trained")
    if peers.first_of_host():
        reject_damaged(folder, "checkpoint", CHANGED)
    params = load_weights(folder, cfg, arch.weights, layout, mesh)
    if cfg.init_adapter is not None:
        adapter = find_adapter(cfg.init_adapter)
        reject_other_files(adapter, f"adapter={cfg.init_adapter}")
        if peers.first_of_host():
            reject_damaged(adapter, "adapter", CHANGED)
        params = write_updates(params, adapter, cfg, arch.weights, layout, mesh)
    return params, read_backend(folder)


def reject_other_files(folder: Path, name: str) -> None:
    """Raise `UserError` where processes have different files of a model: weights of two models would be mixed.

    `folder` has files of Hugging Face's, or is a checkpoint. `name` is the key that names it, with its value.
    """
    if jax.process_count() > 1:
        patterns = (*INFO_FILES, *WEIGHTS, *CHECKPOINT_FILES)
        files = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        peers.reject_others(sample_files(folder, files, num_blocks=4), name, "files")


def describe_files(source: str, cfg: Model) -> dict[str, Any]:
    """Return what `load_pretrained` takes about Hugging Face's files beside their folder; a run has all of it."""
    return {} if find_run(source) else {"family": cfg.family, "adapter": cfg.init_adapter}


def find_adapter(source: str) -> Path:
    """Return the folder of an adapter, downloaded if `source` is an ID."""
    return find(source, INFO_FILES + WEIGHTS, key="model.init_adapter")


def _fetch(source: str, patterns: tuple[str, ...], key: str = "checkpoint") -> Path:
    """Return the folder of Hugging Face's files; of several processes, the first of each host downloads them."""
    return peers.main_first(lambda: find(source, patterns, key=key), f"looking for the {key}")


def find_checkpoint(checkpoints: Path, step: int | None, key: str = "checkpoint") -> Path:
    """Return the folder of a run's checkpoint; step None is the newest, `key` is for messages."""
    steps = list_numbers(checkpoints)
    if not steps or step not in (None, *steps):
        message = f"no checkpoint of step {step}; it has {', '.join(map(str, steps))}" if steps else "no checkpoint yet"
        raise UserError(f"{key}: {checkpoints} has {message}")
    return (checkpoints / str(steps[-1] if step is None else step)).absolute()


def agree_on_checkpoint(checkpoints: Path, step: int | None) -> Path:
    """Return the folder of a run's checkpoint, that of the same step on every process; all of them call this.

    Where the run still trains, the newest is another one a moment later: weights of two steps would be mixed.
    """
    agreed = peers.decide(lambda: int(find_checkpoint(checkpoints, step).name), "the checkpoint")

    def look() -> Path:
        folder = (checkpoints / str(agreed)).absolute()
        if not folder.is_dir():
            raise UserError(
                f"checkpoint: {folder} is not seen by {socket.gethostname()}, but by process 0; all hosts must see it: "
                "copy it to a disk that they share"
            )
        return folder

    return peers.together(look, "looking for the checkpoint")


def _restore_params(checkpoint: Path, arch: Architecture, abstract: Params, weights: str) -> Params:
    """Read the parameters of a checkpoint: the trained ones, or one of the copies that the run has kept of them."""
    index, step = find_storage(checkpoint)
    if weights == "trained":
        return index.restore(step, {"params": abstract})["params"]
    names = ["trained", *find_parts(index, step)["copies"]]
    if weights not in names:
        raise UserError(
            f"weights={weights}: {checkpoint} has weights={', '.join(names)}; training.ema_decay keeps an average"
        )
    # A copy has the trained parameters only; frozen ones do not change, so they are those of the run.
    state = index.restore(step, {"params": arch.frozen(abstract), "copies": {weights: arch.trained(abstract)}})
    return arch.merge(state["copies"][weights], state["params"])


# Weights that a run starts from: those of `model.init_from`, a run of tunix or a model of Hugging Face's.


def check_init_from(cfg: Config, arch: Architecture) -> None:
    """Fetch the files that `model.init_from` names and read their headers, before anything is written.

    Raises:
        UserError: files that are not complete, damaged, or of another model; a run without a checkpoint.
    """
    source = cfg.model.init_from
    if source is None:
        return
    if run := find_run(source, "model.init_from"):
        checkpoint = _find_checkpoint_of(cfg, *run)
        if peers.first_of_host():
            reject_damaged_checkpoint(checkpoint, "model.init_from")
    else:
        folder = find(source, INFO_FILES + WEIGHTS)
        if peers.first_of_host():
            reject_damaged(folder, "model.init_from", CHANGED)
        check_weights(folder, cfg.model, arch.weights)
    if cfg.model.init_adapter is not None:
        folder = find_adapter(cfg.model.init_adapter)
        if peers.first_of_host():
            reject_damaged(folder, "model.init_adapter", CHANGED)
        check_adapter(folder, cfg.model, arch.weights)


def load_init_from(train_spec: TrainSpec, mesh: Mesh) -> dict[str, Any] | None:
    """Load the parameters of `model.init_from` on the mesh, with None for those that it lacks; None if it is not set.

    Low-rank updates are those of `model.init_adapter`, if it is set.
    """
    model = train_spec.cfg.model
    if model.init_from is None:
        return None
    params = _load_base(train_spec, mesh, model.init_from)
    if model.init_adapter is None:
        return params
    adapter = find_adapter(model.init_adapter)
    reject_other_files(adapter, f"model.init_adapter={model.init_adapter}")
    return write_updates(params, adapter, model, train_spec.arch.weights, train_spec.layout, mesh)


def _load_base(train_spec: TrainSpec, mesh: Mesh, source: str) -> dict[str, Any]:
    if run := find_run(source, "model.init_from"):
        # A run without low-rank updates has no arrays for them: they are left out of the read, and made by step 0. So
        # are scores, of a run of a language model.
        abstract, absent = abstract_params(train_spec.arch, mesh), {"lora"}
        if read_saved(run[0])["model"]["labels"] is None:
            absent.add("score")
        paths = flatten_dict(abstract)
        present = {path: leaf for path, leaf in paths.items() if not absent & {*path}}
        checkpoint = _find_checkpoint_of(train_spec.cfg, *run)
        reject_other_files(checkpoint, f"model.init_from={source}")
        with describe_unreadable(checkpoint, "model.init_from"):
            index, step = find_storage(checkpoint)
            params = index.restore(step, {"params": unflatten_dict(present)})["params"]
            return unflatten_dict(dict.fromkeys(paths) | flatten_dict(params))
    folder = find(source, INFO_FILES + WEIGHTS)
    reject_other_files(folder, f"model.init_from={source}")
    return load_weights(folder, train_spec.cfg.model, train_spec.arch.weights, train_spec.layout, mesh)


def _find_checkpoint_of(cfg: Config, folder: Path, step: int | None) -> Path:
    if cfg.model.lora.quantize_base:
        raise UserError(
            f"model.lora.quantize_base={cfg.model.lora.quantize_base} quantizes weights of Hugging Face's files only; "
            f"write them first: python -m tunix.export checkpoint={folder} output=DIR, then model.init_from=DIR"
        )
    return find_checkpoint(folder / "checkpoints", step, "model.init_from")
