"""The life of a checkpoint in a folder: whole or not at all, kept or deleted, and failures that are said."""

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tunix.base.digests import Damaged, read_digests
from tunix.base.errors import UserError
from tunix.checkpoints import folders
from tunix.checkpoints.checkpoint import Checkpoints
from tunix.checkpoints.folders import Folder
from tunix.checkpoints.root import check_root
from tunix.checkpoints.store import WAITING, Record, Store, list_dropped
from tunix.config.compose import compose
from tunix.data.batches import Position
from tunix.processes import peers

STATE = {"params": {"w": jnp.arange(12.0).reshape(3, 4)}}


def open_at(folder: Path, *words: str) -> Store:
    return Store(Folder(folder), compose([f"checkpoint.{word}" for word in words]).config.checkpoint)


def save(store: Store, step: int, loss: float | None = None) -> None:
    store.save(step, STATE, Record({"step": step}, "{}", None if loss is None else {"held_out_loss": loss}))


def test_two_stores_of_a_process_publish_saves_under_different_names(tmp_path, monkeypatch):
    """The answers of an earlier save would make a checkpoint whole before all have written."""
    names = []
    monkeypatch.setattr(peers, "publish", lambda key, _: names.append(key))
    for folder in ("a", "b"):
        store = open_at(tmp_path / folder, "async=false")
        save(store, 1)
    assert len(names) == len({*names}) == 2


def test_a_text_is_added_to_a_whole_checkpoint(tmp_path):
    """Answers that were drawn ahead after a stop had saved; without the text, those of before count."""
    store = open_at(tmp_path, "async=false")
    store.save(3, STATE, Record({"position": {"step": 3, "waiting": "early"}}, "{}", None))
    store.add(3, WAITING, "")
    assert store.info(3)["position"]["waiting"] == "early"
    store.add(3, WAITING, "late")
    assert store.info(3)["position"]["waiting"] == "late"
    store.check(3)
    assert store.steps() == [3]


