"""Architectures of models that exist already: a folder of Hugging Face's, an adapter, a run of tunix.

The values of the section `model` come from three places:

    config.json                    the keys that it has          (huggingface/config_json.py)
    conf/model/family/NAME.yaml    all other keys                (or `values` of a family of the user's own)
    the command line               must agree with both, else an error: nothing is changed in silence
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from yaml import YAMLError

from tunix.base.buckets import is_address, join
from tunix.base.config_types import CONF, Count, Positive
from tunix.base.dotted_path import is_dotted
from tunix.base.errors import UserError
from tunix.base.files import expand_home, list_numbers, read_json
from tunix.base.forms import reject_newer_form
from tunix.config import Model, Tokenizer
from tunix.config.layers import PROJECTIONS, Mtp
from tunix.config.mistakes import reject_newer, validate
from tunix.config.model import list_keys_outside
from tunix.config.saved_runs import COPIED, find_run, read_saved, split_step
from tunix.config.task import AnyTask
from tunix.config.vision import TOWER
from tunix.data.sources import Tokens
from tunix.huggingface import config_json, hub
from tunix.huggingface.adapter_config import find_labels, list_projections, read_adapter
from tunix.huggingface.table import find_family

# Keys of the model that are no part of an architecture: sections and single keys, keys of experts, keys of a tower.
OUTSIDE = {key for key in list_keys_outside() if "." not in key}
OUTSIDE_MLP = {key.removeprefix("mlp.") for key in list_keys_outside("losses")}
OUTSIDE_VISION = {key.removeprefix("vision.") for key in list_keys_outside() if key.startswith("vision.")}


def fill_from_pretrained(values: dict[Any, Any]) -> None:
    """Set the architecture in `values` from the folder of `model.init_from`, and the tokenizer unless one is given.

    The model may have more rows of vocabulary than the folder, for new tokens.

    Raises:
        UserError: a key of the model that contradicts config.json.
    """
    model, tokenizer = values["model"], values["tokenizer"]
    # A dry run fetches no tokenizer, unless the number of its tokens is asked for.
    needs_config_alone = values.get("dry_run") and model.get("vocab_size") != "auto"
    folder = hub.find(str(model["init_from"]), hub.CONFIG if needs_config_alone else hub.INFO_FILES)
    if tokenizer.get("path") is None and not _is_byte_level(tokenizer):
        tokenizer["path"] = str(folder)
    family = model.get("family")
    own = family if family is not None and is_dotted(str(family)) else None
    if own is not None:
        try:
            find_family(own)
        except UserError as error:
            raise UserError(f"model.family={own}: {error}") from None
    read, source = config_json.read_config(folder, own, preferred=family), f"{folder}/config.json"
    read["vocab_size"] = _find_num_rows(values, read["vocab_size"], source)
    _fill_architecture(model, read, source)


def _is_byte_level(tokenizer: dict[Any, Any]) -> bool:
    """Return whether the user chose tokenizer=bytes, which is then that of a model of other weights, too."""
    values: Any = OmegaConf.load(CONF / "tokenizer" / "bytes.yaml")
    return tokenizer.get("vocab_size") == values.vocab_size


def _find_num_rows(values: dict[Any, Any], in_files: int, source: str) -> int:
    """Return the rows of vocabulary of a model whose initial weights have `in_files` rows."""
    given = values["model"].get("vocab_size")
    if given == "auto":
        given = count_rows(values, at_least=in_files)
    if not isinstance(given, int):
        return in_files
    if given < in_files:
        raise UserError(
            f"model.vocab_size={given}, but {source} says {in_files}: rows are added, never taken away; leave it out"
        )
    values["model"]["vocab_size"] = given
    return given


def count_rows(values: dict[Any, Any], at_least: int = 0) -> int:
    """Return the rows of the embedding table (model.vocab_size=auto) for the tokenizer that the run will have.

    `at_least` is the number of rows of the initial weights. It stays if the tokenizer has no more tokens.
    """
    from tunix.data.tokenizer import pad_rows, read_vocab  # here: it takes longer than checking a config

    tokenizer, data = validate(Tokenizer, values["tokenizer"], "tokenizer"), values["data"]
    if tokenizer.path is None and data.get("source") == "tokens":  # a prepared folder brings its tokenizer
        folder = validate(Tokens, data, "data", "tokens").paths[0]
        if not (is_address(folder) or (expand_home(folder) / "tokenizer").exists()):
            raise UserError(f"data.paths: {folder} brings no tokenizer; set tokenizer.path to the one of its tokens")
        tokenizer = tokenizer.model_copy(update={"path": f"{folder}/tokenizer"})
    is_new = tokenizer.path is None or tokenizer.train
    num_tokens = tokenizer.vocab_size if is_new else read_vocab(tokenizer).num_tokens
    return at_least if num_tokens <= at_least else pad_rows(num_tokens)


def _fill_architecture(model: dict[Any, Any], read: dict[str, Any], source: str) -> None:
    """Set the keys of the model to those read from a config.json, on top of the values of its family."""
    name = read["family"]
    family: Any = OmegaConf.to_container(_read_parts(find_family(name).values or _file_of_values(name)))
    mlp = {**family["mlp"], **read.get("mlp", {})}
    vision = {**family["vision"], **read.get("vision", {})} if family["vision"] else None
    parts = {**family, **read, "mlp": mlp, "vision": vision}
    values: Any = OmegaConf.to_container(OmegaConf.create(parts), resolve=True)
    _fill(model, {key: values[key] for key in values.keys() - OUTSIDE - {"defaults"}}, source)


@cache
def _load_file(path: Path) -> Any:
    """Return the values of a file, read once. The caller copies them before it changes one."""
    return OmegaConf.to_container(OmegaConf.load(path))


def _file_of_values(family: str) -> Path:
    return CONF / "model" / "family" / f"{family}.yaml"


def _read_parts(values: dict[str, Any] | Path) -> Any:
    """Return the values of a family, or of a file of them, on top of those of the files that its `defaults` name.
    Raises `UserError` where there is no such file, or its defaults are no families of tunix."""
    try:
        own: Any = OmegaConf.create(values if isinstance(values, dict) else _load_file(values))
        # Choices that are no texts are of other sections.
        names = [choice for choice in own.pop("defaults", []) if isinstance(choice, str)]
        below = [_read_parts(_file_of_values(name.removesuffix("@_here_"))) for name in names]
        return OmegaConf.merge(*below, own)
    except (OSError, AttributeError, YAMLError) as error:
        raise UserError(f"model.family: the values {values} cannot be read: {error}") from None


def _fill(model: dict[Any, Any], decided: dict[str, Any], source: str) -> None:
    """Set keys of the model to the values `decided`, which come from the file `source`. The user may give keys that say
    how experts are trained: they change nothing in what the weights compute. Raises `UserError` where the user has
    given a key with another value."""
    for key in sorted(decided):
        given = model.get(key)
        values: dict[Any, Any] = {}
        if key == "mlp" and given is not None:
            values = dict(given)
            decided["mlp"] |= {name: values.pop(name) for name in OUTSIDE_MLP if name in values}
            # The file decides whether experts have biases. Where they have, the user may change the rate.
            if values.get("bias_rate") is not None and decided["mlp"].get("bias_rate") is not None:
                decided["mlp"]["bias_rate"] = values.pop("bias_rate")
        elif key == "vision" and given is not None:
            values = {name: value for name, value in given.items() if value is not None}
            if values and decided["vision"] is None:
                name, value = next(iter(values.items()))
                raise UserError(f"model.vision.{name}={value}, but the model of {source} does not see; leave it out")
            if values:
                decided["vision"] |= {name: values.pop(name) for name in OUTSIDE_VISION if name in values}
        elif given is not None and given != decided[key]:
            raise UserError(f"model.{key}={given}, but {source} says {decided[key]}; leave it out")
        for name, value in values.items():
            if value != (found := decided[key].get(name)):
                raise UserError(f"model.{key}.{name}={value}, but {source} says {found}; leave it out")
        model[key] = decided[key]


def fill_from_adapter(model: dict[Any, Any]) -> None:
    """Set rank, alpha, targets and form of the low-rank updates from the adapter of `model.init_adapter`.

    Raises:
        UserError: the user has given one of these keys with another value, or the adapter updates a frozen tower.
    """
    source, lora = str(model["init_adapter"]), model["lora"]
    folder = hub.find(source, hub.INFO_FILES + hub.WEIGHTS, key="model.init_adapter")
    read = read_adapter(folder, model["family"])
    labels = find_labels(folder, model.get("labels"))
    model["labels"] = labels and list(labels)
    updates_tower = any(name.startswith(TOWER) and re.search(read["targets"], name) for name in PROJECTIONS)
    if updates_tower and model["vision"] and model["vision"]["freeze_tower"]:
        raise UserError(
            f"model.vision.freeze_tower=True, but the adapter in {folder} updates the tower; "
            "set model.vision.freeze_tower=false"
        )
    defaults: Any = OmegaConf.load(CONF / "model" / "family" / "common.yaml").lora
    existing = set().union(*list_projections(find_family(model["family"])).values())

    def resolve(key: str, value: Any) -> Any:
        """Return the projections that `targets` matches: two regular expressions may mean the same."""
        return sorted(name for name in existing if re.search(str(value), name)) if key == "targets" else value

    for key, value in read.items():
        if resolve(key, lora[key]) == resolve(key, value):
            continue
        # A value of the family's file was not typed by the user, so the adapter may replace it.
        if lora[key] != defaults[key]:
            raise UserError(
                f"model.lora.{key}={lora[key]}, but the adapter in {folder} has {key}={value}; leave it out"
            )
        lora[key] = value


TASK: TypeAdapter[AnyTask] = TypeAdapter(AnyTask)  # made once: that takes longer than to check a task


def fill_labels(values: dict[Any, Any]) -> None:
    """Give the model the labels of its task, where it has none yet, or as many that nobody has named."""
    try:
        wanted = TASK.validate_python(values["task"]).output_labels
    except ValidationError:  # the check of the whole config says what is wrong
        return
    found = values["model"].get("labels")
    if wanted is None:
        return
    if found is None or (len(found) == len(wanted) and (len(found) == 1 or config_json.are_unnamed(found))):
        values["model"]["labels"] = list(wanted)


def fill_from_run(values: dict[Any, Any], folder: Path, step: int | None) -> None:
    """Set architecture, tokenizer and checkpoint from the run in `folder`, which `model.init_from` names.

    `step` None means the newest checkpoint. Its number is written into the config: that run may go on and save more
    checkpoints, and a resumed run must still know the weights that it started from.

    Raises:
        UserError: the user has given a key of the model with another value, or the run trained low-rank updates.
    """
    model, tokenizer, saved = values["model"], values["tokenizer"], read_saved(folder)
    reject_newer(saved, folder)
    found = saved["model"]
    if found["lora"]["rank"]:
        raise UserError(
            f"model.init_from={model['init_from']} has low-rank updates beside its matrices; add them first: "
            f"python -m tunix.export checkpoint={folder} output=DIR merge_lora=true, then model.init_from=DIR"
        )
    _fill(model, {key: found[key] for key in found.keys() - OUTSIDE}, f"{folder}/config.yaml")
    if (model.get("mtp") is None) != (found["mtp"] is None):
        way_out = "leave it out" if found["mtp"] is None else "give it, with a loss_weight"
        raise UserError(f"model.mtp={model.get('mtp')}, but {folder}/config.yaml says {found['mtp']}; {way_out}")
    first = found["layers_before_stages"]  # their weights have arrays of their own
    if model.get("layers_before_stages") not in (None, first):
        raise UserError(
            f"model.layers_before_stages={model['layers_before_stages']}, but {folder}/config.yaml says {first}; leave "
            f"it out, or begin with the export of the run: python -m tunix.export checkpoint={folder} output=DIR, then "
            "model.init_from=DIR"
        )
    model["layers_before_stages"] = first
    source = str(model["init_from"])
    if tokenizer.get("path") is None and not _is_byte_level(tokenizer):
        tokenizer["path"] = join(_find_root(source, folder), "tokenizer")
    model["init_from"] = _name_checkpoint(source, folder, step)


def _find_root(source: str, folder: Path) -> str:
    """Return where a run is: its address, of which `folder` has copies, or the path of `folder`."""
    return split_step(source)[0] if is_address(source) else str(folder.resolve())


def _name_checkpoint(source: str, folder: Path, step: int | None) -> str:
    """Return the checkpoint of a run by its path or address; `step` None is the newest of those in `folder`."""
    root, steps = _find_root(source, folder), list_numbers(folder / "checkpoints")
    at = max(steps, default=None) if step is None else step
    return root if at is None else join(root, "checkpoints", str(at))


# The teacher of a run: a run of tunix or a model of Hugging Face's.

TEACHER, REWARDS = "task.teacher", "task.rewards"  # the keys that name other models


def fill_teacher(task: dict[Any, Any]) -> None:
    """Write the checkpoint of the run that `task.teacher` names into it, as `fill_from_run` does; others stay.

    Raises:
        UserError: it names neither a run nor a model.
    """
    source = str(task["teacher"])
    if (info := read_logits_info(source)) is not None:
        if "teacher_top_k" not in task:
            raise UserError(
                f"{TEACHER}={source} holds logits of documents, and task={task['name']} learns from answers of its "
                "own; give the model that made them"
            )
        if task["teacher_top_k"] not in (None, info.top_k):
            raise UserError(
                f"{TEACHER}={source} was made with task.teacher_top_k={info.top_k}, not {task['teacher_top_k']}; leave "
                "it out"
            )
        task |= {"teacher": str(expand_home(source).resolve()), "teacher_top_k": info.top_k}
        return
    if run := find_run(source, TEACHER):
        task["teacher"] = _name_checkpoint(source, *run)
    read_teacher(str(task["teacher"]))


LOGITS_FILE = "teacher_logits.json"


class LogitsInfo(BaseModel):
    """Facts of the logits in a folder, and of what they were made of (data/teacher_logits.py)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    top_k: Count
    temperature: Positive
    dtype: Literal["float16", "float32"]  # of their log-probabilities
    num_rows: Count  # of the vocabulary, that both models have
    rows_per_piece: Count
    teacher: str  # digest of its files
    tokenizer: str  # digest
    seq_len: Count
    packing: str
    images: str  # their sizes and slots; empty without images


