"""What a newcomer types in the first quarter of an hour, and the one line that answers it."""

import contextlib
import io
import re
import shlex
import signal
import sys
import threading
from types import SimpleNamespace

import jax
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from support.harness import ROOT

from tunix.base.config_types import list_options, read_version
from tunix.base.dotted_path import import_object
from tunix.base.errors import Stopped, UserError, name_choices
from tunix.config import Export, Generate, command_line
from tunix.config.command_line import read_settings
from tunix.config.compose import (
    check_sweep,
    compose,
    reject_missing_inputs,
    remark_on_environment,
    remark_on_random,
    remark_on_repeated,
    remark_on_tiny,
    remark_on_unread,
    to_yaml,
)
from tunix.doctor import check_variables
from tunix.processes import exits
from tunix.run.compiling import Compiler
from tunix.training.loss import find_loss_kind

MESH = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
WATCHDOG = SimpleNamespace(phase=lambda name: contextlib.nullcontext())


@pytest.mark.parametrize("section", [Generate, Export])
def test_a_command_without_the_key_step_says_how_to_name_one(section):
    with pytest.raises(UserError, match=r"unknown key step; checkpoint=RUN_DIR/checkpoints/STEP"):
        read_settings(section, ["checkpoint=run", "step=4"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model=GPT2", r"model=GPT2: conf/model has no such file; the nearest of its \d+ are gpt2_\w+, gpt2_\w+, gpt2_\w+$"),
        ("model=gemma-3-1b", r"the nearest of its \d+ are gemma3_1b, "),
        ("model=meta-llama/Llama-3.2-1B", r"^model=meta-llama/Llama-3\.2-1B: .*; here it is model\.init_from=meta-llama/Llama-3\.2-1B$"),
        ("data=HuggingFaceFW/fineweb-edu", r"here it is data=hf data\.path=HuggingFaceFW/fineweb-edu$"),
        ("data=mine/a.jsonl", r"here it is data=jsonl data\.paths=\[mine/a\.jsonl\]$"),
        ("data=my_parts:read", r"here it is data=custom data\.function=my_parts:read$"),
        ("optimizer=my_parts:signum", r"here it is optimizer=custom optimizer\.function=my_parts:signum$"),
        ("scheduler=my_parts:waves", r"here it is scheduler\.name=my_parts:waves$"),
        ("task=my_parts:focal", r"here it is task\.loss=my_parts:focal$"),
        ("data=", r"^data=: conf/data has no such file; the nearest of its \d+ are "),
        ("tokenizer=gpt2", r"here it is tokenizer\.path=gpt2$"),
        ("tokenizer=byte", r"choose from bpe, bytes; did you mean bytes\?$"),
        ("task=ppo", r"here it is task=grpo$"),
        ("mesh_shape=ddp", r"here it is model\.mesh_shape=\[\[-1\],\[dp\]\]$"),
        ("+experiment=full_training", r"conf/experiment has no such file; here it is \+experiment=grpo_gsm8k"),
        ("logging.ranks=all", r"logging\.ranks=all: .*; here it is logging\.ranks=null"),
        ("launcher.extra_env=[NCCL_DEBUG=WARN]", r"needs quotes, within quotes for the shell: \"launcher\.extra_env=\['NCCL_DEBUG=WARN'\]\"$"),
        ("task=grpo", r"leaves no room .* lower it \(sampling\.max_new_tokens=64\), or raise training\.seq_len"),
        ("task=grpo sampling.max_new_tokens=64 task.rewards=[my_rewards.shaky]", r"did you mean my_rewards:shaky\?$"),
        ("data=custom data.function=my_data.read", r"expected package\.module:name; did you mean my_data:read\?$"),
        ("launcher=slurm launcher.name=ray", r"^launcher\.name=ray has no keys .*; launcher=ray chooses the file with its own keys$"),
        ("optimizer.name=lion", r"^optimizer\.name=lion has no keys |unknown key"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_answered_by_one_line(words, message):
    with pytest.raises(UserError, match=message) as error:
        compose(words.split())
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "value",
    [
        *(
            "größer",
            "日本語",
            "a (b)",
            "f(x)",
            "a=b",
            "a;b",
            "a#b",
            "it's",
            'say "hi"',
            "costs 5$!",
            "a`b",
            "a]",
            "a, b",
        ),
        *("1e5", "3.10", "2024_11_30", "[ü,x y]", "[a=b]", "[2024_11_30,a]", "true"),
    ],
)
def test_a_value_that_needs_quotes_is_shown_with_them(value):
    """What is shown can be pasted into a shell."""
    key = "data.paths" if value.startswith("[") else "run_name"
    with pytest.raises(UserError) as error:
        compose(["data=text", "data.paths=[a]", f"{key}={value}"])
    (word,) = shlex.split(re.split(r"within quotes for the shell: |as text it is |as one text ", str(error.value))[-1])
    texts = value[1:-1].split(",") if value.startswith("[") else value
    assert OverridesParser.create().parse_override(word).value() == texts
    assert "\n" not in str(error.value)


def test_a_folder_whose_name_is_a_number_is_refused():
    with pytest.raises(
        UserError, match="is read as the number 20241130; as text it is \"hydra.run.dir='2024_11_30'\"$"
    ):
        compose(["hydra.run.dir=2024_11_30"])


def test_choices_of_a_sweep_that_are_read_as_numbers_are_refused():
    with pytest.raises(UserError, match="2024_01_02 is read as the number 20240102; as texts they are ") as error:
        check_sweep(["run_name=a,2024_01_02", "seed=0,1"])
    (word,) = shlex.split(str(error.value).partition("as texts they are ")[2])
    assert [job.config.run_name for job in check_sweep([word])] == ["a", "2024_01_02"]


@pytest.mark.parametrize("word", ["model.mesh_shape=[[4,2],[fsdp,tp]", "task.rewards=[{function: a]", "prompt={a"])
def test_brackets_that_do_not_close_are_no_text(word):
    with pytest.raises(UserError, match="values with special characters need quotes within quotes"):
        compose([word])


def test_every_choice_is_answered_by_few_names():
    for group in ("model", "data", "task"):
        text = name_choices("nosuch", list_options(group))
        assert text.count(",") < 20
    assert name_choices("", list_options("model")).startswith("the nearest of its ")


def test_the_name_of_a_loss_with_a_point():
    with pytest.raises(UserError, match=r"did you mean my\.loss:f\?$"):
        find_loss_kind(compose(["task.loss=my.loss.f"]).config)


def test_a_task_that_needs_rows_says_so_before_anything_is_read():
    for words in (["task=dpo"], ["task=sft"], ["task=embed"], ["task=grpo", "sampling.max_new_tokens=64"]):
        with pytest.raises(UserError, match=r"needs rows with columns, and data\.source=python_stdlib .* data=jsonl"):
            reject_missing_inputs(compose([*words, "dry_run=true"]))
    reject_missing_inputs(compose(["task=sft", "data=arithmetic"]))
    with pytest.raises(UserError, match=r"data\.columns\.text is not set, and task=pretrain reads it"):
        reject_missing_inputs(compose(["data=look_up"]))


EXPERTS = ["model.init_from=tests/models/parity/qwen3_moe", "training.seq_len=32", "training.loss_chunk_size=32"]


def test_keys_of_experts_whose_folder_decides_the_kind(monkeypatch):
    monkeypatch.chdir(ROOT)
    mlp = compose([*EXPERTS, "model.mlp.balance_loss=0"]).config.model.mlp
    assert mlp.balance_loss == 0 != compose(EXPERTS).config.model.mlp.balance_loss
    with pytest.raises(UserError, match=r"model\.mlp\.num_experts=3, but .* says 4; leave it out"):
        compose([*EXPERTS, "model.mlp.num_experts=3"])


def test_bytes_beside_other_weights_are_bytes(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [*EXPERTS, "model.vocab_size=auto"]
    assert compose([*words, "tokenizer=bytes"]).config.tokenizer.path is None
    assert compose(EXPERTS).config.tokenizer.path == "tests/models/parity/qwen3_moe"


def test_layers_without_end_are_refused():
    with pytest.raises(UserError, match=r"model\.num_layers=2147483647: expected a number of at most 10000"):
        compose(["model.num_layers=2147483647"])


@pytest.mark.parametrize(
    ("of_command", "error", "seconds"),
    [(True, UserError, 10), (True, Stopped, 10), (True, KeyboardInterrupt, 10), (False, UserError, 0.2)],
)
def test_an_error_does_not_wait_for_the_compiler(of_command, error, seconds, monkeypatch):
    """In a command, also after Ctrl-C; where Python goes on after the error, it waits."""
    monkeypatch.setattr(exits, "ends_with_leave", threading.Event())
    monkeypatch.setattr(exits, "still_works", threading.Event())
    if of_command:
        exits.ends_with_leave.set()
    ended = threading.Event()

    def fail() -> None:
        with Compiler(MESH, WATCHDOG) as compiler:
            compiler._begin("state", lambda: ended.wait(seconds))
            raise error("it cannot be done")

    with pytest.raises(error) as raised:
        fail()
    assert exits.still_works.is_set() == of_command
    if error is KeyboardInterrupt:
        signals: list[int] = []
        monkeypatch.setattr(exits, "end_by_signal", lambda number, frame: signals.append(number))
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        exits.report_interrupts()
        # A buffer of which nothing is written until somebody flushes it, as of a process whose output is a pipe.
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written := io.BytesIO()))
        sys.excepthook(raised.type, raised.value, None)
        assert signals == [signal.SIGINT]
        assert written.getvalue() == b"interrupted\n"
    ended.set()


def test_the_module_of_a_name_with_a_point():
    with pytest.raises(UserError, match=r"did you mean os\.path:join\?"):
        import_object("os.path.join")


def test_a_random_base_is_said():
    assert remark_on_random(compose(["model.lora.rank=4"])).startswith("model.lora.rank=4: the frozen base is random; ")
    assert "model is random" in remark_on_random(compose(["+experiment=grpo_addition"]))
    assert remark_on_random(compose([])) == remark_on_random(compose(["+experiment=sft_addition"])) == ""
    words = ["model.embed_dim=256", "training.max_steps=10", "training.seq_len=64"]
    assert "also optimizer.learning_rate, which is chosen for" in remark_on_tiny(compose(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("scheduler.decay_ratio=0.5", "scheduler.decay_ratio: nothing reads it: the schedule has no decay at its end; scheduler.name=wsd or "),
        ("scheduler=wsd scheduler.decay_ratio=0.5", ""),
        ("model.lora.alpha=8 model.lora.use_dora=true", "model.lora.alpha, model.lora.use_dora: nothing reads them: model."),
        ("model.lora.rank=0", ""),
        ("model.lora.rank=4 model.lora.alpha=8", ""),
        ("task=dpo data=pairs data.paths=[p] task.simpo_gamma=1", "task.simpo_gamma: nothing reads it: it is of task.objective"),
        ("task.teacher_temperature=2", "task.teacher_temperature: nothing reads it: task.teacher=null; name a run"),
        ("+experiment=grpo_addition task.max_turns=3", "task.max_turns: nothing reads it: task.environment=null"),
        ("+experiment=grpo_addition sampling.max_turn_tokens=4", "sampling.max_turn_tokens: nothing reads it: task.environment"),
        ("+experiment=grpo_addition task.importance=mask", ""),
        ("+experiment=grpo_addition task.importance=mask task.passes_per_rollout=2", "task.importance: nothing reads it: it is of"),
        ("+experiment=grpo_addition task.clip=soft task.clip_low=0.1", "task.clip_low: nothing reads it: task.clip=soft has no limits"),
        ("+experiment=grpo_addition task.kl=loss task.curriculum.turns=3", "task.kl: nothing reads it: task.kl_coefficient=0; give a number; task.curriculum.turns: nothing reads it: "),
        ("tokenizer.path=my.json tokenizer.vocab_size=300", "tokenizer.vocab_size: nothing reads it: the tokenizer is read"),
        ("tokenizer.path=my.json tokenizer.train=true tokenizer.vocab_size=300", ""),
        ("logging.wandb.entity=me", "logging.wandb.entity: nothing reads it: logging.sinks does not name the sink"),
        ("logging.wandb.entity=me logging.sinks=[jsonl,wandb]", ""),
    ],
)  # fmt: skip
def test_a_key_that_nothing_reads_is_named(words, said):
    remark = remark_on_unread(compose(words.split()))
    assert remark.startswith(said)
    assert bool(remark) == bool(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("training.max_steps=5 +training.max_steps=7 seed=1", "training.max_steps is given 2 times: the last value counts, 7"),
        ("optimizer=lion optimizer=adamw", "optimizer is given 2 times: the last value counts, adamw"),
        ("training.max_steps=5 training.max_steps=5 ~model.mtp ~model.mtp", ""),
        ("sampling=greedy sampling@evaluation.sampling=standard", ""),
    ],
)  # fmt: skip
def test_a_key_that_is_given_twice_is_named(words, said):
    assert remark_on_repeated(words.split()) == said


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match=r"holds another run; resume=.* goes on with it"):
        reject_missing_inputs(compose([f"hydra.run.dir={tmp_path}"]))
    reject_missing_inputs(compose([f"hydra.run.dir={tmp_path}", "dry_run=true"]))
    reject_missing_inputs(compose([f"hydra.run.dir={tmp_path}/new"]))