def test_a_home_on_a_disk_of_each_host(tmp_path, monkeypatch, caplog):
    """Process 0 keeps the checkpoints there, wherever the run's folder is; the others would write into the void."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(peers, "gather", lambda text, *_: [text, ""])
    monkeypatch.setattr(peers, "hosts", lambda: ["node-0", "node-1"])
    monkeypatch.setattr(peers, "find_blind", lambda folder: [1])

    def check(*words: str) -> bool | None:
        return check_root(compose([f"checkpoint.folder={tmp_path}/home", *words]))

    assert check() is False
    assert "home is on no shared disk: process 0 keeps the checkpoints" in caplog.text
    with pytest.raises(UserError, match=r"home is not seen by node-1; choose one .*: checkpoint.folder=DIR"):
        check("distributed.shared_filesystem=true")
    monkeypatch.setattr(peers, "find_blind", lambda folder: [])
    assert check() is True
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("words", "losses", "dropped"),
    [
        (["max_to_keep=2"], {1: None, 2: None, 3: None}, [1]),
        (["max_to_keep=9"], {1: 2.0, 2: 1.0}, []),
        (["max_to_keep=1"], {1: 2.0, 2: 1.0, 3: 3.0}, [1]),
        (["max_to_keep=1"], {1: 1.0, 2: 1.0, 3: 3.0}, [1]),  # of equals, the newest is the best
        (["max_to_keep=1"], {1: None, 2: float("inf"), 3: None}, [1]),
        (["max_to_keep=1"], {1: float("nan"), 2: 1.0, 3: None}, [1]),
        (["max_to_keep=1", "keep_best=false"], {1: 1.0, 2: 2.0}, [1]),
        (["max_to_keep=1", "keep_every_steps=2", "keep_best=false"], {2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}, [3]),
        (["max_to_keep=1", "save_first=true", "save_at_steps=[2]"], dict.fromkeys((0, 1, 2, 3)), [1]),
    ],
)
def test_what_is_deleted(words, losses, dropped):
    assert list_dropped(compose([f"checkpoint.{word}" for word in words]).config.checkpoint, losses) == dropped


def test_the_best_checkpoint_is_named_where_it_is_not_the_newest(tmp_path):
    """Commands take the newest one: who kept the best one exported another."""
    store = open_at(tmp_path, "async=false")
    save(store, 1, 1.0)
    assert store.describe_best() == ""
    save(store, 2, 2.0)
    assert store.describe_best() == (
        "best held out: step 1; commands take the newest checkpoint, step 2, unless they name another one: "
        f"checkpoint={tmp_path}/1"
    )
    assert open_at(tmp_path, "keep_best=false").describe_best() == ""


def test_a_model_that_is_measured_after_its_save_may_be_the_best(tmp_path, caplog):
    """A stop saves without the evaluation that is due, and the run that goes on makes up for it: its checkpoint was
    deleted as if nothing had been measured, and the log named a worse one as the best.
    """
    save(open_at(tmp_path, "async=false"), 1, 2.0)
    save(open_at(tmp_path, "async=false"), 2)
    store = open_at(tmp_path)
    for step, loss in ((2, 1.0), (1, 0.5), (7, 0.5), (2, None)):  # saved with a loss, not saved at all, not measured
        store.add_loss(step, loss)
    assert store.describe_best() == ""
    assert not caplog.text
    again = open_at(tmp_path, "async=false", "max_to_keep=1")
    again.check(2)
    save(again, 3, 3.0)
    assert again.steps() == [2, 3]


def test_a_save_reads_the_loss_of_each_kept_checkpoint_once(tmp_path, monkeypatch):
    """With 1,000 checkpoints in a bucket each save asked for all of them again."""
    store, read = open_at(tmp_path, "async=false", "keep_every_steps=1", "max_to_keep=1"), []
    read_metrics = store.storage.read_metrics
    monkeypatch.setattr(store.storage, "read_metrics", lambda step: read.append(step) or read_metrics(step))
    for step in (1, 2, 3):
        save(store, step, 4.0 - step)
    assert read == [1, 2, 3]
    store.put_aside([2, 3])
    save(store, 2, 5.0)
    assert store.describe_best().startswith("best held out: step 1;")


def test_a_process_lists_its_own_files_alone(tmp_path, monkeypatch):
    """Others make a folder beside them for a moment: who listed it when it was gone took the run's folder for deleted."""
    storage, listed, list_files = Folder(tmp_path), [], folders.list_files
    monkeypatch.setattr(folders, "list_files", lambda folder: listed.append(folder) or list_files(folder))
    storage.copy(1, STATE, {})()
    state = tmp_path / f"1{folders.UNFINISHED}" / "state"
    assert listed == [state / "ocdbt.process_0"]
    sealed = read_digests(state / "digests.0.json")["files"]
    assert "array_metadatas/process_0" in sealed
    assert len(sealed) == len(list_files(listed[0])) + 1


def test_a_folder_with_any_name(tmp_path):
    store = open_at(tmp_path / "a [1]*?", "async=false")
    save(store, 1)
    assert store.storage.list_arrays(1) == {"params/w": (3, 4)}
    assert (store.storage.read_arrays(1)["params/w"] == STATE["params"]["w"]).all()
    with pytest.raises(UserError, match=r"takes a \\ for a /"):
        open_at(tmp_path / "a\\b")


def test_who_dies_while_a_checkpoint_is_deleted_leaves_no_half_of_it(tmp_path, monkeypatch):
    store = open_at(tmp_path, "max_to_keep=1")
    save(store, 1)
    store.wait()

    def die(path: Path) -> None:
        (path / "state" / "_METADATA").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            store.storage.delete(1)
    assert store.steps() == []
    assert open_at(tmp_path).steps() == []
    assert list(tmp_path.iterdir()) == []  # the next start has deleted the rest


