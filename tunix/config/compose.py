"""From a command line to a checked `Config`. Imports no jax.

    words -> Hydra composes conf/ and the words -> architecture of model.init_from -> pydantic checks -> Job

With resume=RUN_DIR the saved config of that run takes the place of conf/. Every error is one line that names the key,
the value and the way out (`tunix.config.mistakes`). Read `compose` first.
"""

import glob
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from tunix.base.buckets import is_address, join
from tunix.base.config_types import CONF, list_options
from tunix.base.errors import UserError, did_you_mean, is_masked, mask_values
from tunix.base.files import describe_missing, expand_home, names_file
from tunix.base.text import flat, format_yaml
from tunix.config import Config, Grpo, Slurm
from tunix.config.data import Mixture
from tunix.config.foreign_names import read_rows
from tunix.config.mistakes import (
    describe_errors,
    describe_unknown_key,
    find_foreign,
    raise_answers,
    reject_newer,
    reject_number,
    validate,
)
from tunix.config.pretrained_config import (
    count_rows,
    fill_from_adapter,
    fill_from_pretrained,
    fill_from_run,
    fill_labels,
    fill_reward_models,
    fill_teacher,
)
from tunix.config.saved_runs import OUTPUTS, find_resume_point, find_run, read_root, read_saved, split_step, upgrade
from tunix.data.files import Rows, Source
from tunix.data.sources import Custom, Tokens
from tunix.optimizers.schedules import SHAPES

# word                        means
# group=option                take the file conf/GROUP/OPTION.yaml
# section.key=value           change one value
# evaluation.sets.NAME=FILE   take the file conf/data/FILE.yaml as one more set, in the form that Hydra has for it

SEARCH = "hydra.searchpath="


def select_set(word: str) -> str:
    """Return evaluation.sets.NAME=CHOICE, with a file of conf/data as the choice, in the form that Hydra has for it."""
    match = re.fullmatch(r"\+*evaluation\.sets\.(\w+)=(\w+)", word)
    if match is None:
        return word
    if match[2] not in (choices := list_options("data")):
        raise UserError(f"{word}: takes a file of conf/data ({', '.join(choices)}){did_you_mean(match[2], choices)}")
    return f"+data@evaluation.sets.{match[1]}={match[2]}"


def add_implied_model(overrides: list[str]) -> list[str]:
    """Add model=pretrained to the overrides, if they have model.init_from without a model.

    The folder decides what kind of MLP the model has. So keys of an MLP are added: no file of values has them yet.
    """
    parsed = {word.split("=")[0] for word in overrides}
    if "model.init_from" not in parsed or "model" in parsed:
        return overrides
    return ["model=pretrained", *(f"++{word}" if word.startswith("model.mlp.") else word for word in overrides)]


def add_search_path(overrides: list[str], *folders: str | Path | None) -> list[str]:
    """Add the override that makes Hydra look for config files in these folders too; None is skipped. Raises `UserError`
    where a folder does not exist."""
    existing = [Path(folder) for folder in folders if folder]
    for folder in existing:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder}: there is no such folder")
    paths = ",".join(f"'file://{folder.absolute()}'" for folder in existing)
    word = f"{SEARCH}[{paths}]"
    return [*overrides, word] if paths and word not in overrides else overrides


def check_keys(overrides: list[Override]) -> None:
    """Raise `UserError` for keys of other programs, which names ours; Hydra would name a section alone."""
    answers = []
    for override in overrides:
        key = override.key_or_group
        value = "null" if override.is_delete() else str(override.input_line).partition("=")[2]
        section, point, _ = key.partition(".")
        if hint := find_foreign(key, value):
            answers.append((key, hint))
        elif point and section not in {*Config.model_fields, "hydra"}:
            answers.append((key, describe_unknown_key(key).partition("; ")[2]))
    raise_answers("unknown key {}; {}", answers)


