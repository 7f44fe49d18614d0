"""Runs whose data, weights and checkpoints are in a bucket, on a real server of the protocol of S3."""

import gzip
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.harness import PAIR, RUN, metrics
from support.processes import Processes
from support.s3 import BUCKET, serve_s3

import tunix
from tunix.base import buckets
from tunix.base.digests import Damaged
from tunix.base.errors import UserError
from tunix.checkpoints import bucket
from tunix.checkpoints.folders import Folder
from tunix.checkpoints.root import check_root, write_root
from tunix.checkpoints.store import WAITING, Record, Store, open_store
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.saved_runs import SECTIONS, find_run, split_step
from tunix.data.files import find_files, open_unpacked
from tunix.export import export
from tunix.run.folder import write_config
from tunix.verify import check_everything

INFO_FILES = {"position": {"step": 3}, "config": {"seed": 0}}
TWO = ["model.mesh_shape=[[2],[fsdp]]", "distributed.allow_idle_devices=true"]


@pytest.fixture(scope="module")
def server():
    with serve_s3() as server:
        yield server


@pytest.fixture(scope="module")
def files(server):
    return buckets.filesystem(f"s3://{BUCKET}", "test")


@pytest.fixture(scope="module")
def texts(files, corpus) -> str:
    """The corpus as packed JSON lines in the bucket."""
    rows = [json.dumps({"text": path.read_text()}) for path in sorted(corpus.glob("*.txt"))]
    for name, part in (("a", rows[:30]), ("b", rows[30:])):
        files.pipe_file(f"s3://{BUCKET}/texts/{name}.jsonl.gz", gzip.compress("\n".join(part).encode()))
    files.pipe_file(f"s3://{BUCKET}/texts/deep/c.jsonl", rows[0].encode())
    return f"s3://{BUCKET}/texts"


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory) -> tuple[Path, str]:
    """Folder of a run that reads from the bucket and saves into it, and the home of its checkpoints 3 and 6."""
    root = f"s3://{BUCKET}/run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("bucket_run"))
        words = ["data=jsonl", f"data.paths=['{texts}/*.jsonl.gz']", f"checkpoint.folder={root}", *TWO]
        # Layers of both kinds: the run is exported as a Gemma 3.
        return tunix.train([*RUN, *words, "hydra.run.dir=run"]).folder.absolute(), root


def checkpoint_keys(**changes):
    return compose([f"checkpoint.{key}={value}" for key, value in changes.items()]).config.checkpoint


def open_bucket(address: str, cfg):
    return open_store(address, cfg, is_shared=False)


def make_state(mesh_shape: tuple[int, ...], seed: int = 0) -> dict:
    """A state of several dtypes, split over two axes, one axis and none."""
    mesh = jax.make_mesh(mesh_shape, ("a", "b"), (AxisType.Auto,) * 2)
    rng = np.random.default_rng(seed)
    values = {
        "w": (rng.normal(size=(16, 8, 4)).astype(np.float32), ("a", None, "b")),
        "half": (rng.normal(size=(8, 24)).astype(ml_dtypes.bfloat16), (None, ("a", "b"))),
        "codes": (rng.integers(0, 255, (8, 8)).astype(np.uint8), (None, "a")),
        "zeros": (np.zeros((8, 8), np.float32), ("b", None)),  # an object that is missing would be read as zeros
        "count": (np.int32(seed + 3), ()),
    }
    return {
        "params": {
            name: jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))
            for name, (value, spec) in values.items()
        }
    }


def empty(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def same(ours, theirs) -> bool:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_a_checkpoint_that_was_copied_to_a_disk_is_refused(tmp_path):
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "digests.json").write_text("{}")
    with pytest.raises(UserError, match=r"/6 was copied from a bucket, .* give the run's address in the bucket"):
        Folder(tmp_path).check(6)