def test_a_script_for_another_machine_says_what_is_not_here(capsys):
    words = [
        "launcher=slurm",
        "launcher.dry_run=true",
        "data=text",
        "data.paths=[nosuch/]",
        "launcher.train_script=my.py",
    ]
    reject_missing_inputs(compose([*words, "tokenizer.path=./nosuch.json"]))
    said = capsys.readouterr().err
    assert [line.split(":")[1].strip() for line in said.splitlines()] == [
        "data.paths",
        "launcher.train_script",
        "tokenizer.path",
    ]


def test_a_sweep_of_a_command_is_answered(monkeypatch, capsys):
    from tunix.config.command_line import run_command as run
    from tunix.config.commands import Evaluate

    for words in (["--multirun", "step=3,6"], ["step=3,6"]):
        monkeypatch.setattr(sys, "argv", ["evaluate", "checkpoint=run", *words])
        assert run(Evaluate, lambda settings: None) == 2
        assert "step=[3,6]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["convert-dataset", "in.csv"], "there is no command convert-dataset; choose from train, "),  # a - is no override
        (["sft", "--config", "sft.yaml"], "sft is a task and no command; write task=sft\n"),
        (["configs/base.yml", "run_name=x"], "configs/base.yml is no command; --config-path FOLDER --config-name NAME reads"),
    ],
)  # fmt: skip
def test_a_first_word_that_is_no_command(words, answer, monkeypatch, capsys):
    from tunix.__main__ import main

    monkeypatch.setattr(sys, "argv", ["tunix", *words])
    assert main() == 2
    assert answer in capsys.readouterr().err