def check_choice(override: Override) -> None:
    """Raise `UserError` if a group gets a value that is not the name of one of its files: `mesh_shape=[[8],[fsdp]]`.

    Several experiments go together: they change keys of other sections.
    """
    group = override.key_or_group
    if not (CONF / group).is_dir() or override.is_delete() or override.is_sweep_override():
        return
    value: Any = override.value()
    choices = value if isinstance(value, list) and group == "experiment" else [value]
    if not all(isinstance(choice, str) for choice in choices):
        keys = "shapes go to model.mesh_shape" if group == "mesh_shape" else f"its keys are set by {group}.KEY=VALUE"
        options = ", ".join(list_options(group))
        raise UserError(f"{override.input_line}: takes a file of conf/{group} ({options}); {keys}")


def compose_file(file: Path, overrides: Sequence[str] = (), *, with_hydra: bool = False) -> DictConfig:
    """Compose a file of values, given without its suffix, with overrides; `with_hydra` adds Hydra's own settings."""
    # Hydra keeps one state for the whole process, and refuses a second composition without this.
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(file.parent.absolute()), version_base="1.3"):
        return hydra.compose(file.name, list(overrides), return_hydra_config=with_hydra)


def compose_overrides(overrides: list[str], config_dir: str | Path | None = None, name: str = "config") -> DictConfig:
    """Compose a config, by default conf/config.yaml, with overrides."""
    if config_dir is not None and not any(word.startswith(SEARCH) for word in overrides):
        overrides = add_search_path(overrides, CONF)
    return compose_file(Path(config_dir or CONF) / name, overrides, with_hydra=True)


def compose_saved(run_dir: Path, parsed: list[Override]) -> DictConfig:
    """Compose the saved config of a run with overrides.

    A choice of a group (`optimizer=lion`) replaces that part of the saved config; a key (`training.max_steps=9`)
    changes one value. So the choices are composed first, from conf/, and their parts are put into the saved config;
    then Hydra composes the result with the keys.

        conf/ + choices -> parts of the groups ----+
        RUN_DIR/config.yaml -> brought up to date -+-> + keys -> config
    """
    values = read_saved(run_dir)
    reject_newer(values, run_dir)
    saved = OmegaConf.create(values)
    # Two kinds of words: choices of a group, and keys. A choice may be for another place than the section of its group,
    # as of `sampling@evaluation.sampling=standard` and `+data@evaluation.sets.NAME=text`.
    groups = [word for word in parsed if (CONF / word.key_or_group).is_dir() and isinstance(word.value(), str)]
    search = [str(word.input_line) for word in parsed if str(word.input_line).startswith(SEARCH)]
    # A model's file may choose the group `training` too. The default keeps such settings out of the saved config.
    neutral = [] if any(word.key_or_group == "training" for word in groups) else ["training=default"]
    chosen = compose_overrides([str(word.input_line) for word in groups] + neutral + search)
    for word in groups:
        group, place = word.key_or_group, word.package or word.key_or_group
        if group == "experiment":
            raise UserError("resume goes on with the saved config; name the keys to change in place of +experiment")
        mesh_shape = saved.model.mesh_shape  # a choice of the model keeps the mesh
        if (part := OmegaConf.select(chosen, place)) is not None:
            OmegaConf.update(saved, place, part, merge=False)
        saved.model.mesh_shape = chosen.model.mesh_shape if group == "mesh_shape" else mesh_shape
    # Hydra composes files only; its store takes a tree of values in the place of one.
    ConfigStore.instance().store(name="saved_run", node=OmegaConf.to_container(saved))
    return compose_overrides([str(word.input_line) for word in parsed if word not in groups], name="saved_run")


IDENTITY = ("coordinator_address", "num_processes", "process_id", "local_device_ids")  # keys of `distributed`


@dataclass(frozen=True)
class Job:
    """A checked config and the folder of its run."""

    config: Config
    overrides: list[str]  # as typed
    run_dir: Path  # a new run takes this folder, or a free one beside it
    run_dir_is_explicit: bool  # the user chose the folder: a new run takes no other
    resume_step: int | None = None  # the STEP of resume=RUN_DIR/checkpoints/STEP
    came_from: str | None = None  # a resumed run: the folder or address with the checkpoints of the run before
    hydra: dict[str, Any] | None = None  # Hydra's own settings, saved in the run's folder

    @property
    def goes_on_in_folder(self) -> bool:
        """True for a resumed run whose folder is there; one that is resumed from a bucket gets a new folder."""
        return self.config.resume is not None and not is_address(self.config.resume)


