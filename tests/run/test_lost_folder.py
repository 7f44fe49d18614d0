"""A run whose folder is deleted or moved while it runs fails with one line, and does not make the folder again."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from support.harness import ONE_LAYER, RUN, TWO_DEVICES

import tunix
from tunix import trainer
from tunix.base.errors import UserError
from tunix.checkpoints.folders import Folder
from tunix.run.folder import watch_folder

WORDS = [*RUN, *ONE_LAYER, *TWO_DEVICES, "data=synthetic", "data.num_documents=60", "hydra.run.dir=run"]


# Orbax may write a save meanwhile, and makes the folders of its files anew.
def delete(folder):
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def put_another(folder):
    folder.rename(folder.with_name("moved"))
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("")


LOSE = {
    "deleted": delete,
    "moved": lambda folder: folder.rename(folder.with_name("moved")),
    "emptied": lambda folder: (folder / "config.yaml").unlink(),
    "another": put_another,
}


@pytest.mark.parametrize("lose", LOSE)
def test_a_folder_that_is_lost_is_noticed(lose, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    check = watch_folder(folder)
    check()
    LOSE[lose](folder)
    with pytest.raises(UserError, match="was deleted or moved while the run wrote to it"):
        check()


@pytest.mark.nightly
@pytest.mark.parametrize(("lose", "at"), [("deleted", 4), ("moved", 4), ("emptied", 4), ("another", 4), ("deleted", 6)])
def test_a_run_that_lost_its_folder_fails(lose, at, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    find_ending, make_up = trainer.find_ending, trainer.Evaluations.make_up

    def at_step(now, reasons):
        if now.step == at < 6 and reasons is trainer.REASONS:  # which are asked once a step
            LOSE[lose](now.folder)
        return find_ending(now, reasons)

    def behind_last(self, last):
        make_up(self, last)
        if at == last:
            LOSE[lose](Path("run").absolute())

    monkeypatch.setattr(trainer, "find_ending", at_step)
    monkeypatch.setattr(trainer.Evaluations, "make_up", behind_last)
    with pytest.raises(UserError, match="was deleted or moved while the run wrote to it") as error:
        tunix.train(WORDS)
    assert "\n" not in str(error.value)
    assert not Path("run/checkpoints/6").exists() or lose == "emptied"


def test_a_checkpoint_that_is_deleted_while_it_is_written_gets_no_name(tmp_path, monkeypatch):
    """Orbax makes folders that are missing when it writes its index, so what was deleted would be there again."""
    folder = Folder(tmp_path / "run" / "checkpoints")
    folder.folder.parent.mkdir()
    folder.open()
    folder.copy(1, {"params": jnp.ones(2)}, {"run/metadata": "{}", "tokenizer/metadata": "{}"})()
    shutil.rmtree(tmp_path / "run")

    def write_index(self, state):
        state.mkdir(parents=True)
        (state / "_METADATA").write_text("{}")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", write_index)
    with pytest.raises(FileNotFoundError) as error:
        folder.commit(1, {}, None)
    assert "was deleted or moved" in folder.explain(error.value)
    assert folder.list_steps() == []


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("OUT_OF_RANGE: write failed: File too large", "ulimit -f"),
        ("[Errno 24] Too many open files: 'x'", "ulimit -n"),
        ("[Errno 28] No space left on device", "GiB free"),
        (
            f"RESOURCE_EXHAUSTED: {'/a long path' * 40}: Disk quota exceeded [os_error_code='122']",
            "Disk quota exceeded",
        ),
        ('UNKNOWN: Error writing "state/d/37": Input/output error [source locations=...]', "Input/output error"),
        ('UNKNOWN: Error writing "state/d/37": Stale file handle [source locations=...]', "Stale file handle"),
    ],
)
def test_what_a_disk_refuses_is_said_with_its_way_out(tmp_path, text, hint):
    assert hint in Folder(tmp_path).explain(ValueError(text))
    assert "was deleted or moved" in Folder(tmp_path / "gone").explain(OSError(text))
