"""Write a trained model as a Hugging Face directory: `python -m tunix.export checkpoint=RUN_DIR output=DIR`."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

from tunix.base.buckets import is_address, is_bucket, list_names, upload
from tunix.base.digests import FILE, list_files, write_digests
from tunix.base.errors import UserError
from tunix.base.files import (
    describe_refusal,
    expand_home,
    read_json,
    remove_left,
    replacing,
    temporary_folder,
    write_tokenizer,
)
from tunix.base.forms import sign
from tunix.base.progress import announcing
from tunix.base.text import flat
from tunix.checkpoints.store import describe_unreadable, find_storage, reject_damaged_checkpoint
from tunix.config import Export, pretrained_config
from tunix.config.command_line import run_command
from tunix.config.saved_runs import find_run, read_saved
from tunix.config.vision import AnyVision
from tunix.data.tokenizer import PAD, SPECIAL_TOKENS, TEMPLATES, Vocab, find_tokenizer_files, load_vocab, token_text
from tunix.data.tokenizer import read_settings as read_tokenizer_settings
from tunix.huggingface import gguf_file, hub
from tunix.huggingface.adapter import gather_adapter, gather_score
from tunix.huggingface.adapter_config import CONFIG, HEAD, WEIGHTS, name_in_auto_model, write_adapter_config
from tunix.huggingface.config_json import read_num_rows, write_config
from tunix.huggingface.hub import copy_files, list_copied_files
from tunix.huggingface.sentence_vectors import copy_files as copy_sentence_files
from tunix.huggingface.sentence_vectors import write_files as write_sentence_files
from tunix.huggingface.table import find_family
from tunix.huggingface.vision_keys import PROCESSOR_FILES, write_processor
from tunix.huggingface.weights import list_tensors, save_tensors, save_weights
from tunix.inference.pretrained import Pretrained, find_checkpoint, load_pretrained
from tunix.inference.sampling import TOKEN_IDS, read_token_ids
from tunix.processes import peers
from tunix.run.history import read_history
from tunix.run.model_card import write_card

GENERATION = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")  # of the weights of an export
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", SPECIAL_TOKENS, "added_tokens.json", "vocab.json",
    "merges.txt", *TEMPLATE_FILES,
)  # fmt: skip


def export(command: Export) -> str:
    """Write the folder `command.output`, which appears complete or not at all; return a line about it.

    Several processes split the files of weights among them; process 0 writes what is small.

    Raises:
        UserError: the output exists, the checkpoint cannot be read, or PEFT has no form for the adapter.
    """
    if command.push is not None:
        peers.on_main(lambda: hub.create(str(command.push), command.private), "making the model on the hub")
    if command.format == "state":
        return _export_state(command)
    load = partial(
        load_pretrained, command.checkpoint, weights=command.weights, family=command.family, adapter=command.adapter
    )
    write_whole = partial(_write_gguf, command.checkpoint) if command.format == "gguf" else None
    add_files = partial(_add_files, command)
    exporter = Exporter(load, command.dtype, command.shard_gb, command.merge_lora, write_whole, add_files)
    line = exporter.write(command.output)
    if command.push is not None:
        folder = expand_home(command.output)
        address = peers.on_main(lambda: hub.upload(folder, str(command.push)), "sending files to the hub")
        line += f"; sent to {address}" if address else ""
    return line


def _export_state(command: Export) -> str:
    """Write all arrays of a run's checkpoint into one file, by process 0, which needs memory for them."""
    run, output = find_run(command.checkpoint), expand_home(command.output)
    if run is None:
        raise UserError(f"format=state: checkpoint={command.checkpoint} is no run of tunix; it has weights alone")
    checkpoint = find_checkpoint(run[0] / "checkpoints", run[1])

    def write() -> str:
        if output.exists() or is_address(command.output):
            raise UserError(f"output={command.output}: format=state writes a new file on this machine; name one")
        reject_damaged_checkpoint(checkpoint)
        storage, step = find_storage(checkpoint)
        with describe_unreadable(checkpoint):
            arrays = storage.read_arrays(step)
            texts = {name: storage.read(step, f"{name}/metadata") for name in ("run", "tokenizer")}
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            remove_left(output)
            with replacing(output) as new:
                save_tensors(arrays, new, texts)
        except (OSError, SafetensorError) as error:
            reason = describe_refusal(error) if isinstance(error, OSError) else error
            raise UserError(f"output={output} cannot be written: {reason}") from None
        size = sum(array.nbytes for array in arrays.values())
        return f"{output}: the state after step {step}, {len(arrays)} arrays, {size / 1e9:.3f} GB"

    return peers.on_main(write, "writing the state") or ""