def compose(overrides: list[str], config_dir: str | Path | None = None, config_name: str = "config") -> Job:
    """Compose and check the config of a run, new or resumed. Raises `UserError` with a line for each error."""
    overrides = [select_set(word) for word in overrides]
    with describe_errors():
        typed = OverridesParser.create().parse_overrides(overrides)
        check_keys(typed)
        for override in typed:
            check_choice(override)
            reject_number(override)
        parsed = {override.key_or_group: override for override in typed}
        if "resume" in parsed and parsed["resume"].value() is not None:
            return _compose_resumed(overrides, typed, parsed)
        composed = compose_overrides(add_implied_model(overrides), config_dir, config_name)
        settings = {"hydra": OmegaConf.to_container(composed.hydra, resolve=False, enum_to_str=True)}
        run_dir = expand_home(composed.hydra.run.dir)
        return Job(check(composed), overrides, run_dir, "hydra.run.dir" in parsed, hydra=settings)


def check_sweep(overrides: list[str], config_dir: str | Path | None = None, config_name: str = "config") -> list[Job]:
    """Compose and check every point of a grid, so that an error in the last point is found before the first one runs.

    Returns the points; none if another sweeper chooses them while the sweep runs.
    """
    if any(override.startswith("hydra/sweeper") for override in overrides):
        return []
    parsed = OverridesParser.create().parse_overrides(overrides)
    for override in parsed:
        if override.is_interval_sweep():
            raise UserError(
                f"{override.input_line}: a sweep tries listed values, like {override.key_or_group}=0.1,0.2; "
                "docs/extending.md shows a search in an interval"
            )
        reject_number(override)
    points = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    jobs = [compose(list(point), config_dir, config_name) for point in points]
    if any(job.config.resume for job in jobs):
        raise UserError("resume goes on with one run; it cannot be part of a sweep")
    homes = [home for job in jobs if (home := job.config.checkpoint.folder)]
    if shared := next((home for home in homes if homes.count(home) > 1), None):
        raise UserError(
            f"checkpoint.folder={shared} has the checkpoints of several points of the sweep, and is for those of one; "
            "give each its own, as 'checkpoint.folder=DIR/${seed}' does in a sweep of seed"
        )
    return jobs


def quote_path(path: Path | str) -> str:
    """Return a path as a value of an override, in quotes where Hydra's grammar needs them."""
    if re.fullmatch(r"[\w/.:+-]+", str(path)):
        return str(path)
    escaped = str(path).replace("'", "\\'")
    return f"'{escaped}'"


def format_resume(run_dir: Path | str) -> str:
    """Return `resume=RUN_DIR` as it is typed: in quotes for Hydra and for a shell, where they are needed."""
    return shlex.quote(f"resume={quote_path(run_dir)}")


def dated_folder(config: Config) -> Path:
    """Return the run folder that Hydra would choose now."""
    return OUTPUTS / config.project_name / time.strftime("%Y-%m-%d/%H-%M-%S")


def check(composed: DictConfig, fresh: bool = True, typed: Collection[str] = ()) -> Config:
    """Resolve the interpolations of a composed config, fill in what depends on files, and check it.

    A saved config (not `fresh`) is complete: nothing is filled in, but for the models that the keys `typed` name.
    """

    def is_new(key: str) -> bool:
        return fresh or any(f"{each}.".startswith(f"{key}.") for each in typed)

    with describe_errors():
        values: dict[Any, Any] = {str(key): composed[key] for key in composed if key != "hydra"}
        for key, value in values.items():
            if OmegaConf.is_config(value):
                values[key] = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    upgrade(values)
    if not all(isinstance(values.get(section), dict) for section in ("model", "task", "tokenizer", "data")):
        return build(values)  # which says what is missing, as after `~model`
    for key, value in flat(values).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and is_masked(text):
                raise UserError(f"{key}: {text} lacks its secret, which no file of a run keeps; give {key} again")
    if fresh and values["model"].get("init_from"):
        if run := find_run(str(values["model"]["init_from"]), "model.init_from"):
            fill_from_run(values, *run)
        else:
            fill_from_pretrained(values)
        if values["model"].get("init_adapter"):
            fill_from_adapter(values["model"])
    elif fresh and values["model"].get("init_adapter"):
        raise UserError(
            f"model.init_adapter={values['model']['init_adapter']} updates the matrices of a base; give it too: "
            "model.init_from=DIR"
        )
    elif values["model"].get("family", "") is None:
        raise UserError("model=pretrained needs model.init_from=DIR or an ID of the Hugging Face hub")
    if is_new("task.teacher") and values["task"].get("teacher"):
        fill_teacher(values["task"])
    if is_new("task.rewards") and isinstance(values["task"].get("rewards"), list):
        fill_reward_models(values["task"])
    if values["model"].get("vocab_size") == "auto":
        values["model"]["vocab_size"] = count_rows(values)
    fill_labels(values)
    return build(values)