def test_checkpoints_that_were_copied_from_a_disk_are_refused(files):
    """They would be deleted as what a kill has left, and the run would begin again."""
    config = "".join(f"{section}: {{key: 1}}\n" for section in SECTIONS)
    files.pipe_file(f"{BUCKET}/copied/config.yaml", config.encode())
    files.pipe_file(f"{BUCKET}/copied/checkpoints/6/digests.0.json", b"{}")  # a save that a kill has ended
    assert find_run(f"s3://{BUCKET}/copied", "resume")
    files.pipe_file(f"{BUCKET}/copied/checkpoints/4/run/digests.json", b"{}")
    with pytest.raises(
        UserError, match=r"^resume=s3://.*/copied: checkpoints/4 was copied from a disk, .* resume=FOLDER"
    ):
        find_run(f"s3://{BUCKET}/copied", "resume")


def test_a_bucket_and_a_folder_give_the_same_bytes_on_every_mesh(server, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "CHUNK", 256)  # shards of several chunks
    state = make_state((4, 2))
    in_bucket = open_bucket(f"s3://{BUCKET}/bytes/checkpoints", checkpoint_keys())
    in_folder = open_store(str(tmp_path), checkpoint_keys(), True)
    for store in (in_bucket, in_folder):
        store.save(3, state, Record(INFO_FILES, '{"words": ["a"]}', {"held_out_loss": 1.0}))
        store.finish()
        for shape in ((4, 2), (2, 4), (1, 1)):
            again = store.restore(3, empty(make_state(shape)))
            assert same(again, state)
            assert all(
                leaf.sharding.mesh.shape == dict(zip("ab", shape, strict=True)) for leaf in jax.tree.leaves(again)
            )
        assert store.info(3)["position"] == INFO_FILES["position"]
        store.add(3, WAITING, "drawn later")
        assert store.info(3)["position"] == INFO_FILES["position"] | {"waiting": "drawn later"}
        store.check(3)
    whole = [store.storage.read_arrays(3) for store in (in_bucket, in_folder)]
    assert whole[0].keys() == whole[1].keys()
    assert same(*whole)
    assert in_bucket.info(3)["parts"] == {"copies": [], "spike_window": 0}
    assert jnp.asarray(state["params"]["count"]) == 3


def test_what_is_kept_is_what_was_asked_for(server, files):
    store = open_bucket(f"s3://{BUCKET}/kept/checkpoints", checkpoint_keys(max_to_keep=1, keep_every_steps=4))
    for step, loss in ((2, 3.0), (3, 1.0), (4, 2.0), (5, None), (6, 2.5)):
        store.save(
            step, make_state((1, 1), step), Record(INFO_FILES, "{}", None if loss is None else {"held_out_loss": loss})
        )
    store.finish()
    assert store.steps() == [3, 4, 6]  # the best, a multiple of 4, the newest
    assert sorted(buckets.list_names(store.folder, "test")) == ["3", "4", "6"]
    store.put_aside([4, 6])
    assert store.steps() == [3]
    (aside,) = [name for name in buckets.list_names(store.storage.root, "test") if "aside" in name]
    assert buckets.list_names(f"{store.storage.root}/{aside}", "test") == ["4", "6"]
    store.save(7, make_state((1, 1)), Record(INFO_FILES, "{}", None))
    store.finish()
    assert store.describe_best().startswith("best held out: step 3;")
    store.add_loss(7, 0.5)  # measured after the save
    again = open_bucket(store.folder, checkpoint_keys())
    again.check(7)
    assert again.describe_best() == ""


def test_a_checkpoint_counts_as_none_before_its_objects_go():
    """A reader that comes while they are deleted would take the rest for one."""
    deleted, objects = [], bucket.Objects.__new__(bucket.Objects)
    objects.timeout_s = 1.0
    done = SimpleNamespace(result=lambda timeout_s: None)
    objects.store = SimpleNamespace(delete_range=lambda keys: (deleted.append(keys), done)[1])
    objects.delete_folder("3")
    ranges = [(keys.inclusive_min, keys.exclusive_max) for keys in deleted]
    assert ranges == [(b"3/digests.json", b"3/digests.json\0"), (b"3/", b"30")]