def test_the_version_is_that_of_tunix(monkeypatch, capsys):
    from tunix.__main__ import main

    monkeypatch.setattr(sys, "argv", ["tunix", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"tunix {read_version()}\n"


def test_a_key_that_spaces_tear_from_its_value(monkeypatch, capsys):
    from tunix.__main__ import main

    monkeypatch.setattr(sys, "argv", ["tunix", "training.max_steps", "=", "10"])
    assert main() == 2
    assert (
        "error: training.max_steps is a key without a value; write training.max_steps=VALUE" in capsys.readouterr().err
    )


def test_a_flag_of_a_command_is_answered_by_its_key(monkeypatch, capsys):
    from tunix.config.command_line import command_parser, run_command
    from tunix.config.commands import Evaluate, Generate, Serve

    monkeypatch.setattr(sys, "argv", ["evaluate", "--config-dir", "mine", "checkpoint=run"])
    assert run_command(Evaluate, lambda settings: None) == 2
    assert "of your own config files is 'hydra.searchpath=[file:///FOLDER]'; `python" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", "run", "prompt=a"])
    assert run_command(Generate, lambda settings: None) == 2
    assert "tunix.generate has no --checkpoint; a key is written checkpoint=VALUE; `python" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["serve", "--api-key", "x"])
    assert run_command(Serve, lambda settings: None) == 2
    assert "tunix.serve has no --api-key; a key is written server.api_key=VALUE; `python" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["plan", "--model", "gemma3_1b"])
    with pytest.raises(SystemExit) as end:
        command_parser("plan", None).parse_intermixed_args()
    assert end.value.code == 2
    assert "--model: there is no such flag; keys are written without dashes: model=gemma3_1b" in capsys.readouterr().err


