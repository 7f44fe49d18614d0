"""Damage to a checkpoint, an export or a prepared corpus is found, and named with its file."""

import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import write_corpus
from support.rollouts import ONE

import tunix
from tunix import verify as command
from tunix.base import digests
from tunix.base.digests import Damaged
from tunix.base.errors import UserError
from tunix.checkpoints.folders import ITEMS, Folder
from tunix.checkpoints.store import Record, Store, reject_damaged_checkpoint
from tunix.config import command_line
from tunix.config.compose import compose
from tunix.data.dataset import prepare_corpus
from tunix.inference.pretrained import check_init_from
from tunix.run.folder import write_config

INFO_FILES = {"position": {"step": 3}, "config": {"seed": 0}}


@dataclass
class Saved:
    """A store with checkpoints of the steps 3 and 6, and the state of step 3."""

    store: Store
    state: dict[str, np.ndarray]

    def is_harmless(self) -> bool:
        """Return whether step 3 is read as it was written, to the last bit."""
        read = self.store.restore(3, self.state)
        same = all(np.array_equal(read[name], leaf) for name, leaf in self.state.items())
        return same and self.store.info(3)["position"] == INFO_FILES["position"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    cfg = compose(["checkpoint.save_every_steps=3"]).config.checkpoint
    store = Store(Folder(tmp_path_factory.mktemp("checkpoints")), cfg)
    key = jax.random.key(0)
    for step in (3, 6):
        state = {
            name: jax.random.normal(jax.random.fold_in(key, step), shape)
            for name, shape in [("w", (64, 32)), ("b", (40,))]
        }
        store.save(step, state, Record(INFO_FILES, '{"words": ["a", "b"]}', {"held_out_loss": 1.0 / step}))
        if step == 3:
            kept = {name: np.asarray(leaf) for name, leaf in state.items()}
    store.wait()
    return Saved(store, kept)


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    index = rng.randrange(len(data))
    data[index] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def swap(path: Path, rng: random.Random) -> None:
    """Give the file the bytes of another one of the same checkpoint."""
    checkpoint = next(parent for parent in path.parents if parent.name == "3")
    path.write_bytes(rng.choice(digests.list_files(checkpoint)).read_bytes())


def take_other_step(path: Path, rng: random.Random) -> None:
    """Replace an item by that of another step, with its digests."""
    item = next(parent for parent in path.parents if parent.parent.name == "3")
    shutil.rmtree(item)
    shutil.copytree(item.parents[1] / "6" / item.name, item)


def test_200_random_damages_are_found_or_harmless(saved):
    """Every file of the checkpoint may be hit; a file without a digest does not change what is read."""
    checkpoint = saved.store.folder / "3"
    whole = {path: path.read_bytes() for path in digests.list_files(checkpoint)}
    rng = random.Random(7)
    named = harmless = 0
    for number in range(200):
        damage = rng.choice([flip, flip, flip, truncate, remove, swap, take_other_step])
        files = [path for path in digests.list_files(checkpoint) if path.stat().st_size]
        if damage is take_other_step:
            files = [path for path in files if path.parent != checkpoint]
        path = rng.choice(files)
        damage(path, rng)
        try:
            saved.store.storage.check(3)
        except Damaged as error:
            named += str(checkpoint) in str(error)
        else:
            harmless += 1
            assert saved.is_harmless(), f"damage {number}: {damage.__name__} of {path} was not found"
        for file in digests.list_files(checkpoint):
            if file not in whole:
                file.unlink()
        for file, data in whole.items():
            if not file.is_file() or file.read_bytes() != data:
                file.write_bytes(data)
    assert named + harmless == 200
    assert named > 150
    assert saved.store.storage.check(3) > sum(leaf.nbytes for leaf in saved.state.values()) / 2


def test_each_process_digests_its_own_arrays(saved):
    state = saved.store.folder / "3" / "state"
    own = digests.read_digests(state / "digests.0.json")["files"]
    remaining = digests.read_digests(state / digests.FILE)["files"]
    arrays = {str(path.relative_to(state)) for path in (state / "ocdbt.process_0").rglob("*") if path.is_file()}
    assert arrays
    assert arrays <= own.keys()
    assert not own.keys() & remaining.keys()
    assert "digests.0.json" in remaining
    for item in ITEMS:
        assert digests.read_digests(saved.store.folder / "3" / item / digests.FILE)["step"] == 3


def test_when_a_checkpoint_is_checked(saved, tmp_path, caplog):
    """Always, only the first time in this place, never; one of an older version is read, and the log says so."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved.store.folder, folder)

    def store(verify: str) -> Store:
        return Store(Folder(folder), compose([f"checkpoint.verify={verify}"]).config.checkpoint)

    once = store("once")
    once.check(3)
    flip(folder / "3/state/_METADATA", random.Random(0))
    once.check(3)
    store("never").check(3)
    with pytest.raises(Damaged, match="3/state/_METADATA has other bytes than were written"):
        store("always").check(3)
    shutil.copytree(folder / "3", tmp_path / "3")
    shutil.rmtree(folder / "3")
    shutil.copytree(tmp_path / "3", folder / "3")
    with pytest.raises(Damaged):  # a copy was not checked
        store("once").check(3)
    for path in folder.rglob("digests*.json"):
        path.unlink()
    store("always").check(6)
    assert "the checkpoint of step 6 has no digests" in caplog.text


def verify_command(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """Run the command as a process does, which checks its words before it imports jax."""
    monkeypatch.setattr(sys, "argv", ["tunix.verify", *words])
    try:
        command_line.check_first("verify")
        code = command.main()
    except SystemExit as end:
        code = end.code
    out = capsys.readouterr()
    return code, out.out + out.err


def test_a_checkpoint_is_checked_at_any_time(saved, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(saved.store.folder, run / "checkpoints")
    (run / "config.yaml").touch()
    code, text = verify_command(monkeypatch, capsys, f"checkpoint={run}")
    assert (code, text.count("as written")) == (0, 2)
    flip(run / "checkpoints/6/state/_METADATA", random.Random(0))
    code, text = verify_command(monkeypatch, capsys, f"checkpoint={run}")
    assert (code, text.count("as written")) == (1, 1)
    assert "DAMAGED" in text
    assert "checkpoints/6/state/_METADATA has other bytes than were written" in text
    for folder in (f"{run}/checkpoints/3", f"'{run}/checkpoints/3'"):
        assert verify_command(monkeypatch, capsys, f"checkpoint={folder}")[0] == 0
    code, text = verify_command(monkeypatch, capsys, f"checkpoint={tmp_path}")
    assert (code, "expected the folder of a run, an export or a prepared corpus" in text) == (2, True)
    code, text = verify_command(monkeypatch, capsys, f"checkpoint={run}", "seed=1")
    assert (code, "takes no other words: seed=1" in text) == (2, True)
    with pytest.raises(UserError, match="checkpoints/6/state/_METADATA .*; take another step: .* of 3"):
        reject_damaged_checkpoint(run / "checkpoints" / "6")


def test_damage_to_an_export_is_found(hf_dir, tmp_path, corpus, monkeypatch, capsys):
    folder = tmp_path / "export"
    shutil.copytree(hf_dir, folder)
    digests.write_digests(folder, digests.list_files(folder))  # as tunix.export does at its end
    count = len(digests.list_files(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    code, text = verify_command(monkeypatch, capsys, f"checkpoint={folder}")
    assert code == 0
    assert f"{count} files; chat_template.jinja came later" in text
    flip(sorted(folder.glob("*.safetensors"))[0], random.Random(3))
    assert verify_command(monkeypatch, capsys, f"checkpoint={folder}")[0] == 1
    with pytest.raises(UserError, match=r"\.safetensors has other bytes .* remove its digests.json"):
        tunix.load_pretrained(folder)
    cfg = compose([f"model.init_from={folder}", "training.seq_len=32"]).config
    with pytest.raises(UserError, match="model.init_from: .*safetensors has other bytes"):
        check_init_from(cfg, arch=None)
    # A run that was killed before its first checkpoint begins with these weights again.
    words = [f"model.init_from={folder}", "data=text", f"data.paths=['{corpus}']", "training.seq_len=32", *ONE]
    (tmp_path / "run").mkdir()
    write_config(compose(words), tmp_path / "run")
    with pytest.raises(UserError, match="model.init_from: .*safetensors has other bytes"):
        tunix.train([f"resume={tmp_path}/run"])


def test_damage_to_a_prepared_corpus_is_found(tmp_path, monkeypatch, capsys):
    words = [
        "data=text",
        f"data.paths=['{write_corpus(tmp_path / 'c', 8)}']",
        f"loading.cache_dir={tmp_path / 'cache'}",
    ]
    (prepared,) = prepare_corpus(compose(words).config)[0].values()
    copied = tmp_path / "copied"
    shutil.copytree(prepared.folder, copied)
    (shard,) = (shard["name"] for shard in prepared.index["shards"])
    flip(copied / shard / "train.tokens.npy", random.Random(1))
    assert verify_command(monkeypatch, capsys, f"checkpoint={prepared.folder}")[0] == 0
    assert verify_command(monkeypatch, capsys, f"checkpoint={copied}")[0] == 1
    own = ["data=tokens", f"data.paths=['{copied}']"]
    with pytest.raises(UserError, match=rf"{shard}/train.tokens.npy has other bytes .* remove the folder .*copied"):
        prepare_corpus(compose(own).config)
    prepare_corpus(compose([*own, "loading.verify=never"]).config)


@pytest.mark.parametrize("text", ["{", '{"held_out_losS": 0.3}'])
def test_a_damaged_metric_leaves_the_other_checkpoints_usable(saved, tmp_path, text):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved.store.folder, folder)
    (folder / "6" / "metrics" / "metrics").write_text(text)
    store = Store(Folder(folder), compose(["checkpoint.max_to_keep=1"]).config.checkpoint)
    store.save(9, {"w": jax.numpy.ones(3)}, Record(INFO_FILES, "{}", {"held_out_loss": 1.0}))
    store.wait()
    assert store.steps() == [3, 9]  # 3 is the best of those that can be read


def test_digests_are_written_as_a_whole(tmp_path, monkeypatch):
    """A kill in between left a corpus in the cache with an empty file, with which no run started."""
    monkeypatch.delattr("os.replace")
    with pytest.raises(AttributeError, match="replace"):
        digests.write_digests(tmp_path, [])
    assert not [*tmp_path.iterdir()]


def test_a_large_file_has_a_digest_for_each_block(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "BLOCK", 1000)
    monkeypatch.setattr(digests, "READ", 300)
    file = tmp_path / "large"
    file.write_bytes(bytes(range(256)) * 10)
    digests.write_digests(tmp_path, [file])
    assert digests.check_files([tmp_path / digests.FILE]) == 2560
    assert [digests.check_files([tmp_path / digests.FILE], share, 2) for share in (0, 1)] == [1560, 1000]
    with file.open("r+b") as opened:
        opened.seek(1500)
        opened.write(b"!")
    with pytest.raises(Damaged, match=r"large has other bytes than were written \(from byte 1,000 to 2,000\)"):
        digests.check_files([tmp_path / digests.FILE])


def test_samples_of_files_are_spread_over_all_of_each(tmp_path, monkeypatch):
    """Four blocks of 4 bytes in 40: a change at the end is seen, and so are another size and another name."""
    monkeypatch.setattr(digests, "SAMPLE", 4)

    def sample(data: bytes, name: str = "model") -> str:
        (tmp_path / name).write_bytes(data)
        return digests.sample_files(tmp_path, [tmp_path / name], 4)

    zeros = sample(bytes(40))
    assert sample(bytes(5) + b"x" + bytes(34)) == zeros  # between two blocks
    others = sample(bytes(31) + b"x" + bytes(8)), sample(bytes(41)), sample(bytes(40), "other")
    assert len({zeros, *others}) == 4
    assert digests.hash_texts("ab", "c") != digests.hash_texts("a", "bc")


def test_a_copy_of_a_folder_that_was_verified_is_another(tmp_path):
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    folder.mkdir()
    (folder / "a").write_text("text")
    digests.write_digests(folder, [folder / "a"])
    digests.verify_folder(folder, "once", "key", "hint")
    (folder / "a").write_text("TEXT")
    digests.verify_folder(folder, "once", "key", "hint")  # it was looked at before
    shutil.copytree(folder, copy)
    for each, verify in ((copy, "once"), (folder, "always")):
        with pytest.raises(UserError, match="key: .*/a has other bytes than were written .*; hint"):
            digests.verify_folder(each, verify, "key", "hint")
    digests.verify_folder(copy, "never", "key", "hint")
