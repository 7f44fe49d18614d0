"""What another version of tunix wrote: an older one's is read, a newer one's is refused by both versions.

written_by_earlier_versions.tar.xz holds a corpus, and of each version an export, an adapter for it, their logits as that
version computed them, its cache after `prepare`, and of 0979945 answers of a run. Runs are in test_saved_runs.py.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.harness import SMALL, extract

from tunix.base.config_types import read_version
from tunix.base.digests import FILE
from tunix.base.errors import UserError
from tunix.base.forms import FORMS, KEY, read_signature
from tunix.checkpoints.root import check_root
from tunix.checkpoints.store import open_store
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.data.dataset import prepare_corpus
from tunix.data.shards import open_prepared
from tunix.export import export
from tunix.huggingface.config_json import read_config
from tunix.inference.pretrained import load_pretrained
from tunix.rl.samples_page import Choice, make_page, read_run
from tunix.verify import check_everything

VERSIONS = "0_1_0", "0979945"
OURS = re.escape(read_version())


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    for name in ("written_by_earlier_versions.tar.xz", "saved_by_0_1_0.tar.gz"):
        extract(Path(__file__).with_name(name), folder)
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_an_export_and_its_adapter_give_the_logits_of_their_version(version, earlier):
    expected = np.load(earlier / version / "logits.npz")
    for name, adapter in (("export", None), ("lora", earlier / version / "adapter")):
        logits = load_pretrained(earlier / version / "export", adapter=adapter)(expected["tokens"])
        np.testing.assert_allclose(logits[:, -4:], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_cache_of_an_older_version_stays_as_it_is(version, earlier):
    """Today's code makes its own files beside it; the corpus in its form can be opened where it is."""
    cache = earlier / version / "cache"
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    words = [*SMALL, "data=text", f"data.paths=['{earlier}/corpus']", f"loading.cache_dir={cache}"]
    (made,) = prepare_corpus(compose(words).config)[0].values()
    after = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert before.items() <= after.items()
    assert made.folder not in {path.parent for path in before}
    (old,) = [path.parent for path in before if path.name == "index.json"][:1]
    assert open_prepared(old).documents == "text"
    assert read_signature(made.folder) == {"tunix": read_version(), "kind": "corpus", "form": FORMS["corpus"]}


@pytest.mark.parametrize("key", [None, "a_new_key"])
def test_answers_of_another_version_are_shown(key, earlier):
    run = earlier / "0979945" / "grpo"
    if key:
        records = [json.loads(line) | {key: {"a": 1}} for line in (run / "samples.jsonl").read_text().splitlines()]
        (run / "samples.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    page, _ = make_page([read_run(run)], Choice(None, 4, 4, 10**6))
    assert "76+86=" in page


def sign_as_newer(file: Path, kind: str, tunix: str = "9.1", forms_ahead: int = 1) -> None:
    record = json.loads(file.read_text()) if file.is_file() else {"files": {}}
    writer = {"tunix": tunix, "kind": kind, "form": FORMS.get(kind, 0) + forms_ahead}
    file.write_text(json.dumps(record | {KEY: writer}))


def refused(what: str) -> str:
    return rf"^\S+ was written by tunix 9\.1, whose {what} is of form \d+, and this is tunix {OURS}, which reads forms up to \d+; [^\n]*$"


def test_a_checkpoint_of_a_newer_form_is_refused(earlier):
    run = earlier / "run"
    checkpoint = compose([]).config.checkpoint
    for verify in ("always", "never"):
        store = open_store(str(run / "checkpoints"), checkpoint.model_copy(update={"verify": verify}), is_shared=True)
        store.check(3)  # an older one passes
    load_pretrained(run)
    shutil.copytree(run / "checkpoints" / "3", run / "checkpoints" / "2")  # the newest one counts
    sign_as_newer(run / "checkpoints" / "3" / "run" / "metadata", "checkpoint")
    resumed = compose([f"resume={run}"])
    readers = (
        lambda: store.check(3),
        lambda: load_pretrained(run),
        lambda: check_everything(str(run)),
        lambda: check_root(resumed),  # before data are read
    )
    for read in readers:
        with pytest.raises(UserError, match=refused("checkpoint")):
            read()


@pytest.mark.parametrize(("kind", "name"), [("export", "export"), ("adapter", "adapter"), ("a_new_kind", "export")])
def test_an_export_of_a_newer_form_is_refused(kind, name, earlier, tmp_path):
    for each in ("export", "adapter"):
        shutil.copytree(earlier / "0979945" / each, tmp_path / each)
    sign_as_newer(tmp_path / name / FILE, kind)
    adapter = {"adapter": tmp_path / "adapter"} if name == "adapter" else {}
    words = [f"model.init_from={tmp_path}/export", *([f"model.init_adapter={adapter['adapter']}"] if adapter else [])]
    for read in (
        lambda: load_pretrained(tmp_path / "export", **adapter),
        lambda: compose(["model=pretrained", *words]),
    ):
        with pytest.raises(UserError, match=refused(kind)):
            read()


def test_a_family_of_a_newer_version_is_named_with_both_versions(earlier, tmp_path):
    folder = shutil.copytree(earlier / "0979945" / "export", tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma9"}))
    for version, said in (
        ("9.1", rf".*gemma9.*was written by tunix 9\.1, and this is tunix {OURS}$"),
        ("0.0.1", r"((?!tunix 0\.0\.1).)*$"),
    ):
        sign_as_newer(folder / FILE, "export", version, forms_ahead=0)
        with pytest.raises(UserError, match=f"^{said}"):
            read_config(folder)


def test_a_prepared_corpus_of_a_newer_form_is_refused(earlier, tmp_path):
    folder = shutil.copytree(next((earlier / "0979945" / "cache" / "tokens").iterdir()), tmp_path / "tokens")
    sign_as_newer(folder / FILE, "corpus")
    with pytest.raises(UserError, match=refused("corpus")):
        open_prepared(folder)


@pytest.mark.parametrize(("merge", "kind"), [("true", "export"), ("false", "adapter")])
def test_an_export_says_who_wrote_it(merge, kind, earlier, tmp_path):
    words = [f"checkpoint={earlier}/0979945/export", f"adapter={earlier}/0979945/adapter", f"merge_lora={merge}"]
    command = read_settings(Export, [*words, f"output={tmp_path}/made"])
    export(command)
    assert len({file.stat().st_mode for file in (tmp_path / "made").iterdir()}) == 1  # others may read the weights too
    assert read_signature(tmp_path / "made") == {"tunix": read_version(), "kind": kind, "form": FORMS[kind]}
