"""Names that somebody else has written, from a real server: no file is written outside of the cache."""

import http.server
import json
import logging
import os
import shutil
import threading
import zlib

import pytest
from support.gcs import serve_gcs
from support.s3 import BUCKET, serve_s3

import tunix
from tunix.base.buckets import filesystem, mirror
from tunix.base.digests import Damaged, check_files
from tunix.base.errors import UserError
from tunix.base.files import read_json, resolve_below
from tunix.base.forms import read_signature
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose, to_yaml
from tunix.config.saved_runs import find_mirrored, find_run, mirror_run
from tunix.data.dataset import prepare_corpus
from tunix.export import export
from tunix.huggingface.hub import INFO_FILES, list_copied_files

BAD = ["", "/etc/x", "../x", "a/../../x", "a//x", "./x", "a/.", "a\\x", "C:/x", "C:x", "a\0x", "a\nx", "..", "a/"]


class Pages(dict):
    def __init__(self):
        self.fetched = []


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Serve pages by path, {path: bytes}; return the address. What is fetched is in `pages.fetched`.

    The cache is six folders below `tmp_path`.
    """
    monkeypatch.setenv("TUNIX_CACHE_DIR", str(tmp_path / "cache"))
    pages = Pages()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            body = pages.get(self.path.rstrip("/"))
            if body is not None and self.command == "GET":
                pages.fetched.append(self.path)
            if body is None and "escaped" in self.path:  # however the client has written the dots
                body = b"{}"
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body or b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield pages, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def link(address):
    return f'<a href="{address}">x</a>'.encode()


def find_written(folder, name):
    return [path for path in folder.rglob("*") if name in path.name]


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_is_not_below_its_folder_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="not a file below its folder"):
        resolve_below(tmp_path, name, "a listing")


def test_a_name_below_is_joined(tmp_path):
    for name in ["x", "a/b.json", "..x", "a..b/c", "checkpoints/3/d/0f", "ä b"]:
        assert resolve_below(tmp_path, name, "a listing") == tmp_path / name


def test_a_link_that_leads_out_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    os.symlink(tmp_path / "out", tmp_path / "in" / "link")
    with pytest.raises(UserError, match="not a file below"):
        resolve_below(tmp_path / "in", "link/x", "a listing")


def test_a_model_of_a_web_server_writes_nothing_outside(serve, tmp_path):
    pages, host = serve
    up = "../" * 5
    pages["/model"] = link(f"{host}/model/config.json") + link(f"{host}/model/{up}escaped.json")
    pages["/model/config.json"] = b"{}"
    with pytest.raises(UserError, match=r"model\.init_from=http.*escaped\.json"):
        mirror(f"{host}/model", ("*.json",), "model.init_from")
    assert find_written(tmp_path, "escaped") == find_written(tmp_path, "config.json") == []


def test_pages_that_list_files_are_bounded(serve, monkeypatch):
    """All that a folder is listed by, also where no page alone is long; whole files are not."""
    pages, host = serve
    monkeypatch.setattr("tunix.base.buckets.MAX_LISTING", 1 << 20)
    pages["/long"] = b" " * (2 << 20)
    pages["/wide"] = b"".join(link(f"{host}/wide/{n}/") for n in range(20))
    pages |= {f"/wide/{n}": b" " * 100_000 for n in range(20)}
    for name in ("long", "wide"):
        with pytest.raises(
            UserError, match=f"^model.init_from=.*/{name}: its pages that list files are longer than 1 MiB"
        ):
            mirror(f"{host}/{name}", ("*.json",), "model.init_from")
    pages["/model"], pages["/model/a.json"] = link(f"{host}/model/a.json"), b" " * (2 << 20)
    assert (mirror(f"{host}/model", ("*.json",), "model.init_from") / "a.json").stat().st_size == 2 << 20
    # A file that is read whole may have no end; that of weights has the size that it has.
    monkeypatch.setattr("tunix.base.buckets.MAX_TEXT", 1 << 20)
    pages["/large"] = link(f"{host}/large/a.json") + link(f"{host}/large/a.safetensors")
    pages |= {f"/large/a.{end}": b" " * (2 << 20) for end in ("json", "safetensors")}
    with pytest.raises(UserError, match="/large/a.json: it has more than 1,048,576 bytes"):
        mirror(f"{host}/large", ("*.json",), "model.init_from")
    assert mirror(f"{host}/large", ("*.safetensors",), "model.init_from")


def test_a_web_server_never_has_a_run(serve, tmp_path):
    pages, host = serve
    pages["/run/config.yaml"] = to_yaml(compose([]).config).encode()
    pages["/run/tokenizer"] = link(f"{host}/run/tokenizer/{'../' * 6}escaped.bashrc")
    assert find_run(f"{host}/run", "model.init_from") is None
    with pytest.raises(UserError, match="is not a run in a bucket"):
        find_mirrored(f"{host}/run", "resume")
    assert pages.fetched == []
    assert find_written(tmp_path, "escaped") == find_written(tmp_path, "config.yaml") == []


def test_a_dry_run_fetches_the_config_alone_and_says_so(serve, capsys):
    pages, host = serve
    names = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]
    pages["/model"] = b"".join(link(f"{host}/model/{name}") for name in names)
    pages.update({f"/model/{name}": b"{}" for name in names})
    pages["/model/config.json"] = b'{"model_type": "gemma3_text", "num_hidden_layers": 1}'
    tunix.train([f"model.init_from={host}/model", "dry_run=true"])
    assert set(pages.fetched) == {"/model", "/model/config.json"}
    assert f"config.json of {host}/model; with model.vocab_size=auto its tokenizer too; no weights" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.fixture(params=["s3", "gs"])
def bucket(request, tmp_path, monkeypatch):
    """A folder in a bucket with a run, and keys that are not below it when a file system reads them."""
    monkeypatch.setenv("TUNIX_CACHE_DIR", str(tmp_path / "cache"))
    with {"s3": serve_s3, "gs": serve_gcs}[request.param]():
        root = f"{request.param}://{BUCKET}/run"
        files = filesystem(root, "test")
        for name in ["tokenizer/tokenizer.json", "tokenizer/../../../../../../escaped.json", "pretrained/a.json"]:
            files.pipe_file(f"{root}/{name}", b"{}")
        files.pipe_file(f"{root}/config.yaml", to_yaml(compose([]).config).encode())
        yield root, files


def test_keys_of_a_bucket_write_nothing_outside(bucket, tmp_path):
    root, _ = bucket
    for get in (
        lambda: mirror(f"{root}/tokenizer", ("*.json",), "tokenizer.path"),
        lambda: mirror_run(root, "model.init_from", ("tokenizer",)),
    ):
        with pytest.raises(UserError, match=r"escaped\.json', which is not a file below"):
            get()
    assert find_written(tmp_path, "escaped") == find_written(tmp_path, "tokenizer.json") == []


def test_a_run_in_a_bucket_is_known_by_its_whole_config_and_gives_no_more_than_is_read(bucket):
    root, files = bucket
    folder = mirror_run(root, "model.init_from")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml"]  # as in a dry run
    folder = mirror_run(root, "model.init_from", ("pretrained",))
    assert (folder / "pretrained" / "a.json").read_text() == "{}"
    for text in [b"a: 1", b"[[[[", b"\x00", b"model: {}\ndata: {}\n"]:
        files.pipe_file(f"{root}/config.yaml", text)
        assert mirror_run(root, "model.init_from") is None


def test_what_a_listing_has_beside_files_is_left_out(serve, tmp_path):
    pages, host = serve
    links = ["?C=N;O=D", "?C=S;O=A#top", "/", "../", "config.json", ".versions.json", "deep/"]
    pages["/model"] = b"".join(link(each) for each in links)
    pages["/model/config.json"], pages["/model/.versions.json"] = b"{}", b'{"../../x": 1}'
    for depth in range(1, 40):  # folders without end
        pages["/model" + "/deep" * depth] = link("deep/") + link("x.json")
        pages["/model" + "/deep" * depth + "/x.json"] = b"{}"
    folder = mirror(f"{host}/model", ("*",), "data.paths")
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [".versions.json", "config.json"]
    assert "config.json" in json.loads((folder / ".versions.json").read_text())
    assert max(len(path.parts) for path in folder.rglob("*.json")) < len(folder.parts) + 12


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '{"config.json": 3}', '{"config.json": {"a": 1}}'])
def test_damaged_notes_of_a_mirror_are_made_anew(serve, text):
    pages, host = serve
    pages["/model"], pages["/model/config.json"] = link(f"{host}/model/config.json"), b"{}"
    folder = mirror(f"{host}/model", ("*.json",), "model.init_from")
    (folder / ".versions.json").write_text(text)
    assert (mirror(f"{host}/model", ("*.json",), "model.init_from") / "config.json").read_text() == "{}"
    assert "config.json" in json.loads((folder / ".versions.json").read_text())


def test_names_that_cannot_be_written_together_are_one_line(serve):
    pages, host = serve
    pages["/model"] = link("a.json") + link("a.json/b.json")
    pages["/model/a.json"] = pages["/model/a.json/b.json"] = b"{}"
    with pytest.raises(UserError, match=r"model\.init_from=http://.*json"):
        mirror(f"{host}/model", ("*.json",), "model.init_from")


def test_links_in_a_models_folder_do_not_copy_private_files(tmp_path, caplog):
    (tmp_path / "id_rsa").write_text("private")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tokenizer.json").write_text("{}")
    hub = tmp_path / "models--a--b"
    for folder in (tmp_path / "model", hub / "blobs", hub / "snapshots" / "3"):
        folder.mkdir(parents=True)
    (hub / "blobs" / "0f").write_text("{}")
    os.symlink("../../blobs/0f", hub / "snapshots" / "3" / "tokenizer.json")
    model = tmp_path / "model"
    (model / "config.json").write_text("{}")
    (model / "folder.json").mkdir()
    os.mkfifo(model / "fifo.json")
    os.symlink("../id_rsa", model / "vocab.txt")
    os.symlink("../id_rsa", model / "added.json")
    os.symlink("../gone", model / "gone.json")
    os.symlink("config.json", model / "same.json")
    os.symlink("../elsewhere/tokenizer.json", model / "tokenizer.json")
    with caplog.at_level(logging.WARNING):
        copied = [path.name for path in list_copied_files(model, (*INFO_FILES, "*.txt"))]
    assert copied == ["config.json", "same.json", "tokenizer.json"]
    assert f"vocab.txt is a link to {tmp_path}/id_rsa: it is not copied" in caplog.text
    assert [path.name for path in list_copied_files(hub / "snapshots" / "3", INFO_FILES)] == ["tokenizer.json"]


def test_links_of_a_strangers_model_are_in_no_export(hf_dir, tmp_path):
    """Private files stood in the export under the names of files that are copied whole, or read and written again."""
    model, secrets = shutil.copytree(hf_dir, tmp_path / "model"), tmp_path / "secrets"
    secrets.mkdir()
    for name in ("config.json", "id_rsa"):
        (secrets / name).write_text('{"secret": "PRIVATE"}')
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool.jinja").symlink_to(secrets / "id_rsa")
    for name in ("generation_config.json", "modules.json", "sentence_bert_config.json"):
        (model / name).symlink_to(secrets / "id_rsa")
    (model / "1_Pooling").symlink_to(secrets)
    export(read_settings(Export, [f"checkpoint={model}", f"output={tmp_path / 'out'}"]))
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(written) > 4
    assert not [path for path in written if b"PRIVATE" in path.read_bytes()]


def test_an_object_that_is_gone_is_not_deleted_outside(serve, tmp_path):
    pages, host = serve
    pages["/model"], pages["/model/config.json"] = link(f"{host}/model/config.json"), b"{}"
    folder = mirror(f"{host}/model", ("*.json",), "model.init_from")
    (tmp_path / "mine").write_text("kept")
    (folder / ".versions.json").write_text('{"../../../../../mine": [1, "a"]}')
    with pytest.raises(UserError, match="not a file below"):
        mirror(f"{host}/model", ("*.json",), "model.init_from")
    assert (tmp_path / "mine").read_text() == "kept"


def test_digests_name_only_files_of_their_folder(tmp_path):
    (tmp_path / "x").write_text("")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "digests.json").write_text('{"files": {"../x": {"size": 0, "crc32": []}}}')
    with pytest.raises(Damaged, match="not a file below"):
        check_files([tmp_path / "in" / "digests.json"])


def test_digests_in_a_device_or_pipe_are_not_read(tmp_path):
    """A link of a git repository may lead to /dev/zero, which has no end."""
    (tmp_path / "digests2.json").symlink_to("/dev/zero")
    (tmp_path / "digests.json").write_text('{"files": {"digests2.json": {"size": 0, "crc32": []}}}')
    with pytest.raises(Damaged, match=r"digests2.json cannot be read"):
        check_files([tmp_path / "digests.json"])
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="it is a folder, a pipe or a device, and no file"):
        read_json(tmp_path / "config.json")
    (tmp_path / "digests.json").unlink()
    os.mkfifo(tmp_path / "digests.json")
    assert read_signature(tmp_path) == {}


def test_digests_that_name_themselves_have_an_end(tmp_path):
    (tmp_path / "digests.json").write_text('{"files": {"digests.json": {"size": 55, "crc32": [1]}}}')
    with pytest.raises(Damaged, match=r"digests.json is named twice"):
        check_files([tmp_path / "digests.json"])


class Versions(http.server.BaseHTTPRequestHandler):
    """A server of one text, which says of its version what `server.says` has: names of headers."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        is_page = self.path.rstrip("/") == "/model"
        body = link("x.json") if is_page else server.text
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if is_page else "text/plain")
        if "Content-Length" in server.says or is_page:
            self.send_header("Content-Length", str(len(body)))
        if "ETag" in server.says:
            self.send_header("ETag", f'"{zlib.crc32(body)}"')
        if "Last-Modified" in server.says:
            self.send_header("Last-Modified", f"Tue, 24 Nov 2026 13:00:{server.second:02} GMT")
        self.end_headers()
        if self.command == "GET":
            server.num_sent += not is_page
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def versions(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNIX_CACHE_DIR", str(tmp_path / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Versions) as server:
        server.text, server.second, server.num_sent = b'{"text": "alpha"}\n' * 30, 0, 0
        server.says, server.address = (), f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def change(server):
    server.text, server.second = server.text.replace(b"alpha", b"ALPHA"), server.second + 1  # the length stays


@pytest.mark.parametrize("length", [("Content-Length",), ()])
@pytest.mark.parametrize("says", [("ETag",), ("Last-Modified",), ("ETag", "Last-Modified"), ()])
def test_a_text_of_a_web_server_that_changed_is_read_again(versions, tmp_path, caplog, says, length):
    versions.says = (*says, *length)
    words = ["tokenizer=bytes", "data=jsonl", f"data.paths=['{versions.address}/x.jsonl']"]
    cfg = compose([*words, f"loading.cache_dir={tmp_path}/cache", "loading.prepare_processes=1"]).config

    def fingerprint():
        return prepare_corpus(cfg)[0]["jsonl"].fingerprint

    first = fingerprint()
    assert fingerprint() == first
    change(versions)
    assert fingerprint() != first
    lines = [line for line in caplog.messages if "no ETag and no Last-Modified" in line]
    assert len(lines) == (0 if says else 3)  # one line for each start


@pytest.mark.parametrize("says", [("ETag",), ("Last-Modified",), ()])
def test_a_file_of_a_model_that_changed_is_fetched_again(versions, caplog, says):
    versions.says = (*says, "Content-Length")
    for change_it, num_sent in ((False, 1), (False, 1 if says else 2), (True, 2 if says else 3)):
        if change_it:
            change(versions)
        folder = mirror(f"{versions.address}/model", ("*.json",), "model.init_from")
        assert (folder / "x.json").read_bytes() == versions.text
        assert versions.num_sent == num_sent
    lines = [line for line in caplog.messages if "no ETag and no Last-Modified" in line]
    assert len(lines) == (0 if says else 3)
    (folder / "x.json").unlink()  # to make room
    assert mirror(f"{versions.address}/model", ("*.json",), "model.init_from") == folder
    assert (folder / "x.json").read_bytes() == versions.text


def test_a_copy_of_another_user_is_read_and_not_written(versions, monkeypatch):
    """Root may write everywhere, so the system's answer is made up."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    versions.says = ("ETag", "Content-Length")
    folder = mirror(f"{versions.address}/model", ("*.json",), "model.init_from")
    monkeypatch.setattr("tunix.base.buckets.write_whole", refuse)
    assert mirror(f"{versions.address}/model", ("*.json",), "model.init_from") == folder
    change(versions)
    with pytest.raises(UserError, match=r"model cannot be written \(Permission denied\); set TUNIX_CACHE_DIR to a fol"):
        mirror(f"{versions.address}/model", ("*.json",), "model.init_from")
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(UserError, match=r"model cannot be written \(Permission denied\)"):
        mirror(f"{versions.address}/model", ("*.json",), "model.init_from")
