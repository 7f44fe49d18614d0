"""Input from outside that is wrong in ways nobody means: each gets one line, and no traceback (docs/security.md)."""

import argparse
import errno
import functools
import http.server
import inspect
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from models.test_parity import PARITY
from rich.table import Table
from support.harness import ONE_LAYER, ROOT, SMALL, cli, state_of_process

from tunix.base.dotted_path import LateCall, blame_user, import_object, select_named, time_limit
from tunix.base.errors import (
    MaskingFilter,
    UserError,
    first_line,
    is_masked,
    mask_secrets,
    mask_values,
    mask_variables,
    name_choices,
    name_first,
    near_multiples,
)
from tunix.base.files import (
    create_file,
    find_writable,
    is_plain,
    list_numbers,
    make_once,
    names_file,
    open_lines,
    read_yaml,
)
from tunix.base.text import as_text, format_rows, print_table
from tunix.checkpoints.folders import Folder
from tunix.config import Evaluate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.saved_runs import is_run_config, load_saved
from tunix.data.chat import ChatTemplate
from tunix.data.documents import BadRow, _read_messages
from tunix.evaluate import evaluate
from tunix.generate import AnswerFile, _read_rows, show
from tunix.huggingface.weights import weight_files
from tunix.inference.sampling import read_stop_ids
from tunix.launch.nodes import read_config
from tunix.processes import exits
from tunix.rl.evaluation import _add_lines
from tunix.run.folder import hold_lock, keep_files

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize("source", ["{{ 5|dictsort }}", "{{ 5|xmlattr }}", "{{ cycler() }}", "{{ '\\ud800' }}"])
def test_a_template_that_fails_is_refused(source):
    with pytest.raises(UserError, match=r"^task\.chat_template"):
        ChatTemplate(source, {}).render(TURNS)


