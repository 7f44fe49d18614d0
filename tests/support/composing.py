"""Remember what Hydra makes of conf/ for the same choices of files: thousands of tests compose a config.

Hydra reads some 30 files for each config, builds the list of defaults and merges the files; then come the overrides of
single keys. The first part takes two thirds of the time and depends on the chosen files alone, of which the tests choose
few. Only conf/config.yaml and what it names in conf/ is remembered, for all processes of a session of tests: the saved
config of a run and a folder that a test writes are read each time. Each file, each section of merged files, what a word
of an override says and how an interpolation is parsed are remembered too, and YAML is read by libyaml.
"""

import copy
import os
import pickle
import tempfile
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import omegaconf._utils
import omegaconf.base
import pytest
import yaml
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf._utils import get_yaml_loader

from tunix.base.config_types import CONF
from tunix.base.files import replacing

OWN = {"hydra.conf", str(CONF.absolute()), ""}  # places of config files: Hydra's, ours, those of schemas

if (SHARED := "TUNIX_TESTS_COMPOSED") not in os.environ:
    made = tempfile.TemporaryDirectory(prefix="tunix-tests-")  # removed when this process ends
    os.environ[SHARED] = made.name
FOLDER = Path(os.environ[SHARED])  # the processes that this one starts share it

_lists: dict[Any, DefaultsList] = {}  # by the chosen files
_merged: dict[Any, bytes] = {}  # the files merged, pickled, by the chosen files
_sections: dict[Any, bytes] = {}  # the files of one section merged, pickled, by these files
_overrides: dict[str, Override] = {}  # by the word
_files: dict[str, bytes] = {}  # the content of a file with its list of defaults, pickled, by the path below conf/
_groups: dict[str, bool] = {}  # whether it is a folder of choices, by the path below conf/
_load_file, _find_group = ConfigRepository.load_config, ConfigRepository.group_exists
_parse = OverridesParser.parse_rule
_list_all_choices = defaults_list._create_interpolation_map
_make_list, _merge = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list


def remember() -> None:
    """Let Hydra remember, in this process."""
    config_loader_impl.create_defaults_list = _remember_list
    ConfigLoaderImpl._compose_config_from_defaults_list = _remember_merged
    defaults_list._create_interpolation_map = _list_choices
    ConfigRepository.load_config = _remember_file
    ConfigRepository.group_exists = _remember_group
    ConfigRepository.__deepcopy__ = _copy_repository
    OverridesParser.parse_rule = _remember_override
    # `OmegaConf.load` imports it when it is called.
    omegaconf._utils.get_yaml_loader = cache(_make_loader)
    omegaconf.base.parse = cache(omegaconf.base.parse)


def _reads_own_files(repo: Any) -> bool:
    return {source.path for source in repo.get_sources()} <= OWN


def _remember_file(self: ConfigRepository, config_path: str) -> Any:
    if not _reads_own_files(self):
        return _load_file(self, config_path)
    if config_path not in _files:
        loaded = _load_file(self, config_path)
        if loaded is None or loaded.path.startswith(
            "structured:"
        ):  # from Hydra's store, where saved configs come and go
            return loaded
        _files[config_path] = pickle.dumps(loaded)
    return pickle.loads(_files[config_path])


def _remember_group(self: ConfigRepository, config_path: str) -> bool:
    if not _reads_own_files(self):
        return _find_group(self, config_path)
    if config_path not in _groups:
        _groups[config_path] = _find_group(self, config_path)
    return _groups[config_path]


def _copy_repository(self: ConfigRepository, memo: Any) -> ConfigRepository:
    """Return a copy for one config. Hydra gives it other sources, and copies what it reads: no source need be copied."""
    return copy.copy(self)


def _remember_list(
    repo: Any, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    arguments = (repo, config_name, overrides_list, prepend_hydra, skip_missing)
    if config_name != "config" or not _reads_own_files(repo):
        return _make_list(*arguments)
    keys = Overrides(repo=repo, overrides_list=overrides_list).config_overrides  # overrides that choose no file
    files = tuple(word.input_line for word in overrides_list if not any(word is key for key in keys))
    chosen = files, prepend_hydra, skip_missing
    if chosen not in _lists:
        if _file(chosen).exists():
            _lists[chosen], _merged[chosen] = pickle.loads(_file(chosen).read_bytes())
        else:
            _lists[chosen] = _make_list(*arguments)
    return replace(_lists[chosen], config_overrides=keys)


def _file(chosen: Any) -> Path:
    return FOLDER / sha256(repr(chosen).encode()).hexdigest()


def _list_choices(overrides: Overrides, defaults: list[Any], self_added: bool) -> Any:
    """Return the choices so far, which Hydra lists for each file, where a file names another one by them."""
    named_by_choice = any(default.is_interpolation() for default in defaults)
    return _list_all_choices(overrides, defaults, self_added) if named_by_choice else None


def _remember_merged(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
    chosen = next((chosen for chosen, known in _lists.items() if known.defaults is defaults), None)
    if chosen is None:
        return _merge(self, defaults, repo)
    if chosen not in _merged:
        _merged[chosen] = pickle.dumps(_merge_sections(self, defaults, repo))
        with replacing(_file(chosen)) as new:
            new.write_bytes(pickle.dumps((_lists[chosen], _merged[chosen])))
    return pickle.loads(_merged[chosen])  # a copy, in half the time of `copy.deepcopy`


def _merge_sections(loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
    """Return the files merged. Hydra merges each file into all before it; files meet only those of their section.

    conf/config.yaml comes last and has keys of several sections. So have experiments, which Hydra merges alone.
    """
    *files, last = defaults
    if last.config_path != "config" or not all(file.package for file in files):
        return _merge(loader, defaults, repo)
    sections: dict[str, list[Any]] = {}
    for file in files:
        sections.setdefault(file.package.split(".")[0], []).append(file)
    root = OmegaConf.create()
    with flag_override(root, "no_deepcopy_set_nodes", True):
        for name, own in sections.items():
            root[name] = _remember_section(loader, own, repo)[name]
        root.merge_with(_remember_section(loader, [last], repo))
    return root


def _remember_section(loader: ConfigLoaderImpl, files: list[Any], repo: Any) -> DictConfig:
    chosen = tuple((file.config_path, file.package) for file in files)
    if chosen not in _sections:
        _sections[chosen] = pickle.dumps(_merge(loader, files, repo))
    return pickle.loads(_sections[chosen])


def _remember_override(self: OverridesParser, word: str, rule: str) -> Any:
    if rule != "override":
        return _parse(self, word, rule)
    if word not in _overrides:
        _overrides[word] = _parse(self, word, rule)
    return copy.copy(_overrides[word])  # the parser writes to it where it comes from


def _make_loader() -> Any:
    """Return the class that OmegaConf reads YAML with, on libyaml: OmegaConf makes one in Python for each file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)
        return get_yaml_loader()
