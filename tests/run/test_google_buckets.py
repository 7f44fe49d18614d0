"""Runs in a bucket of Google, on a server of its protocol. What all buckets share is tested with S3 (test_buckets.py)."""

import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from support.gcs import BUCKET, reject, serve_gcs
from support.harness import RUN, metrics

import tunix
from tunix.base import buckets
from tunix.base.errors import UserError
from tunix.checkpoints.bucket import Objects
from tunix.checkpoints.root import check_root
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.export import export
from tunix.verify import check_everything

HOME = f"gs://{BUCKET}/run"
WORDS = [  # layers of both kinds: the run is exported as a Gemma 3
    *RUN, "data=jsonl", f"data.paths=['gs://{BUCKET}/texts/*.gz']", "model.mesh_shape=[[2],[fsdp]]",
    "distributed.allow_idle_devices=true", "evaluation.every_steps=null",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Iterator[Path]:
    """Folder of a run that reads from the bucket and saves steps 3 and 6 into it."""
    with serve_gcs(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("google_run"))
        rows = [json.dumps({"text": path.read_text()}) for path in sorted(corpus.glob("*.txt"))]
        texts = f"gs://{BUCKET}/texts/a.jsonl.gz"
        buckets.filesystem(texts, "test").pipe_file(texts, gzip.compress("\n".join(rows).encode()))
        words = [*WORDS, f"checkpoint.folder={HOME}", "hydra.run.dir=run"]
        yield tunix.train(words).folder.absolute()


@pytest.mark.nightly
def test_a_run_goes_on_from_the_bucket_alone(run, tmp_path, monkeypatch):
    """It has the same digits; the checkpoint of step 6 is moved aside, written anew, and then the only one."""
    monkeypatch.chdir(tmp_path)
    again = tunix.train([f"resume={HOME}/checkpoints/3", "checkpoint.max_to_keep=1", "hydra.run.dir=again"]).folder
    assert [line["loss"] for line in metrics(again)] == [line["loss"] for line in metrics(run)][3:]
    assert buckets.list_names(f"{HOME}/checkpoints", "test") == ["6"]
    assert any("aside" in name for name in buckets.list_names(HOME, "test"))
    lines, is_whole = check_everything(HOME)
    assert is_whole, lines
    ours = tunix.load_pretrained(f"{HOME}/checkpoints/6")
    output = f"gs://{BUCKET}/exported"
    words = [f"checkpoint={HOME}/checkpoints/6", f"output={output}", "merge_lora=true"]
    assert export(read_settings(Export, words)).startswith(output)
    exported = tunix.load_pretrained(output)
    for mine, same in zip(jax.tree.leaves(ours.params), jax.tree.leaves(exported.params), strict=True):
        np.testing.assert_array_equal(mine, same)


def test_a_wrong_address_is_one_line(run):
    for root, message in (
        ("gs://nobody/run", "checkpoint.folder=gs://nobody/run: there is no such bucket or object"),
        (HOME, f"{HOME} holds another run; resume={HOME} goes on with it"),
    ):
        with pytest.raises(UserError, match=message) as error:
            check_root(compose([f"checkpoint.folder={root}"]))
        assert "\n" not in str(error.value)
    assert not logging.getLogger("gcsfs").propagate  # it logs the traceback of an error that the message explains


@pytest.mark.parametrize(
    ("code", "text", "message"),
    [
        (401, "Anonymous caller does not have storage.objects.get access", r"there are no credentials \(GOOGLE_"),
        (403, "me@x does not have storage.objects.get access", "access is denied: the credentials are wrong"),
    ],
)
def test_a_bucket_that_refuses_is_one_line(run, code, text, message, capfd):
    with reject(code, text):
        for ask in (
            lambda: check_root(compose(["checkpoint.folder=gs://shelf/new"])),
            lambda: buckets.list_names("gs://shelf/new", "data.paths"),
            lambda: write(Objects("gs://shelf/new", 1)),
        ):
            with pytest.raises(UserError, match=message) as error:
                ask()
            assert "\n" not in str(error.value)
    assert "Traceback" not in capfd.readouterr().err


def write(objects: Objects) -> None:
    with buckets.explaining(objects.address, "checkpoint.folder"):
        objects.write("a", b"1")