def read_logits_info(source: str) -> LogitsInfo | None:
    """Return what a folder of a teacher's logits says of itself; None where `source` is none. Raises `UserError` where
    its file is damaged, or of a newer version."""
    path = expand_home(source) / LOGITS_FILE
    if not path.is_file():
        return None
    record = read_json(path)
    reject_newer_form(record, path)
    try:
        return LogitsInfo.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{TEACHER}: {path} is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']}); make it again"
        ) from None


def fill_reward_models(task: dict[Any, Any]) -> None:
    """Write the checkpoint of each run that a term of task.rewards names into its path, as `fill_teacher` does. Raises
    `UserError` where a path names neither a run nor a model, or a model that does not give one number."""
    for term in task["rewards"]:
        if not isinstance(term, dict) or term.get("function") != "model" or not term.get("path"):
            continue
        source = str(term["path"])
        if run := find_run(source, REWARDS, copied=COPIED):
            folder, step = run
            term["path"] = _name_checkpoint(source, folder, step)
        else:
            folder = hub.find(source, hub.INFO_FILES, key=REWARDS)
        try:
            check_gives_reward(trained_model(folder, "auto"))
        except UserError as error:
            raise UserError(f"{REWARDS}: path={source}: {error}") from None


def check_gives_reward(model: Model) -> None:
    """Raise `UserError` for a model that does not give one number."""
    if model.labels is None or len(model.labels) != 1:
        gives = "logits" if model.labels is None else ", ".join(model.labels)
        raise UserError(f"the model gives {gives}, not one number; train one with task=reward")