@pytest.mark.parametrize("num_saved", [0, 2])
def test_ctrl_c_says_where_the_run_can_go_on(tmp_path, num_saved):
    checkpoints, pressed = Checkpoints(open_at(tmp_path)), KeyboardInterrupt()
    for step in range(1, num_saved + 1):
        save(checkpoints.store, step)
    checkpoints.__exit__(KeyboardInterrupt, pressed)
    assert getattr(pressed, "__notes__", []) == (
        [f"resume={tmp_path.parent} goes on after step 2"] if num_saved else []
    )


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path):
    """The run would end with everything saved, in a folder without its config and its metrics."""
    folder = tmp_path / "run" / "checkpoints"
    store = open_at(folder)
    save(store, 1)
    store.wait()
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(
        UserError, match=r"could not be written to .* was deleted or moved .* go on with resume=.*/run$"
    ):
        save(store, 2)
    assert not (tmp_path / "run").exists()
    assert open_at(tmp_path / "moved" / "checkpoints").steps() == [1]


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_failure_behind_the_training_is_raised_by_the_next_call(tmp_path, monkeypatch, kind):
    """A disk that takes no more is one line; a bug stays what it is. Whole checkpoints stay, and no half one counts.
    The run is asked to end at once: all steps up to the next save were lost, without a word."""
    store, asked = open_at(tmp_path), []
    monkeypatch.setattr("tunix.processes.watchdog.request_stop", lambda reason, fails: asked.append((reason, fails)))
    save(store, 1)
    store.wait()

    def fail(*_: object) -> None:
        raise kind("the index cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "commit", fail)
        save(store, 2)
        with pytest.raises(UserError if kind is OSError else ValueError, match="the index cannot be written"):
            store.finish()
    store.wait()  # it is raised once
    ((reason, fails),) = asked
    assert fails
    assert reason.startswith("the checkpoint of step 2 cannot be written: ")
    assert open_at(tmp_path).steps() == [1]
    assert json.loads(store.storage.read(1, "run/metadata")) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_every_process_sees_the_failure_of_another_one(tmp_path, monkeypatch):
    """Process 0 waits for all parts; where one could not be written, there is no checkpoint."""
    monkeypatch.setattr("tunix.checkpoints.store.POLL_S", 0)
    store = open_at(tmp_path)
    first = {"0": '{"written": {}}'}
    looks = iter([first, first | {"1": '{"failure": "No space left on device"}'}])
    write = store.storage.copy(1, STATE, {"run/metadata": "{}", "tokenizer/metadata": "{}"})
    with monkeypatch.context() as patch:
        patch.setattr("tunix.processes.peers.published", lambda _: next(looks))
        patch.setattr("tunix.processes.peers.publish", lambda *_: None)
        patch.setattr("tunix.processes.watchdog.request_stop", lambda *_, fails: None)
        patch.setattr("jax.process_count", lambda: 2)
        store._complete(1, write, None, "saved/1")
    with pytest.raises(UserError, match="process 1: No space left on device; whole"):
        store.wait()
    assert store.storage.list_steps() == []


def test_arrays_are_not_compressed_and_a_file_that_is_cut_is_named(tmp_path):
    state = {"params": {"w": jnp.arange(4096.0).reshape(64, 64)}}
    store = open_at(tmp_path)
    store.save(1, state, Record({"step": 1}, "{}", None))
    store.wait()
    whole = np.asarray(state["params"]["w"]).tobytes()
    file = next(path for path in tmp_path.rglob("*") if path.is_file() and whole in path.read_bytes())
    file.write_bytes(file.read_bytes()[:4096])
    with pytest.raises(Damaged, match="params.w"):  # nothing was compared with its digest
        store.restore(1, state)


@pytest.mark.parametrize("name", ["run/metadata", "state/manifest.ocdbt", "state/d/0", "metrics/metrics"])
def test_a_pipe_in_a_checkpoint_is_not_opened(tmp_path, name):
    """Each command waited for its writer, for ever."""
    store = open_at(tmp_path)
    save(store, 1, 0.5)
    store.wait()
    for digests in (tmp_path / "1").rglob("digests*.json"):
        digests.unlink()
    (tmp_path / "1" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "1" / name)
    with pytest.raises(Damaged, match=f"lacks {name}$|/{name} is a pipe or a device, and no file"):
        store.check(1)
    assert [*open_at(tmp_path)._read_losses().values()] == [None if name.startswith("metrics") else 0.5]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"chunks": [10**12, 10**6]}, r"w of shape \(3, 4\) is in chunks of \(1000000000000, 1000000\)"),
        ({"shape": [10**12, 4]}, "w has 16,000,000,000,000 bytes, more than the memory of this machine"),
    ],
)
def test_an_array_that_no_machine_has_is_damage(tmp_path, changed, reason):
    """The process ended by std::bad_alloc in tensorstore."""
    store = open_at(tmp_path)
    state = STATE | {"step": jnp.ones(())}
    store.save(1, state, Record({"step": 1}, "{}", None))
    store.wait()
    for digests in (tmp_path / "1").rglob("digests*.json"):
        digests.unlink()
    store.check(1)
    arrays = folders._open_state(tmp_path / "1" / "state")
    arrays["params.w/.zarray"] = json.dumps(json.loads(arrays["params.w/.zarray"]) | changed)
    with pytest.raises(Damaged, match=f"1/state cannot be read: params.{reason}$"):
        store.check(1)
    with pytest.raises(Damaged, match=r"w of shape|has shape \(1000000000000, 4\), not \(3, 4\)"):
        store.restore(1, state)
    with pytest.raises(ValueError, match=f"params.{reason}$"):  # of an export of the state, with digests that fit
        store.storage.read_arrays(1)