def build(values: dict[Any, Any]) -> Config:
    """Check plain values, as YAML has them, and return the config; raises `UserError` with a line for each error."""
    return validate(Config, values)


def to_yaml(config: Config) -> str:
    """Format the resolved config as it is saved in the run's folder; `--config-path RUN_DIR` runs it again.

    Two things are left out, since another job may resume from it: which process of the run this was, and
    `loading.allow_changed_data`, which applies to one resume only. Passwords and signatures of addresses are masked.
    """
    tree = mask_values(_drop_identity(config))
    tree["loading"]["allow_changed_data"] = False
    return format_yaml(tree)


def list_info(config: Config) -> dict[str, Any]:
    """Return every key, with its value, on which all processes of a run must agree."""
    # Hosts may keep their caches in different folders.
    return {key: value for key, value in flat(_drop_identity(config)).items() if key != "loading.cache_dir"}


def _drop_identity(config: Config) -> dict[str, Any]:
    """Return the config as plain values, without the keys that tell processes apart."""
    distributed = config.distributed.model_copy(update=dict.fromkeys(IDENTITY))
    return config.model_copy(update={"distributed": distributed}).model_dump(mode="json", by_alias=True)


def _compose_resumed(overrides: list[str], words: list[Override], parsed: dict[str, Override]) -> Job:
    """Compose the job that goes on with the run of `resume`; `parsed` are the overrides by their keys. A group may be
    in several of them, each for a place of its own."""
    if parsed["resume"].is_sweep_override():
        raise UserError(f"{parsed['resume'].input_line}: resume goes on with one run; name one")
    source = str(parsed["resume"].value())
    project = str(parsed["project_name"].value()) if "project_name" in parsed else None
    run_dir, step = find_resume_point(source, project)
    typed = expand_home(str(parsed["hydra.run.dir"].value())) if "hydra.run.dir" in parsed else None
    if typed and not is_address(source) and typed.resolve() != run_dir.resolve():
        raise UserError(
            f"hydra.run.dir={typed}: resume={source} goes on in the run's own folder, {run_dir}; leave hydra.run.dir "
            f"out, or begin a run there with the weights alone: model.init_from={source}"
        )
    composed = compose_saved(run_dir, words)
    # The run has its tokenizer in its folder. Without a path one would be trained on a changed corpus, which the model
    # does not know; and what the path names may be gone, or on another machine.
    path = composed.tokenizer.path
    is_trained = path is None and composed.loading.allow_changed_data
    is_gone = path and names_file(path) and not is_address(path) and not expand_home(path).exists()
    if is_trained or ("tokenizer.path" not in parsed and is_gone and (run_dir / "tokenizer").is_dir()):
        saved = split_step(source)[0] if is_address(source) else str(run_dir.absolute())
        composed.tokenizer.path = join(saved, "tokenizer")
    root = split_step(source)[0] if is_address(source) else read_root(run_dir)
    if "checkpoint.folder" not in parsed:
        composed.checkpoint.folder = root
    config = check(composed, fresh=False, typed=parsed)
    folder, is_explicit = run_dir, True
    if is_address(source):  # `run_dir` is a copy of the bucket's files here; the run takes a new folder
        folder, is_explicit = typed or dated_folder(config), typed is not None
    return Job(config, overrides, folder, is_explicit, resume_step=step, came_from=root or str(run_dir))


def check_inputs(job: Job) -> None:
    """Raise `UserError` for what a run would be refused for before its first step, as far as files tell it."""
    reject_foreign_vocab(job)
    reject_missing_inputs(job)