@cache  # a plan asks for it on hundreds of meshes
def read_teacher(source: str) -> Model:
    """Return the architecture of the model that `task.teacher` names, whose mesh is that of the run."""
    run = find_run(source, TEACHER, copied=COPIED)
    folder = run[0] if run else hub.find(source, hub.INFO_FILES, key=TEACHER)
    try:
        model = trained_model(folder, "auto")
    except UserError as error:
        raise UserError(f"{TEACHER}={source}: {error}") from None
    if model.labels is not None:
        raise UserError(f"{TEACHER}={source} gives {', '.join(model.labels)} and no text; a teacher gives logits")
    return model


def trained_model(folder: Path, mesh_shape: Any, family: str | None = None, mtp: bool = False) -> Model:
    """Return the model of a run's folder, or of one of Hugging Face's, on another mesh.

    `family` is the dotted path of the user's own family, for a folder of Hugging Face's. With `mtp` the model of such
    a folder has the layer of `model.mtp`, if its family has one.
    """
    if not (folder / "config.yaml").is_file():
        read = config_json.read_config(folder, family, "checkpoint")
        if "vision" in read:  # a model is asked about images in the sizes of its processor; a run chooses its own
            read["vision"] |= config_json.read_limits(folder, read["vision"]["kind"])
        model = _describe_model(read, f"{folder}/config.json", mesh_shape)
        has_layer = mtp and find_family(model.family).mtp_names
        return model.model_copy(update={"mtp": Mtp(loss_weight=1.0)}) if has_layer else model
    saved = read_saved(folder)
    reject_newer(saved, folder)
    return validate(Model, saved["model"] | {"mesh_shape": mesh_shape}, "model")