def test_processes_of_a_command_differ_by_the_words_that_join_them(monkeypatch):
    """These are not compared: each process has a number of its own."""
    from tunix.config.command_line import run_command
    from tunix.config.commands import Evaluate

    found = []
    monkeypatch.setattr(command_line, "run_joined", lambda name, distributed, info, *_: found.append(info) or 0)
    for rank in range(2):
        words = ["coordinator_address=a:1", "num_processes=2", f"process_id={rank}"]
        joins = [f"distributed.{word}" for word in words]
        monkeypatch.setattr(sys, "argv", ["evaluate", "checkpoint=run", "training.seq_len=8", *joins])
        assert run_command(Evaluate, lambda settings: None) == 0
    assert found[0] == found[1]
    assert found[0]["evaluate.overrides"] == ["training.seq_len=8"]


def test_a_run_of_a_newer_version_is_refused_by_both_versions(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(compose(["+training.compiler_options.a=1"]).config))
    compose([f"resume={tmp_path}"])
    (tmp_path / "config.yaml").write_text(
        to_yaml(compose([]).config).replace("training:\n", "training:\n  new_key: 1\n")
    )
    (tmp_path / "environment.json").write_text('{"versions": {"tunix": "9.1"}}')
    said = (
        rf"was written by tunix 9\.1, and this is tunix {read_version()}, which does not know training\.new_key; go on"
    )
    for words in ([f"resume={tmp_path}"], [f"model.init_from={tmp_path}"]):
        with pytest.raises(UserError, match=said):
            compose(words)


def test_a_variable_of_another_program_is_answered_with_our_key():
    given = {"OLMO_SHARED_FS": "1", "NCCL_P2P_CONNECT_TIMEOUT": "300", "HOME": "/root"}
    assert remark_on_environment(compose([]), given) == (
        "NCCL_P2P_CONNECT_TIMEOUT=300: nothing reads this variable; here it is distributed.init_timeout_s=300 (NCCL "
        "itself has no such variable); OLMO_SHARED_FS=1: nothing reads this variable; here it is "
        "distributed.shared_filesystem=true"
    )
    words = ["distributed.shared_filesystem=true", "distributed.init_timeout_s=300"]
    assert remark_on_environment(compose(words), given) == ""
    (finding,) = [each.says for each in check_variables(given) if each.status == "warning"]
    assert finding.endswith(
        "nothing reads this name; distributed.init_timeout_s and distributed.heartbeat_timeout_s say how long to wait"
    )