@dataclass(frozen=True)
class Exporter:
    """Writes the folder of a model, on this machine or in a bucket."""

    load: Callable[..., Pretrained]  # returns the model, for a sharding `strategy`
    dtype: str | None
    shard_gb: float
    merge_lora: bool
    write_whole: "Write | None" = None  # writes a whole model in another form than Hugging Face's
    add_files: Callable[[Path, Pretrained], None] | None = None  # writes more into the folder, on process 0

    def write(self, output: str) -> str:
        """Write the folder, which appears complete or not at all; return a line about it. See `export`."""
        return self._write_to_bucket(output) if is_address(output) else self._write_folder(expand_home(output))

    def _write_folder(self, output: Path) -> str:
        def check() -> None:
            if output.exists() and (not output.is_dir() or any(output.iterdir())):
                raise UserError(f"output={output} exists already; name a new folder")

        peers.on_main(check, "checking output")
        # One process has each weight whole. Several split the weights, which one alone may not have the memory for.
        model = self.load(strategy="no_shard" if jax.process_count() == 1 else "full_shard")
        adapter = model.cfg.lora.rank and not self.merge_lora
        if adapter and self.write_whole is not None:
            raise UserError("format=gguf holds whole models; add the updates to the matrices: merge_lora=true")
        # An adapter is small: it loses no digit.
        dtype = self.dtype or ("float32" if adapter else _find_dtype(model.files))
        write, add_files = _write_adapter if adapter else self.write_whole or _write_model, self.add_files
        try:
            with ExitStack() as stack:
                folder = _make_folder(output, stack)
                with announcing(f"writing {output}", peers.print_progress):
                    line = write(model, folder, dtype, self.shard_gb)
                if add_files is not None:
                    peers.on_main(lambda: add_files(folder, model), "writing files about the model")
                kind = "adapter" if adapter else "export"
                peers.on_main(lambda: write_digests(folder, list_files(folder), **sign(kind)), "writing the digests")
        except OSError as error:
            raise UserError(f"output={output} cannot be written: {describe_refusal(error)}") from None
        return f"{output}: {line}"

    def _write_to_bucket(self, address: str) -> str:
        """Write the folder on this machine first, then into the bucket, with its digests as the last object."""

        def check() -> None:
            if not is_bucket(address):
                raise UserError(
                    f"output={address} cannot be written; name a folder, s3://BUCKET/NAME or gs://BUCKET/NAME"
                )
            if list_names(address, "output"):
                raise UserError(f"output={address} exists already; name a new folder")

        peers.on_main(check, "checking output")
        with ExitStack() as stack:
            made = stack.enter_context(temporary_folder("tunix-export-")) if peers.is_main() else ""
            folder = Path(peers.agree(made, "the folder")) / "export"
            line = self._write_folder(folder)
            peers.on_main(lambda: upload(folder, address, "output", last=FILE), "writing to the bucket")
        return line.replace(str(folder), address, 1)


def _make_folder(output: Path, stack: ExitStack) -> Path:
    """Make the folder to write in, and return its path on every process.

    When `stack` is closed without an error the folder gets the name `output`; after an error it is removed.
    """

    def make() -> str:
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_left(output)  # a killed export's, which may be as large as the model
        folder = stack.enter_context(replacing(output))
        folder.mkdir()
        return str(folder)

    return Path(peers.decide(make, "making the folder"))