def reject_missing_inputs(job: Job) -> None:
    """Raise `UserError` for data or a tokenizer that is not there, and for folders that are addresses of buckets.

    A job may wait in a queue for hours: a typo in a path is found before, on the machine that submits it. A job in a
    container sees other files than this machine: then only addresses are refused. A script that is only written
    (launcher.dry_run) may be for another machine: what is not here is a remark.
    """
    cfg = job.config
    for key, folder in (("hydra.run.dir", str(job.run_dir)), ("loading.cache_dir", cfg.loading.cache_dir)):
        if ":/" in folder:
            address = re.sub(r":/+", "://", folder, count=1)  # a `Path` keeps one slash of two
            raise UserError(
                f"{key}={address}: a bucket cannot be written there; name a folder of this machine or of a "
                f"shared disk{' (checkpoint.folder may be in a bucket)' if key == 'hydra.run.dir' else ''}"
            )
    try:
        str(run_dir := job.run_dir.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"hydra.run.dir={run_dir}: the name is no UTF-8; choose another folder") from None
    if any(re.fullmatch(r"hydra\.run\.dir=['\"]*", word) for word in job.overrides):
        raise UserError("hydra.run.dir is empty; name a folder, or leave it out")
    if job.run_dir_is_explicit and not (cfg.resume or cfg.dry_run) and (job.run_dir / "config.yaml").exists():
        raise UserError(f"hydra.run.dir={job.run_dir} holds another run; {format_resume(job.run_dir)} goes on with it")
    launcher = cfg.launcher
    if launcher.name == "kubernetes" or (isinstance(launcher, Slurm) and launcher.container_image is not None):
        return
    for key, source in _list_parts(cfg).items():
        if cfg.task.supports_text:
            if isinstance(source, Rows) and not isinstance(source, Custom) and source.columns.text is None:
                raise UserError(
                    f"{key}.columns.text is not set, and task={cfg.task.name} reads it: name the column of the text, "
                    "or choose a task for these rows, like task=sft"
                )
        elif not isinstance(source, Rows | Tokens):
            raise UserError(
                f"task={cfg.task.name} needs rows with columns, and {key}.source={source.source} gives plain text: "
                "choose rows, like data=jsonl data.paths=[FILE], or task=pretrain"
            )
    for key, path in _list_paths(cfg):
        expanded = str(expand_home(path))
        matches = glob.iglob(expanded, recursive=True) if glob.has_magic(expanded) else ()
        if ":/" in path or Path(expanded).exists() or any(matches):
            continue
        if not (isinstance(launcher, Slurm) and launcher.dry_run):
            raise UserError(f"{key}: {describe_missing(path)}")
        print(f"remark: {key}: {path} does not exist here; the job reads it", file=sys.stderr)


def _list_parts(cfg: Config) -> dict[str, Source]:
    """Return the source of the data, or those of a mixture, each by its key."""
    if isinstance(cfg.data, Mixture):
        return {f"data.parts.{name}": part for name, part in cfg.data.parts.items()}
    return {"data": cfg.data}