def test_a_state_that_the_checkpoint_does_not_have_is_named(tmp_path, caplog):
    """After a change of the optimizer, say. The checkpoint is not damaged."""
    state = {"params": STATE["params"], "opt_state": (optax.EmptyState(), optax.TraceState({"w": jnp.zeros(3)}))}
    store = open_at(tmp_path)
    store.save(1, state, Record({"step": 1}, "{}", None))
    store.finish()
    store.check_state(1, state)
    assert not caplog.text
    store.check_state(1, {"params": state["params"]})
    assert "has no use for opt_state/1/trace/w of the checkpoint" in caplog.text
    other = state | {"opt_state": (state["opt_state"][1], *state["opt_state"][1:])}
    with pytest.raises(UserError, match="step 1 in .* has no array opt_state/0/trace/w: the optimizer or the model"):
        store.check_state(1, other)
    with pytest.raises(UserError, match=r"has params/w in shape \(3, 4\), not \(5,\): the optimizer or the model"):
        store.check_state(1, {"params": {"w": jnp.zeros(5)}})


def test_what_others_put_among_the_checkpoints_stays(tmp_path):
    store = open_at(tmp_path, "max_to_keep=1")
    (tmp_path / "7").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "8").symlink_to("nowhere")
    for step in (1, 2):
        save(store, step, 1.0 / step)
    store.finish()
    assert store.steps() == [2]
    shutil.rmtree(tmp_path / "2" / "metrics")
    assert open_at(tmp_path).storage.read_metrics(2) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "7", "8", "notes"]


CONFIG, POSITION = compose([]).config, Position(3, 24, "data", "tokenizer")


def holding(steps: list[int], window: int = 0, aside: list[int] | None = None) -> Any:
    """A store whose checkpoints are all of `CONFIG` at `POSITION`; what is put aside is added to a list."""
    info = {"config": CONFIG.model_dump(mode="json", by_alias=True), "position": asdict(POSITION)}
    info["parts"] = {"copies": [], "spike_window": window}
    return SimpleNamespace(
        folder="here", steps=lambda: steps, check=lambda _: None, info=lambda _: info, check_state=lambda *_: None,
        restore=lambda _, wanted: wanted, put_aside=([] if aside is None else aside).extend,
    )  # fmt: skip


@pytest.mark.parametrize(("window", "is_kept"), [(8, True), (4, False), (0, False)])
def test_a_window_of_spikes_of_another_length_is_left_out(window, is_kept):
    """The run begins it anew, as where the checkpoint has none."""
    abstract = {"params": {}, "spikes": {"loss": np.zeros(8)}}
    found = Checkpoints(holding([3], window)).restore(None, abstract, CONFIG, POSITION)
    assert found is not None
    assert ("spikes" in found[0]) == is_kept


@pytest.mark.parametrize(("step", "aside"), [(3, [5, 9]), (None, [])])
def test_newer_checkpoints_alone_are_put_aside(step, aside):
    found: list[int] = []
    Checkpoints(holding([1, 3, 5, 9], aside=found)).restore(step, {"params": {}}, CONFIG, POSITION)
    assert found == aside


def test_a_run_that_goes_on_with_changed_data_knows_them_from_then_on():
    """`loading.allow_changed_data` is given once."""
    cfg, now = compose(["loading.allow_changed_data=true"]).config, replace(POSITION, data="new")
    found = Checkpoints(holding([3])).restore(None, {"params": {}}, cfg, now)
    assert found is not None
    assert found[1] == now