def _write_model(model: Pretrained, folder: Path, dtype: str, shard_gb: float) -> str:
    _reject_keys_outside_family(model)
    model = model.merged()
    size = save_weights(folder, model.params, model.cfg, model.arch.weights, dtype, shard_gb)

    def write_others() -> None:
        tokens = _find_token_ids(model)
        _write_json(folder / "config.json", write_config(model.cfg) | tokens | {"dtype": dtype})
        _write_json(folder / GENERATION, _describe_generation(model, tokens))
        if model.cfg.vision is not None:
            _write_processor(model.cfg.vision, model, folder)
        _write_tokenizer(model, folder)

    peers.on_main(write_others, "writing the config and the tokenizer")
    return f"{model.cfg.family}, {model.arch.num_parameters:,} parameters in {dtype}, {size / 1e9:.3f} GB"


def _reject_keys_outside_family(model: Pretrained) -> None:
    """Raise `UserError` for a model that other programs would compute as its family, and so otherwise."""
    if reason := pretrained_config.describe_keys_outside_family(model.cfg):
        raise UserError(f"the run's model cannot be written as a {model.cfg.family}: {reason}")


def _write_processor(vision: AnyVision, model: Pretrained, folder: Path) -> None:
    """Write the files with which transformers makes of an image what the model has seen: those of its source, unless
    their sizes or tiles are others."""
    own, source = write_processor(vision), model.files
    if source is not None:
        found = pretrained_config.trained_model(source, model.cfg.mesh_shape, model.cfg.family).vision
        if found is not None and write_processor(found) == own and copy_files(source, PROCESSOR_FILES, folder):
            return
    for name, content in own.items():
        _write_json(folder / name, content)


def _write_gguf(checkpoint: str, model: Pretrained, folder: Path, dtype: str, shard_gb: float) -> str:
    """Write model.gguf, which holds the tokenizer too, and a Modelfile for Ollama; `shard_gb` splits nothing."""
    if jax.process_count() > 1:
        raise UserError("format=gguf is written by one process: start one")
    gguf_file.check(model.cfg, dtype)
    _reject_keys_outside_family(model)
    model, path = model.merged(), folder / gguf_file.FILE
    tensors = list_tensors(model.params, model.cfg, model.arch.weights)
    stops: dict[int, str] = {}
    if (backend := model.tokenizer) is not None:
        stops = {index: token for index in model.find_stop_ids() if (token := backend.id_to_token(index)) is not None}
    with temporary_folder("tunix-tokenizer-") as tokenizer:
        _write_tokenizer(model, Path(tokenizer))
        _write_vector_files(checkpoint, Path(tokenizer), model)
        name = folder.name.split(".")[0]
        size = gguf_file.write_gguf(path, tensors, model.cfg, Path(tokenizer), [*stops], dtype, name)
    gguf_file.write_modelfile(folder, [*stops.values()])
    count = model.arch.num_parameters
    return f"{model.cfg.family} as {gguf_file.FILE}, {count:,} parameters in {dtype}, {size / 1e9:.3f} GB"


Write = Callable[[Pretrained, Path, str, float], str]


def _add_files(command: Export, folder: Path, model: Pretrained) -> None:
    """Write what the run's task and the hub want beside the model."""
    add_vector_files(command.checkpoint, folder, model)
    if command.push is not None:
        _write_card(command, folder, model)


def add_vector_files(checkpoint: str, folder: Path, model: Pretrained) -> None:
    """Write what sentence-transformers wants beside a model or an adapter, where `checkpoint` is a run of task=embed or
    a folder that has it."""
    if (folder / "config.json").is_file() or model.gives_vectors:
        _write_vector_files(checkpoint, folder, model)


def _write_vector_files(checkpoint: str, folder: Path, model: Pretrained) -> None:
    run = find_run(checkpoint)
    if run is None and model.gives_vectors:  # those of the adapter, and not of its base
        adapter = Path(str(model.cfg.init_adapter))
        copy_sentence_files(adapter, folder)
        copy_files(adapter, ("tokenizer.json", "tokenizer_config.json"), folder)
    elif run is None and model.files is not None:
        copy_sentence_files(model.files, folder)
    task = read_saved(run[0])["task"] if run else {}
    if task.get("name") == "embed":
        vocab = model.vocab or load_vocab(str(model.tokenizer_files))
        pad = PAD if vocab.backend.token_to_id(PAD) is not None else vocab.eos_token  # nothing reads what stands there
        sizes = model.cfg.embed_dim, model.cfg.context_length
        write_sentence_files(folder, task["pooling"], *sizes, vocab.backend, vocab.bos_token, vocab.eos_token, pad)