def _list_paths(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the paths of the data and of the tokenizer, each with its key."""
    for key, source in _list_parts(cfg).items():
        for path in getattr(source, "paths", None) or ():
            yield f"{key}.paths", path
    if isinstance(cfg.launcher, Slurm) and cfg.launcher.dry_run and cfg.launcher.train_script:
        yield "launcher.train_script", cfg.launcher.train_script
    template = getattr(cfg.task, "chat_template", None) or ""
    if not cfg.resume and "{" not in template and Path(template).suffix in (".jinja", ".jinja2", ".j2", ".txt"):
        yield "task.chat_template", template
    path = cfg.tokenizer.path
    if path is None or cfg.tokenizer.train:
        return
    if names_file(path):
        yield "tokenizer.path", path


# Command lines that are legal and probably not what the user wants: refused, or answered with a remark.

OWN_SIZES = {"tiny", "pretrained"}  # choices of `model` whose vocabulary is that of the run's tokenizer
DIMENSIONS = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
TINY_SETTINGS = ("optimizer.learning_rate", "training.max_steps", "training.seq_len")


def reject_foreign_vocab(job: Job) -> None:
    """Raise `UserError` for a model of a published size whose tokenizer would be a small one, trained here.

    Most rows of its embedding would never be trained. A dry run reports them instead (`count_idle_rows`).
    """
    cfg, typed = job.config, _typed(job)
    name = typed.get("model", "tiny")
    published = set(list_options("model")) - OWN_SIZES
    if cfg.resume or cfg.dry_run or cfg.model.init_from or name not in published or "model.vocab_size" in typed:
        return
    if idle := count_idle_rows(cfg, None):
        raise UserError(
            f"model={name} has {cfg.model.vocab_size:,} rows of vocabulary, and the tokenizer trained here would have "
            f"{cfg.tokenizer.vocab_size:,} tokens: {idle:,} rows would never be trained. Give its own tokenizer "
            "(tokenizer.path=FILE_OR_ID), start from its weights and tokenizer (model.init_from=FOLDER_OR_ID), or give "
            "the model as many rows as the tokenizer has tokens (model.vocab_size=auto)"
        )


def count_idle_rows(cfg: Config, num_tokens: int | None) -> int:
    """Return how many rows of the embedding belong to no token; 0 if that is normal.

    It is normal where a tenth of all rows or less have no token, and where model.vocab_size=auto gives as many rows.

    Args:
        num_tokens: tokens of the tokenizer; None where it is not read yet. Then the answer is known only for a
            tokenizer that the run trains itself.
    """
    if num_tokens is None and (cfg.tokenizer.path is not None or cfg.data.source == "tokens"):
        return 0
    from tunix.data.tokenizer import pad_rows  # here: its libraries take longer than checking a config

    assert isinstance(cfg.model.vocab_size, int)
    num_tokens = cfg.tokenizer.vocab_size if num_tokens is None else num_tokens
    rows = cfg.model.vocab_size
    return rows - num_tokens if rows - num_tokens > rows // 10 and rows > pad_rows(num_tokens) else 0


def list_remarks(job: Job, environment: Mapping[str, str]) -> list[str]:
    """Return what a user may not expect of a run, to be logged at its start."""
    remarks = remark_on_repeated(job.overrides), remark_on_tiny(job), remark_on_random(job), remark_on_unread(job)
    return [remark for remark in (*remarks, remark_on_environment(job, environment)) if remark]


def remark_on_repeated(words: Sequence[str]) -> str:
    """Return a remark for keys that the words of a command line give twice, with different values."""
    values: dict[str, list[str]] = {}
    for key, mark, value in (word.partition("=") for word in words):
        if mark:
            values.setdefault(key.lstrip("+"), []).append(value)
    remarks = [
        f"{key} is given {len(others)} times: the last value counts, {others[-1]}"
        for key, others in values.items()
        if len(set(others)) > 1
    ]
    return "; ".join(remarks)


def remark_on_tiny(job: Job) -> str:
    """Return a remark for a model that is `tiny` with other dimensions, and trains with the settings of tiny."""
    typed = _typed(job)
    changed = [f"model.{name}" for name in DIMENSIONS if f"model.{name}" in typed]
    default_keys = [key for key in TINY_SETTINGS if key not in typed]
    chosen = any(word.startswith(("training=", "optimizer=", "+experiment", "experiment")) for word in job.overrides)
    if job.config.resume or typed.get("model", "tiny") != "tiny" or not changed or not default_keys or chosen:
        return ""
    return (
        f"{', '.join(changed)} {'are' if len(changed) > 1 else 'is'} given, the rest is that of model=tiny: also "
        f"{', '.join(default_keys)}, which {'are' if len(default_keys) > 1 else 'is'} chosen for 1 million parameters; "
        "training=default is for larger models"
    )


def remark_on_random(job: Job) -> str:
    """Return a remark for random weights where a user may expect pretrained ones: below LoRA, and in rollouts."""
    cfg = job.config
    if cfg.resume or cfg.model.init_from:
        return ""
    way_out = "model.init_from=FOLDER_OR_ID starts from weights"
    if cfg.model.lora.rank:
        return f"model.lora.rank={cfg.model.lora.rank}: the frozen base is random; {way_out}"
    if isinstance(cfg.task, Grpo):
        return f"task=grpo: the model is random, and answers that earn no reward teach nothing; {way_out}"
    return ""


DECAYING = [name for name, shape in SHAPES.items() if shape.has_decay]  # schedules that fall at their end

# Keys that nothing reads while another key is off: which ones, whether they are read, and the key that is off.
UNREAD: tuple[tuple[str, Callable[[Config, str], object], str], ...] = (
    (r"model\.lora\.(?!rank$)", lambda cfg, key: cfg.model.lora.rank,
     "model.lora.rank=0 trains all weights; give a rank"),
    (r"scheduler\.decay_", lambda cfg, key: cfg.scheduler.shape.has_decay,
     f"the schedule has no decay at its end; scheduler.name={' or '.join(DECAYING)} has one"),
    (r"task\.teacher_", lambda cfg, key: getattr(cfg.task, "teacher", None),
     "task.teacher=null; name a run, or a model's folder or ID"),
    (r"task\.simpo_gamma$", lambda cfg, key: getattr(cfg.task, "objective", None) == "simpo",
     "it is of task.objective=simpo"),
    (r"task\.(max_turns|tool_calls|episode_timeout_s|environment_\w+)$|(evaluation\.)?sampling\.max_turn_tokens$",
     lambda cfg, key: getattr(cfg.task, "environment", None),
     "task.environment=null; name one"),
    (r"task\.importance$",
     lambda cfg, key: isinstance(cfg.task, Grpo) and cfg.task.on_policy and cfg.task.max_importance,
     "it is of one step a rollout with a number for task.max_importance"),
    (r"task\.clip_(low|high)$", lambda cfg, key: getattr(cfg.task, "clip", None) != "soft",
     "task.clip=soft has no limits"),
    (r"task\.kl$", lambda cfg, key: getattr(cfg.task, "kl_coefficient", None),
     "task.kl_coefficient=0; give a number"),
    (r"task\.curriculum\.turns$", lambda cfg, key: isinstance(cfg.task, Grpo) and cfg.task.curriculum.is_used,
     "no prompt is left out; give task.curriculum.solved or task.curriculum.unsolved"),
    (r"training\.(spike_window|max_spikes)$", lambda cfg, key: cfg.training.spike_deviations,
     "training.spike_deviations=null skips no spike; give a number"),
    (r"training\.ema_(dtype|memory)$", lambda cfg, key: cfg.training.ema_decay,
     "training.ema_decay=null keeps no average"),
    (r"evaluation\.min_improvement$", lambda cfg, key: cfg.evaluation.patience,
     "evaluation.patience=null; give a number"),
    (r"tokenizer\.(vocab_size|train_bytes)$", lambda cfg, key: cfg.tokenizer.path is None or cfg.tokenizer.train,
     "the tokenizer is read from tokenizer.path or model.init_from, and none is trained"),
    (r"logging\.(wandb|mlflow|webhook|prometheus)\.", lambda cfg, key: key.split(".")[1] in cfg.logging.sinks,
     "logging.sinks does not name the sink"),
)  # fmt: skip


def remark_on_unread(job: Job) -> str:
    """Return a remark for keys of the command line that nothing reads, because another key is off."""
    remarks = []
    for pattern, is_read, reason in UNREAD:
        if keys := [key for key in _typed(job) if re.match(pattern, key) and not is_read(job.config, key)]:
            remarks.append(f"{', '.join(keys)}: nothing reads {'them' if len(keys) > 1 else 'it'}: {reason}")
    return "; ".join(remarks)


def remark_on_environment(job: Job, environment: Mapping[str, str]) -> str:
    """Return a remark for variables of other programs that nothing reads here, with the keys that do the same."""
    typed, remarks = _typed(job), []
    for row in read_rows():
        names = [name for name in row.there if name.isupper() and name in environment]
        if names and row.here.partition("=")[0] not in typed:
            remarks.append(
                f"{names[0]}={environment[names[0]]}: nothing reads this variable; {row.answer(environment[names[0]])}"
            )
    return "; ".join(remarks)


def _typed(job: Job) -> dict[str, str]:
    """Return the words of the command line by their keys."""
    return {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in job.overrides}