def _describe_model(read: dict[str, Any], source: str, mesh_shape: Any) -> Model:
    """Return the model that a config.json describes."""
    files = (_load_file(CONF / "model" / name) for name in ("family/common.yaml", "pretrained.yaml"))
    values: Any = OmegaConf.to_container(OmegaConf.merge(*files))
    del values["defaults"]
    _fill_architecture(values, read, source)
    return validate(Model, values | {"mesh_shape": mesh_shape}, "model")


def describe_keys_outside_family(cfg: Model) -> str:
    """Return in words which keys of the model its family's config.json cannot express; empty if there are none."""
    # The config is translated to config.json and back. A key that comes back with another value cannot be expressed.
    try:
        source = "its config.json"
        read = config_json.translate_config(config_json.write_config(cfg), source, cfg.family)
        expressed = _describe_model(read, source, cfg.mesh_shape)
    except UserError as error:
        return str(error)
    ours, theirs = (
        # config.json says that experts have biases, and nothing about their rate.
        keys | {"mlp": keys["mlp"] | {"bias_rate": keys["mlp"].get("bias_rate") is not None}}
        for keys in (cfg.architecture, expressed.architecture)
    )
    other = [key for key in sorted(Model.model_fields.keys() - OUTSIDE) if ours[key] != theirs[key]]
    # Another pattern of layers is no difference where each layer has the same window, one as long as the context.
    if cfg.list_windows(cfg.context_length) == expressed.list_windows(cfg.context_length):
        other = [key for key in other if key not in ("global_every", "sliding_window")]
    return ", ".join(f"model.{key}={getattr(cfg, key)} (a {cfg.family} has {getattr(expressed, key)})" for key in other)