def _write_card(command: Export, folder: Path, model: Pretrained) -> None:
    """Write the page of the model for the hub, out of the files of the run up to its checkpoint, if it is one."""
    keys, steps, evaluations, results = dict[str, Any](), list[Any](), list[Any](), None
    if run := find_run(command.checkpoint):
        keys = flat(read_saved(run[0]))
        if (run[0] / "metrics.jsonl").is_file():
            history, step = read_history(run[0]), int(find_checkpoint(run[0] / "checkpoints", run[1]).name)
            steps, evaluations = (
                [line for line in lines if line["step"] <= step] for lines in (history.steps, history.evaluations)
            )
        if (run[0] / "results.json").is_file():
            results = read_json(run[0] / "results.json")
    base = model.cfg.init_from if run else command.checkpoint
    if keys.get("task.name") == "embed" or (folder / "modules.json").is_file():
        kind = "sentence-similarity"
    elif model.cfg.labels is not None:
        kind = "text-classification"
    else:
        kind = "text-generation" if model.cfg.vision is None else "image-text-to-text"
    write_card(folder, str(command.push).rpartition("/")[2], kind, base, keys, steps, evaluations, results)


def _write_adapter(model: Pretrained, folder: Path, dtype: str, shard_gb: float) -> str:
    """Write the low-rank updates alone, as PEFT stores them: lora_A [r, in], lora_B [out, r]."""
    cfg, lora = model.cfg, model.cfg.lora
    if lora.train_also is not None:
        raise UserError(f"{lora.train_also} is trained fully, which an adapter does not hold; set merge_lora=true")
    if model.files is not None and (in_base := read_num_rows(model.files, find_family(cfg.family))) < cfg.vocab_size:
        raise UserError(
            f"the model has {cfg.vocab_size} rows of vocabulary, {cfg.vocab_size - in_base} more than its base; "
            "an adapter does not hold them; set merge_lora=true"
        )
    tensors, modules = gather_adapter(model.params, cfg, model.arch.weights, dtype)
    if cfg.labels is not None:  # PEFT keeps a head that is trained whole beside the updates (modules_to_save)
        tensors[HEAD] = np.ascontiguousarray(gather_score(model.params).astype(jnp.dtype(dtype)))
    output = "scores" if cfg.labels is not None else "vectors" if model.gives_vectors else "logits"
    if output == "vectors":
        tensors = {name_in_auto_model(name): tensor for name, tensor in tensors.items()}

    def write_files() -> None:
        save_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
        _write_json(folder / CONFIG, write_adapter_config(cfg, modules, output))
        _write_tokenizer(model, folder)

    peers.on_main(write_files, "writing the adapter")
    size = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return f"adapter for PEFT of rank {lora.rank}, {size:,} parameters; merge_lora=true writes the whole model"


def _find_dtype(files: Path | None) -> str:
    """Return the dtype of the Hugging Face files from which the model was trained; float32 if there are none, or they
    say another (auto, or that of 8-bit codes)."""
    if files is None:
        return "float32"
    whole = read_json(files / "config.json")
    # As in transformers, the key of the whole says what the files have: model.float() leaves that of a part as it was.
    parts = whole, whole.get("text_config") or {}
    found = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in found if dtype in DTYPES), "float32")


def _list_special_tokens(vocab: Vocab) -> dict[str, str]:
    """Return the special tokens of a run's tokenizer by Hugging Face's keys: beginning, end, and padding."""
    pad = PAD if vocab.backend.token_to_id(PAD) is not None else None
    tokens = {"bos_token": vocab.bos_token, "eos_token": vocab.eos_token, "pad_token": pad}
    return {key: token for key, token in tokens.items() if token is not None}