@pytest.mark.parametrize("ids", [{"a": 1}, ["2"], [[1]], "2", True])
def test_stop_ids_are_numbers(ids, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(UserError, match="eos_token_id must be a number"):
        read_stop_ids(tmp_path)


def test_an_index_with_a_name_of_5000_letters(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(UserError, match="no file of this folder"):
        weight_files(tmp_path)
    assert not is_plain("a/\ud800")


@pytest.mark.parametrize(
    "name",
    ["", "/a", "a//b", "a/", "..", "a/../b", "./a", "a\\b", "C:/a", "c:a", "a\nb", "\x1b[2Ja", "a\x7f", "é" * 128],
)
def test_names_that_are_no_file_below_a_folder(name):
    assert not is_plain(name)
    assert is_plain("a b/ab:c.json")


def test_a_config_50000_deep(tmp_path):
    (tmp_path / "config.yaml").write_text("[" * 50_000)
    code = (
        f"from pathlib import Path; from tunix.config.saved_runs import load_saved; load_saved(Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].partition(";")[0].endswith("config.yaml is damaged (it is not YAML)")


def test_a_config_whose_aliases_stand_for_a_billion_values(tmp_path):
    lines = ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"config.yaml is damaged .it has aliases, like \*NAME, which no run writes.;"):
        load_saved(tmp_path)
    assert not is_run_config("\n".join(lines))


def test_a_message_that_quotes_a_long_value_has_its_two_ends():
    message = str(UserError(f"adapter_config.json: loftq_config={'x' * 10**6} is not understood; merge it"))
    assert len(message) < 11_000
    assert message.startswith("adapter_config.json: loftq_config=x")
    assert message.endswith("x is not understood; merge it")


@pytest.mark.parametrize("text", ["a: ${b", "5", "'"])
def test_a_config_that_is_none(text, tmp_path):
    """Half of an interpolation ended with a traceback."""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config.yaml is damaged .it is not YAML.;"):
        load_saved(tmp_path)
    assert not is_run_config(text)


@pytest.mark.parametrize("role", [None, ["user"], 7, ""])
def test_a_role_is_text(role):
    with pytest.raises(BadRow, match="has a role in column messages that is not text"):
        _read_messages([{"role": role, "content": "Hi"}, TURNS[1]], "messages")


def test_results_that_are_no_numbers_are_null(tmp_path, monkeypatch, capsys):
    """results.json had NaN and Infinity, which are no JSON."""
    row = {"loss": math.nan, "sets": {"a": {"loss": 800.0, "perplexity": math.inf}}}
    monkeypatch.setattr("tunix.evaluate.evaluate_loss", lambda *_: [row])
    words = [f"checkpoint={PARITY / 'llama'}", f"output={tmp_path / 'results.json'}"]
    evaluate(read_settings(Evaluate, words, {"overrides": ["training.seq_len=32"]}))
    assert "nan" in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert (found["loss"], found["sets"]) == (None, {"a": {"loss": 800.0, "perplexity": None}})


def test_a_module_that_ends_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ends_at_import.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match="ends_at_import cannot be imported .SystemExit"):
        import_object("ends_at_import:loss")
    (tmp_path / "ends_when_called.py").write_text("import sys\n\n\ndef loss():\n    sys.exit(0)\n")
    with pytest.raises(UserError, match="fails: SystemExit"), blame_user("task.loss", "ends_when_called:loss"):
        import_object("ends_when_called:loss")()


def test_an_error_of_a_users_code_names_the_line_that_failed(tmp_path, monkeypatch):
    """The last one in their file, whoever raised the error; and of names what their module has, without its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "calls_json.py").write_text(
        "import json\n\n\ndef loss():\n    read()\n\n\ndef read():\n    json.loads('x')\n"
    )
    with pytest.raises(UserError, match=r"calls_json.py, line 9\)$"), blame_user("task.loss", "calls_json:loss"):
        import_object("calls_json:loss")()
    (tmp_path / "has_private.py").write_text("def _losses():\n    pass\n\n\nlimit = 3\n")
    with pytest.raises(UserError, match="module has_private has no function or class losses$"):
        import_object("has_private:losses")
    with pytest.raises(UserError, match="module has_private has no function or class limit$"):
        import_object("has_private:limit")
    assert import_object("has_private:limit", int) == 3


def test_parts_of_messages():
    assert name_choices("b", ["a", "c"]) == "choose from a, c"
    many = [f"{kind}_{n}" for kind in ("gemma", "llama") for n in range(11)]
    assert name_choices("LLAMA-1", many) == "the nearest of its 22 are llama_1, llama_10, llama_0"
    assert "are llama_of_a_long_name, lla" in name_choices(
        "llam", ["lla", "llama_of_a_long_name", *[f"gemma_{n}" for n in range(20)]]
    )
    assert [near_multiples(value, 128) for value in (100, 300)] == ["128 or 256", "256 or 384"]
    assert [name_first(range(count)) for count in (4, 6)] == ["0, 1, 2, 3", "0, 1, 2, 3 and 2 more"]
    assert [first_line(error) for error in (ValueError(), ValueError("\na\nb"))] == ["ValueError()", "a"]
    assert mask_values({"paths": ("s3://KEY:SECRET@b/x", 1)}) == {"paths": ["s3://***@b/x", 1]}
    assert str(UserError("a\u202eb\x1b[2J")) == "a\\u202eb\\x1b[2J"


def test_a_traceback_in_a_log_is_masked():
    try:
        raise OSError("https://u:p@host/x\x1b[2J")
    except OSError:
        record = logging.makeLogRecord({"msg": "read", "exc_info": sys.exc_info()})
    MaskingFilter().filter(record)
    assert record.exc_text.endswith("OSError: https://***@host/x\\x1b[2J")


def test_a_time_limit_leaves_no_timer_behind():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(LateCall, match="not done after 0.01 s"), time_limit(0.01):
        signal.pause()
    with time_limit(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before
    done = []

    def elsewhere() -> None:  # no limit there, and no error
        with time_limit(60):
            done.append(1)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [1]


def test_columns_that_a_users_function_names():
    """A parameter with a default may be absent, one that has none may not; **others takes all."""

    def score(answer, level=1, *, question):
        pass

    def score_all(answer, **others):
        pass

    given = {"answer": "a", "question": "q", "unit": "m"}
    named = functools.partial(select_named, "it", given=given, columns=given)
    assert named(inspect.signature(score).parameters.values()) == {"answer": "a", "question": "q"}
    assert named(inspect.signature(score_all).parameters.values()) == given
    with pytest.raises(
        ValueError, match="it takes the column question, which the data lack; their columns are answer$"
    ):
        select_named("it", inspect.signature(score).parameters.values(), {"answer": "a"}, ["answer"])


@pytest.mark.nightly(but=["> /dev/full"])
@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-", "> /dev/full"])
def test_output_that_nobody_can_write_to(redirection, tmp_path):
    """The program goes on, and no file of the run gets what was meant for the terminal."""
    command = f"{sys.executable} {ROOT}/run_training.py dry_run=true model.num_layers=1 {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = subprocess.run(["bash", "-c", f"{command} model.layers=1"], cwd=tmp_path, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize("kept", ["", '{"step": 1}\n', '{"step": 1}\n' * 20_000], ids=["none", "one", "many"])
def test_a_torn_last_line_is_cut_off(kept, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(kept + '{"step": 3, "lo' + "x" * 100_000)
    with open_lines(path) as file:
        file.write('{"step": 3}\n')
    assert path.read_text() == kept + '{"step": 3}\n'


def test_a_new_file_that_cannot_be_written_whole_is_not_there(tmp_path, monkeypatch):
    """The next process that tries would find it taken."""

    @contextmanager
    def open_full(path, mode):
        path.touch(exist_ok=False)
        yield SimpleNamespace(write=lambda text: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))

    (tmp_path / "old").write_text("kept")
    monkeypatch.setattr(Path, "open", open_full)
    for name, error in (("new", "No space left"), ("old", "File exists")):
        with pytest.raises(OSError, match=error):
            create_file(tmp_path / name, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_folder_that_two_processes_make_is_that_of_the_first(tmp_path):
    def make(new: Path) -> None:
        for folder in (new, tmp_path / "made"):  # the other process is done first
            folder.mkdir()
            (folder / str(folder == new)).touch()

    assert [path.name for path in make_once(tmp_path / "made", make).iterdir()] == ["False"]


def test_names_and_numbers(tmp_path):
    for name in ("7", "12", "٣", "1" * 19, "-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").touch()
    assert list_numbers(tmp_path) == [7, 12]
    files = "./model", "~/model", "/model", "a/b/c", "tokenizer.json", "tokenizer.model"
    assert [name for name in (*files, "a/b", "gpt2") if names_file(name)] == list(files)


def test_a_file_to_write_is_tried_and_not_emptied(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    assert find_writable("output", str(tmp_path / "results.json")).read_text() == "{}"
    find_writable("output", str(tmp_path / "new.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_folder_in_the_place_of_a_file(tmp_path):
    with pytest.raises(UserError, match=r"cannot be written .Is a directory"):
        open_lines(tmp_path)
    with pytest.raises(UserError, match="^output=/proc/x cannot be written .No such file or directory.; name another"):
        find_writable("output", "/proc/x")
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="^checkpoints cannot be written to .*/checkpoints: a file is in the way$"):
        Folder(tmp_path / "checkpoints").open()


def test_what_a_full_disk_refuses_is_not_lost(tmp_path, monkeypatch, capsys):
    """Answers and measurements of hours stand on the terminal, and the message names the key."""
    for name in ("answers.jsonl", "results.json"):
        (tmp_path / name).symlink_to("/dev/full")
    file = AnswerFile(tmp_path / "answers.jsonl", [{"prompt": "2+2"}], {})
    with pytest.raises(UserError, match=r"^output=.*/answers.jsonl cannot be written .No space.*; make room"):
        file.add([{"prompt": "2+2", "prediction": "4"}])
    assert json.loads(capsys.readouterr().out) == {"prompt": "2+2", "prediction": "4"}

    cfg = compose([]).config
    monkeypatch.setattr("tunix.evaluate.make_config", lambda cmd: cfg)
    monkeypatch.setattr("tunix.evaluate.evaluate_loss", lambda *_: [{"loss": 1.25}])
    command = read_settings(Evaluate, ["checkpoint=run", f"output='{tmp_path}/results.json'"], {})
    with pytest.raises(UserError, match=r"^output=.*/results.json cannot be written .No space.*; make room"):
        evaluate(command)
    assert "1.2500" in capsys.readouterr().out

    def interrupted(*_):
        yield {"loss": 1.25}
        raise KeyboardInterrupt

    monkeypatch.setattr("tunix.evaluate._list_steps", lambda *_: {100: "run/100", 200: "run/200"})
    monkeypatch.setattr("tunix.evaluate.evaluate_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(command)
    assert "step 100: loss 1.2500\n" in capsys.readouterr().err

    with pytest.raises(UserError, match="^samples=/dev/full cannot be written .No space"):
        _add_lines("samples", Path("/dev/full"), [{"answer": "4"}])


SIGNED = "https://me:p%40ss@h/x.jsonl?X-Amz-Credential=AKIA1&X-Amz-Signature=abc123&versionId=7#part"


def test_secrets_of_addresses_are_masked():
    masked = mask_secrets(f"reading {SIGNED}, and s3://bucket/x@y.txt")
    assert masked == (
        "reading https://***@h/x.jsonl?X-Amz-Credential=***&X-Amz-Signature=***&versionId=7#part, and s3://bucket/x@y.txt"
    )
    assert is_masked(masked)
    assert not is_masked("s3://bucket/x@y.txt")
    assert mask_values({"a": [SIGNED, 1]}) == {"a": [mask_secrets(SIGNED), 1]}


@pytest.mark.parametrize("repeated", ["?KEY", "?KEY=" + ":" * 2_000 + "x'"])
def test_a_text_that_repeats_itself_is_masked_in_time(repeated):
    """8 kB of an adapter's config, or of an answer in a log, took two minutes, and 16 kB eight times as long."""
    start = time.process_time()
    masked = mask_secrets("http://h/" + repeated * 1_000)
    assert time.process_time() - start < 1
    assert is_masked(masked) == ("=" in repeated)


def test_secret_variables_are_masked():
    assert str(UserError(f"no {SIGNED}")) == f"no {mask_secrets(SIGNED)}"
    assert str(UserError("a\x1b]0;title\x07\x9b2J\r\n\tb")) == ESCAPED
    names = ("SLURM_JWT", "JAX_BACKEND_CRED", "XLA_PASS", "CUDA_API_KEY", "TUNIX_WEBHOOK_URL")
    assert set(mask_variables(dict.fromkeys(names, "x")).values()) == {"***"}
    assert mask_variables({"NCCL_X": "http://me:pw@proxy"}) == {"NCCL_X": "http://***@proxy"}


ESCAPED = "a\\x1b]0;title\\x07\\x9b2J\\r\n\tb"


def test_what_a_model_writes_steers_no_terminal(monkeypatch, capsys):
    """In a log, and where `tunix.generate` prints it; a file or a pipe gets its answers as they are."""
    text = "a\x1b]0;title\x07\x9b2J\r\n\tb"
    record = logging.LogRecord("tunix", logging.INFO, "", 0, "continuation:\n%s", (text,), None)
    assert MaskingFilter().filter(record)
    assert record.getMessage() == f"continuation:\n{ESCAPED}"
    show(text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(text, "\u202e\ud800é\u200d")
    assert capsys.readouterr().out == f"{text}\n{ESCAPED}\n\\u202e\\ud800é\u200d\n"


def test_no_file_of_a_run_has_a_secret(tmp_path, corpus, monkeypatch):
    """A run reads an address with a password and a signature, and fails on another one: no file, log or error has them."""
    password, signature = (
        "hunter" * 2,
        "abc" * 3,
    )  # not as they stand here: environment.json has the changes of the code
    monkeypatch.setenv("SLURM_JWT", password)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(corpus))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        signed = f"http://me:{password}@127.0.0.1:{server.server_port}/000.txt?X-Amz-Signature={signature}"
        words = [*SMALL, *ONE_LAYER, "training.max_steps=2", "checkpoint.save_every_steps=1", "hydra.run.dir=run"]
        words += ["data=text", f"data.paths=['{signed}']", "data.held_out_fraction=0", "training.seq_len=16"]
        done = cli(*words, cwd=tmp_path, devices=1)
        assert done.returncode == 0, done.stderr
        wrong = cli(
            *words, f"data.paths=['{signed.replace('000', 'nosuch')}']", "hydra.run.dir=other", cwd=tmp_path, devices=1
        )
        again = cli("resume=run", "training.max_steps=3", cwd=tmp_path, devices=1)
        server.shutdown()
    assert wrong.returncode == 2
    assert again.returncode == 2
    assert "lacks its secret, which no file of a run keeps; give data.paths again" in again.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    texts = [path.read_bytes() for path in files] + [
        f"{each.stdout}{each.stderr}".encode() for each in (done, wrong, again)
    ]
    for text in texts:
        assert password.encode() not in text
        assert signature.encode() not in text


BOMBS = [
    "{{ 'a' * 10**10 }}", "{{ [0] * 10**9 }}", "{{ 9 ** (9 ** 9) }}", "{{ 'a'.center(10**10) }}", "{{ 'a'|center(10**10) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ '%10000000000d' % 1 }}", "{{ '%*d' % (10**10, 1) }}", "{{ '%10000000000d'|format(1) }}",
    "{{ '{:10000000000}'.format(1) }}", "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}", "{{ ('a\\n' * 10**6)|indent(10**6) }}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% for i in range(99999) %}{% for each in messages %}{{ each.content }}{% endfor %}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_that_makes_a_long_text_is_refused(source):
    with pytest.raises(UserError, match=r"task\.chat_template refuses a conversation: it (makes|computes).* more than"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a" * 1000}])


def test_what_templates_do_with_texts_still_works():
    source = "{{ 'a' ~ 1 ~ [2] }} {{ 2**10 }} {{ '%05.2f' % 1.5 }} {{ '{:3}'.format(1) }} {{ 'ab'|replace('b', 'c') }} {{ 'a\n'|indent }}"
    assert ChatTemplate(source, {}).render(TURNS) == "a1[2] 1024 01.50   1 ac a\n"
    long = [{"role": "user", "content": "a" * (1 << 25)}]
    assert len(ChatTemplate("{{ messages[0].content ~ messages[0].content }}", {}).render(long)) == 1 << 26


def test_a_file_of_a_run_that_is_a_folder_ends_it_in_one_line(tmp_path):
    (tmp_path / "train.log").mkdir()
    said = r"train\.log of the run's folder cannot be written .Is a directory.; .* resume="
    with pytest.raises(UserError, match=said) as error, hold_lock(tmp_path):
        logging.FileHandler(tmp_path / "train.log")
    assert "\n" not in str(error.value)
    with pytest.raises(ConnectionResetError), hold_lock(tmp_path):  # another matter
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def test_a_disk_that_fills_leaves_no_half_of_a_runs_files(hf_dir, tmp_path, monkeypatch):
    """A resumed run takes a folder that is there for complete, so the files would be missing for ever."""
    words = [f"model.init_from={hf_dir}", "training.seq_len=32", "training.loss_chunk_size=32"]
    cfg = compose(words).config

    def save(folder: Path) -> None:
        folder.mkdir()
        (folder / "tokenizer.json").touch()

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        keep_files(cfg, SimpleNamespace(save=lambda folder: (save(folder), fill())), tmp_path, shared=True)
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy", fill)
        with pytest.raises(OSError, match="No space"):
            keep_files(cfg, SimpleNamespace(save=save), tmp_path, shared=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
    keep_files(cfg, SimpleNamespace(save=fill), tmp_path, shared=True)  # the tokenizer is not written again
    assert (tmp_path / "pretrained" / "config.json").is_file()


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_an_error_of_the_disk_is_one_line(number, capsys):
    def work() -> None:
        raise OSError(number, os.strerror(number), "outputs/run")

    with state_of_process():
        assert exits.report_errors(work) == 2
    assert capsys.readouterr().err == f"error: outputs/run: {os.strerror(number)}\n"


def test_ctrl_c_in_a_callback_of_a_library_is_not_lost(tmp_path):
    """Python drops an exception that is raised in a destructor, as it does in callbacks of JAX."""
    code = (
        "import os, signal, time; from tunix.processes import exits\n"
        "class Dropped:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)\n"
        "def work():\n    Dropped()\n    time.sleep(60)\n"
        "exits.report_errors(work)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == -2
    assert "Traceback" not in done.stderr


def test_yaml_that_is_nested_too_deep_or_no_date(tmp_path):
    for text in ["[" * 50_000, "a: [", "2026-99-99"]:
        with pytest.raises(ValueError):
            read_yaml(text)
        (tmp_path / "words.yaml").write_text(text)
        with pytest.raises(UserError, match="cannot be read"):
            read_config(tmp_path / "words.yaml")


def test_rows_of_prompts_that_are_nested_too_deep(tmp_path):
    (tmp_path / "deep.jsonl").write_text("[" * 50_000 + "\n")
    with pytest.raises(UserError, match=r"deep\.jsonl cannot be read: it is nested too deep"):
        _read_rows(tmp_path / "deep.jsonl", "text")


@pytest.mark.parametrize(
    "note", ["{}", '{"num_rows": "1", "num_bytes": 3, "info": {}}', '{"num_rows": 1, "num_bytes": 3}']
)
def test_a_damaged_note_of_the_answers_so_far_is_named(note, tmp_path):
    (tmp_path / "out.jsonl").write_text("{}\n")
    (tmp_path / "out.jsonl.unfinished").write_text(note)
    with pytest.raises(UserError, match=r"out.jsonl.unfinished is damaged: it does not say how many answers"):
        AnswerFile(tmp_path / "out.jsonl", [{"prompt": "a"}], {})


@pytest.mark.parametrize("value", ["1" * 5000, "\u00b2", "-1", "x"])
@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
def test_sizes_of_a_terminal_that_are_no_numbers_are_ignored(name, value, monkeypatch, capsys):
    """rich and argparse would end with a traceback."""
    monkeypatch.setenv(name, value)
    assert exits.report_errors(lambda: print(as_text(Table("a")), argparse.ArgumentParser().format_help())) == 0
    assert name not in os.environ
    assert "usage: " in capsys.readouterr().out


def test_a_table_is_text_in_a_notebook_too(monkeypatch, capsys):
    """rich showed it below the cell and wrote nothing: train.log had an empty line in the place of the start report."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a notebook sets it
    assert format_rows({"mesh": "one device"}, title="run") == "run\n mesh  one device"
    table = Table("mesh")
    table.add_row("one device " * 20)
    print_table(table)
    assert "one device " * 20 in capsys.readouterr().out