@pytest.mark.parametrize(
    ("shape", "chunk"), [((262144, 1152), (8192, 1152)), ((3, 2**25), (1, 2**24)), ((4, 2**22), (4, 2**22)), ((), ())]
)
def test_chunks_are_equal_parts_of_a_shard_below_the_limit(shape, chunk):
    whole: Any = SimpleNamespace(shape=shape, dtype=np.dtype("float32"), sharding=SimpleNamespace(shard_shape=tuple))
    assert bucket.split_shard(whole) == chunk


@pytest.mark.parametrize(("timeout_s", "tries"), [(1, 1), (2, 2), (63, 6), (64, 7), (600, 23)])
def test_requests_are_tried_again_for_about_the_time_limit(timeout_s, tries, monkeypatch):
    """After 1, 2, 4, ... 32, 32 seconds."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setitem(bucket.DRIVERS, "s3", lambda _, retries: (asked.append(retries), {"driver": "none"})[1])
    with pytest.raises(ValueError, match="none"):
        bucket.Objects("s3://bucket/run", timeout_s)
    assert [each["max_retries"] for each in asked] == [tries]


def test_a_damaged_object_is_named(server, files):
    store = open_bucket(f"s3://{BUCKET}/damaged/checkpoints", checkpoint_keys(verify="once"))
    store.save(3, make_state((2, 1)), Record(INFO_FILES, "{}", None))
    store.finish()
    store.check(3)
    victim = f"{store.folder}/3/state/params/w/1.0.0"
    whole = files.cat_file(victim)
    files.pipe_file(victim, whole[:-1] + bytes([whole[-1] ^ 1]))
    store.check(3)  # once: it was compared already
    with pytest.raises(Damaged, match=re.escape(victim) + " has other bytes than were written"):
        store.storage.check(3)
    files.rm(victim)
    with pytest.raises(Damaged, match=re.escape(victim) + " cannot be read"):
        store.storage.check(3)
    with pytest.raises(Damaged):  # not zeros, where nothing was compared
        store.restore(3, empty(make_state((2, 1))))


def test_a_bucket_that_refuses_to_be_read_has_no_damaged_checkpoint(server, monkeypatch):
    """A run that was resumed then took the checkpoint before, or deleted the best one, whose loss it did not read."""
    store = open_bucket(f"s3://{BUCKET}/refused/checkpoints", checkpoint_keys(max_to_keep=1))
    for step in (3, 4):
        store.save(step, make_state((1, 1)), Record(INFO_FILES, "{}", {"held_out_loss": float(step)}))
        store.finish()
    again = open_bucket(store.folder, checkpoint_keys(max_to_keep=1))
    with monkeypatch.context() as patch:
        patch.setattr(server, "denies", True)
        for check in (again.check, again.storage.check):
            with pytest.raises(UserError, match=r"refused/checkpoints/4/digests.json: access is denied"):
                check(4)
        patch.setattr(again.storage, "list_steps", lambda: [3, 4])
        again._delete_old()
        assert again.losses == {}
    again._delete_old()
    assert again.losses == {3: 3.0, 4: 4.0}
    assert store.steps() == [3, 4]


def test_a_save_that_fails_says_so_in_a_line_and_leaves_the_others(server):
    store = open_bucket(f"s3://{BUCKET}/denied/checkpoints", checkpoint_keys())
    store.save(3, make_state((2, 1)), Record(INFO_FILES, "{}", None))
    store.wait()
    server.denies = True
    try:
        store.save(6, make_state((2, 1)), Record(INFO_FILES, "{}", None))
        with pytest.raises(
            UserError,
            match=r"written to s3://shelf/denied/checkpoints: .*Denied.* go on with resume=s3://shelf/denied$",
        ) as error:
            store.wait()
        assert "\n" not in str(error.value)
    finally:
        server.denies = False
    assert store.steps() == [3]
    again = open_bucket(f"s3://{BUCKET}/denied/checkpoints", checkpoint_keys())
    assert same(again.restore(3, empty(make_state((2, 1)))), make_state((2, 1)))


def test_a_slow_bucket_keeps_no_step_waiting(server):
    store = open_bucket(f"s3://{BUCKET}/slow/checkpoints", checkpoint_keys())
    server.hold("/slow/checkpoints/3/")
    store.save(3, make_state((2, 1)), Record(INFO_FILES, "{}", None))  # returns, though nothing can be written
    assert server.waiting.wait(60)
    assert store.steps() == []
    server.release()
    store.finish()
    assert store.steps() == [3]


def test_a_bucket_that_vanishes_ends_the_save(monkeypatch):
    monkeypatch.setattr("tunix.processes.watchdog.request_stop", lambda *_, fails: None)  # there is no run to end
    with serve_s3() as other:
        store = open_bucket(f"s3://{BUCKET}/gone/checkpoints", checkpoint_keys(timeout_s=1))
        other.vanish()
        store.save(3, make_state((1, 1)), Record(INFO_FILES, "{}", None))
        with pytest.raises(UserError, match=r"could not be written to s3://shelf/gone.*Could not connect"):
            store.wait()


def test_a_bucket_that_does_not_answer_is_not_asked_which_checkpoints_it_has():
    """The run waited for that answer until its phase was over, and ended with 76; and nothing said what was wrong."""
    silent: Any = SimpleNamespace(open=lambda: None, folder="s3://shelf/run/checkpoints", explain=buckets.explain)
    store = Store(silent, checkpoint_keys())
    store.failure = TimeoutError()
    said = r"written to s3://shelf/run/checkpoints: the server does not answer; whole checkpoints: those that were"
    with pytest.raises(UserError, match=said):
        store.wait()


@pytest.mark.parametrize(
    ("folder", "environment", "message"),
    [
        ("s3://nobody/run", {}, "checkpoint.folder=s3://nobody/run: .*bucket does not exist"),
        ("s3://shelf/new", {"AWS_ACCESS_KEY_ID": None}, "checkpoint.folder=s3://shelf/new/config.yaml: there are no credentials"),
        ("s3://shelf/taken", {}, "s3://shelf/taken holds another run; resume=s3://shelf/taken goes on with it"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_refused_before_anything_is_written(
    server, files, monkeypatch, folder, environment, message
):
    files.pipe_file(f"s3://{BUCKET}/taken/config.yaml", b"seed: 0")
    for name in environment:
        monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    type(files).clear_instance_cache()
    with pytest.raises(UserError, match=message) as error:
        check_root(compose([f"checkpoint.folder={folder}"]))
    assert "\n" not in str(error.value)
    type(files).clear_instance_cache()


def test_addresses_that_are_not_understood(monkeypatch):
    with pytest.raises(UserError, match=r"checkpoint.folder=https://a/b: cannot be written; expected a folder, s3://"):
        compose(["checkpoint.folder=https://a/b"])
    for folder in ("s3://", "gs:///run", "s3:/bucket/run"):  # the last one would be a folder of this machine
        with pytest.raises(
            UserError, match=rf"^checkpoint.folder={folder}: cannot be written; expected a folder, s3://BUC"
        ):
            compose([f"checkpoint.folder={folder}"])
    for address in ("ftp://a/b", "gs:/a/b"):
        with pytest.raises(UserError, match=rf"data.paths={address}: an address begins with one of s3://, gs://, http"):
            find_files((address,), (".txt",))
    for address in ("gs:///a", "s3://", "gs://"):
        with pytest.raises(
            UserError, match=rf"data.paths={address} names no bucket; write {address[:2]}://BUCKET/NAME"
        ):
            find_files((address,), (".txt",))
    monkeypatch.setitem(buckets.PACKAGES, "s3", "no_such_package")
    with pytest.raises(
        UserError, match=r"resume=s3://a/b/config.yaml needs no_such_package: pip install 'tunix-trainer\[buckets\]'"
    ):
        compose(["resume=s3://a/b"])
    assert split_step("s3://a/run/checkpoints/30/") == ("s3://a/run", 30)
    assert split_step("s3://a/checkpoints") == ("s3://a/checkpoints", None)


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_the_digests_of_an_export_are_sent_last(tmp_path, monkeypatch):
    """Whoever finds them has the whole export."""
    sent = []
    files = SimpleNamespace(put_file=lambda source, target: sent.append((source, target)))
    monkeypatch.setattr(buckets, "filesystem", lambda address, key: files)
    for name in ("config.json", "digests.json", "model.safetensors", "tower/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    buckets.upload(tmp_path, "s3://b/export/", "output", last="digests.json")
    names = ["config.json", "model.safetensors", "tower/config.json", "digests.json"]
    assert sent == [(f"{tmp_path}/{name}", f"s3://b/export/{name}") for name in names]


def test_files_of_data_are_found_and_read(server, texts, corpus):
    ends = (".jsonl",)
    assert [unit.name for unit in find_files((f"{texts}/*.gz",), ends)] == ["a.jsonl.gz", "b.jsonl.gz"]
    assert [unit.name for unit in find_files((texts,), ends)] == ["a.jsonl.gz", "b.jsonl.gz", "deep/c.jsonl"]
    with web_server(corpus) as address:
        (web,) = find_files((f"{address}/000.txt",), (".txt",))
        assert web.size == (corpus / "000.txt").stat().st_size
        with open_unpacked(web.path) as file:
            assert file.read() == (corpus / "000.txt").read_bytes()
    (stored,) = find_files((f"{texts}/a.jsonl.gz",), ends)
    with open_unpacked(stored.path) as file:
        assert json.loads(file.readline())["text"] == (corpus / "000.txt").read_text()
    assert stored.version
    for missing in ("none.jsonl", "none/*.jsonl"):
        with pytest.raises(UserError, match=r"data.paths=s3://.*: there is no such bucket or object"):
            find_files((f"{texts}/{missing}",), ends)


@pytest.mark.nightly
def test_a_run_goes_on_from_the_bucket_alone(run, tmp_path, monkeypatch):
    folder, root = run
    expected = [line["loss"] for line in metrics(folder)]
    monkeypatch.chdir(tmp_path)
    again = tunix.train([f"resume={root}/checkpoints/3", "hydra.run.dir=again"]).folder
    assert [line["loss"] for line in metrics(again)] == expected[3:]  # the same mesh: the same digits
    assert find_run(str(again))[0] == find_run(root)[0]
    tunix.train(
        [f"resume={again}", "training.max_steps=7", "model.mesh_shape=[[2],[tp]]"]
    )  # its folder knows the bucket
    assert [line["step"] for line in metrics(again)] == [4, 5, 6, 7]
    with pytest.raises(
        UserError, match=r"the checkpoints of this run are in s3://shelf/run; model.init_from=s3://shelf/run"
    ):
        check_root(compose([f"resume={again}", "checkpoint.folder=elsewhere"]))


@pytest.mark.nightly
def test_commands_take_addresses(run, texts, files, tmp_path):
    _, root = run
    lines, is_whole = check_everything(root)
    assert is_whole
    assert len(lines) >= 2
    output = f"s3://{BUCKET}/exported"
    words = [f"output={output}", "merge_lora=true"]
    assert export(read_settings(Export, [f"checkpoint={root}/checkpoints/6", *words])).startswith(output)
    with pytest.raises(UserError, match=f"checkpoint={output} is no run, and only runs are compared in a bucket"):
        check_everything(output)
    with pytest.raises(UserError, match=f"output={output} exists already"):
        export(read_settings(Export, [f"checkpoint={root}", *words]))
    ours, exported = (tunix.load_pretrained(source) for source in (f"{root}/checkpoints/6", output))
    assert same(ours.params, exported.params)
    cfg = compose([f"model.init_from={root}", "data=jsonl", f"data.paths=['{texts}']"]).config
    assert cfg.model.init_from.startswith(f"{root}/checkpoints/")  # not a copy on this machine
    assert cfg.tokenizer.path == f"{root}/tokenizer"


def test_of_two_runs_that_start_together_one_gets_the_folder(tmp_path):
    """Both have found it free (`check_root`)."""
    root = tmp_path / "disk"
    job = compose([f"checkpoint.folder={root}"])
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(name)
    write_root(job, tmp_path / "first", str(root))
    with pytest.raises(UserError, match=f"checkpoint.folder={root} holds another run; resume={root} goes on with it"):
        write_root(job, tmp_path / "second", str(root))
    assert (root / "config.yaml").read_text() == "first"


@pytest.mark.nightly
def test_a_local_folder_keeps_the_checkpoints_too(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*RUN, "data=text", f"data.paths=['{corpus}']", *TWO, "training.max_steps=3", "hydra.run.dir=run"]
    tunix.train([*words, "checkpoint.folder=disk"])
    assert not Path("run/checkpoints").exists()
    assert find_run("run") == (tmp_path / "disk", None)
    assert tunix.load_pretrained("run").tokenizer_files == tmp_path / "disk/tokenizer"
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    tunix.train(["resume=../run", "training.max_steps=4"])
    assert sorted(os.listdir("../disk/checkpoints")) == ["3", "4"]
    assert f"writing to {tmp_path}/run, checkpoints to {tmp_path}/disk" in Path("../run/train.log").read_text()


def test_a_local_folder_is_the_same_from_everywhere(tmp_path, monkeypatch):
    """Before, a run that went on from elsewhere began at step 0."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    assert compose(["checkpoint.folder='~/disk'"]).config.checkpoint.folder == "/home/me/disk"
    for name in ("run", "elsewhere"):
        Path(name).mkdir()
    write_config(compose(["checkpoint.folder=disk"]), Path("run"))
    monkeypatch.chdir("elsewhere")
    job = compose(["resume=../run"])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose(["resume='~/run'"]).run_dir == tmp_path / "run"
    assert compose(["hydra.run.dir='~/new'"]).run_dir == tmp_path / "new"
    assert (job.config.checkpoint.folder, job.came_from) == (f"{tmp_path}/disk", f"{tmp_path}/disk")
    Path("checkpoints").mkdir()
    shutil.copy("../run/config.yaml", ".")
    assert compose(["resume=."]).config.checkpoint.folder == f"{tmp_path}/elsewhere"  # it has the checkpoints: a copy
    check_root(job)  # killed before it took the folder
    Path("../run/metrics.jsonl").touch()
    with pytest.raises(UserError, match=f"checkpoint.folder={tmp_path}/disk is not there, and this run's checkpoints"):
        check_root(job)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_of_two_processes_that_is_killed_in_a_save_goes_on_in_one(server, texts, tmp_path, monkeypatch):
    root = f"s3://{BUCKET}/killed"
    words = [*PAIR, "data=jsonl", f"data.paths=['{texts}']", f"checkpoint.folder={root}", "evaluation.every_steps=null"]
    server.hold("/killed/checkpoints/6/digests.1.json")  # process 1 has written its shards, and dies before it says so
    both = Processes(*words, folder=tmp_path, count=2)
    both.wait_until(lambda: server.waiting.is_set(), "the second save")
    # Process 0 may still be about to say that the first checkpoint is whole.
    first = f"{root}/checkpoints/3"
    both.wait_until(lambda: "digests.json" in buckets.list_names(first, "test"), "the end of the first save")
    for rank in (0, 1):
        for pid in (both.child(rank), both.started[rank].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    both.ends()
    server.release()
    assert buckets.list_names(f"{root}/checkpoints", "test") == ["3", "6"]
    expected = {line["step"]: line["loss"] for line in metrics(tmp_path / "run")}
    monkeypatch.chdir(tmp_path)
    again = tunix.train([f"resume={root}", "hydra.run.dir=again", "distributed.allow_idle_devices=true"]).folder
    log = (again / "train.log").read_text()
    assert "the checkpoint of step 6 in s3://shelf/killed/checkpoints is not whole: it is deleted" in log
    losses = {line["step"]: line["loss"] for line in metrics(again)}
    assert list(losses) == [4, 5, 6]
    np.testing.assert_allclose([losses[step] for step in (4, 5)], [expected[step] for step in (4, 5)], rtol=1e-5)