def _find_token_ids(model: Pretrained) -> dict[str, Any]:
    """Return the ids of special tokens: those of the run's own tokenizer, or those in the source's config.json.

    A token that the run's tokenizer lacks is null: for a key that is not there transformers takes the id that the
    published models of the family have, which may be another token here, or none.
    """
    vocab = model.vocab
    if vocab is not None and not model.has_source_tokenizer:
        found = {f"{key}_id": vocab.backend.token_to_id(token) for key, token in _list_special_tokens(vocab).items()}
        return dict.fromkeys(TOKEN_IDS) | found
    return {} if model.files is None else read_token_ids(read_json(model.files / "config.json"))


def _describe_generation(model: Pretrained, tokens: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: that of the source, with the ids in `tokens` and all that end an answer."""
    path = None if model.files is None else next(list_copied_files(model.files, (GENERATION,)), None)
    before = tokens if path is None else read_json(path)
    if model.vocab is None:
        return before
    if not model.has_source_tokenizer:
        before = {key: value for key, value in before.items() if key not in TOKEN_IDS} | tokens
    first, *others = stops = model.find_stop_ids()
    named = before.get("eos_token_id")
    is_complete = sorted(named if isinstance(named, list) else [named]) == [*stops]
    return before if is_complete else before | {"eos_token_id": [first, *others] if others else first}


def _write_tokenizer(model: Pretrained, folder: Path) -> None:
    """Write the tokenizer: the run's own, or the source's files with the run's chat template if that differs."""
    vocab, config_file = model.vocab, folder / "tokenizer_config.json"
    if vocab is not None and not model.has_source_tokenizer:
        write_tokenizer(folder, vocab.with_bos())
        length = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.cfg.context_length}
        more: dict[str, Any] = {} if vocab.chat_template is None else {"chat_template": _write_template(vocab)}
        if (images := vocab.images) is not None:  # by the names that processors of transformers ask for
            image_tokens = {"boi_token": images.begin, "image_token": images.soft, "eoi_token": images.end}
            more["extra_special_tokens"] = image_tokens
        _write_json(config_file, _list_special_tokens(vocab) | length | more)
        _write_processors_template(vocab, folder)
        return
    if model.files is None:
        return
    copy_files(model.files, (*TOKENIZER_FILES, f"{TEMPLATES}/*.jinja"), folder)
    if vocab is None:
        return
    read = find_tokenizer_files(str(model.files))
    read.pop(SPECIAL_TOKENS, None)  # format=gguf, and the converter of llama.cpp, read tokenizer_config.json alone
    settings = read_tokenizer_settings(read)
    tokens = {"bos_token": vocab.bos_token, "eos_token": vocab.eos_token}
    changes = {key: token for key, token in tokens.items() if token != token_text(getattr(settings, key))}
    if changes and (folder / SPECIAL_TOKENS).is_file():
        _write_json(folder / SPECIAL_TOKENS, read_json(folder / SPECIAL_TOKENS) | changes)
    if vocab.chat_template != load_vocab(str(model.files), vocab.bos_token, vocab.eos_token).chat_template:
        # A template in a file of its own wins over the one in tokenizer_config.json.
        for name in TEMPLATE_FILES:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / TEMPLATES, ignore_errors=True)
        changes["chat_template"] = _write_template(vocab)
        _write_processors_template(vocab, folder)
    if changes:
        before = read_json(config_file) if config_file.is_file() else {}
        _write_json(config_file, before | changes)


def _write_template(vocab: Vocab) -> str | None:
    """Return the chat template of an export; that of a model that sees takes turns of parts."""
    if vocab.images is None or vocab.chat_template is None:
        return vocab.chat_template
    return vocab.chat.source_for_processors


def _write_processors_template(vocab: Vocab, folder: Path) -> None:
    """Write the chat template of a model that sees for its processor, which does not read the tokenizer's."""
    if vocab.images is not None and (template := _write_template(vocab)) is not None:
        (folder / TEMPLATE_FILES[0]).write_text(template)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(Export, export))
