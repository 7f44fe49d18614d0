"""A run as a Slurm job: a readable batch script beside the run's config, submitted and followed."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.config import Config, Slurm
from tunix.launch import submission
from tunix.processes import exits
from tunix.processes.identity import FIRST_PORT, NUM_PORTS

RUN_TRAINING = Path(__file__).parents[2] / "run_training.py"
GOING = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STAGE_OUT", "SIGNALING"}
POLL_S = 1.0
AGAIN = f"143|138|{exits.STOPPED}|{exits.PEER}|134|137"  # exit codes after which a job is queued again, the worst last


def launch(job: compose.Job) -> int:
    """Write config and script, submit, tell how to follow; with launcher.show_logs the job's own exit code.

    Raises:
        UserError: there is no sbatch, or Slurm refuses; nothing is left behind then.
    """
    slurm = job.config.launcher
    assert isinstance(slurm, Slurm)
    if job.config.dry_run:
        print(script(job.config, slurm, job.run_dir.absolute(), job.resume_step))
        return 0
    if not slurm.dry_run and not shutil.which("sbatch"):
        raise UserError(
            "launcher=slurm: there is no sbatch on the PATH; submit on a login node of the cluster, "
            "or launcher.dry_run=true writes the script alone"
        )
    is_here = not (slurm.dry_run or slurm.container_image)
    if is_here and slurm.train_script and not Path(slurm.train_script).is_file():
        raise UserError(f"launcher.train_script={slurm.train_script} is not a file here")
    with submission.folder(job) as folder, ExitStack() as written:
        text = script(job.config, slurm, folder, job.resume_step)
        name = f"{_job_name(job.config)}-{_stamp(folder)}".replace("/", "-")
        file = Path(slurm.scripts_path or folder).absolute() / f"{name if slurm.scripts_path else 'job'}.sbatch"
        written.callback(submission.write(file, text).unlink, missing_ok=True)
        if slurm.configs_path is not None:
            copy = Path(slurm.configs_path).absolute() / f"{name}.yaml"
            text = (folder / "config.yaml").read_text()
            written.callback(submission.write(copy, text).unlink, missing_ok=True)
        logs = _logs(slurm, folder)
        logs.mkdir(parents=True, exist_ok=True)
        number = None if slurm.dry_run else submit(file)
        written.pop_all()  # Slurm has not refused: they stay
    print(f"run folder: {folder}")
    if number is None:
        print(f"not submitted (launcher.dry_run): sbatch {shlex.quote(str(file))}")
        return 0
    output = logs / f"slurm-{number}.out"
    print(f"submitted job {number}: {_about(job.config, slurm)}")
    print(f"its output: tail -F {shlex.quote(str(output))}    end it: scancel {number}", flush=True)
    return follow(number, output) if slurm.show_logs else 0


def submit(file: Path) -> str:
    """Number of the job."""
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines() if line.strip())
        raise UserError(f"sbatch refuses the job: {said}")
    return done.stdout.strip().split(";")[0]  # NUMBER;CLUSTER where there are several clusters


def follow(number: str, output: Path) -> int:
    """Show the output until the job has ended, also when it is queued again; its exit code."""
    place, state, code = 0, "PENDING", 0
    try:
        while state in GOING:
            time.sleep(POLL_S)
            state, code = _state(number, code)
            if output.exists():
                with output.open("rb") as file:
                    file.seek(place)
                    sys.stdout.write(file.read().decode(errors="replace"))
                    place = file.tell()
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\njob {number} goes on; tail -F {output} shows its output, scancel {number} ends it")
        return 0
    print(f"job {number}: {state}, exit code {code}")
    return code or (0 if state == "COMPLETED" else 1)


def _state(number: str, code: int) -> tuple[str, int]:
    """State and exit code of the job; a job that Slurm has forgotten has ended as it was last seen."""
    done = subprocess.run(["scontrol", "show", "job", "-o", number], capture_output=True, text=True, check=False)
    if "Invalid job id" in done.stderr:
        return "COMPLETED", code
    facts = dict(re.findall(r"\b(JobState|ExitCode)=(\S+)", done.stdout))
    if "JobState" not in facts:  # the controller is busy or restarts
        return "PENDING", code
    exit_code, _, number_of_signal = facts["ExitCode"].partition(":")
    return facts["JobState"], int(exit_code) or (128 + int(number_of_signal) if int(number_of_signal) else 0)


def script(config: Config, slurm: Slurm, folder: Path, resume_step: int | None = None) -> str:
    """The batch script."""
    options = "\n".join(f"#SBATCH --{option}" for option in _options(config, slurm, folder))
    exports = [_export(word) for word in ("PYTHONUNBUFFERED=1", *slurm.extra_env)]
    quoted = re.sub(r'(["`\\])', r"\\\1", slurm.tmp_dir)  # variables like $SLURM_JOB_ID count
    exports = [f'export TMPDIR="{quoted}"', *exports]
    resume = _resume(folder)
    if resume_step is not None:  # the step that was asked for is where the first start begins
        first = _resume(folder / "checkpoints" / str(resume_step))
        resume = f'"$([ $restarts -gt 0 ] && echo {resume} || echo {first})"'
    python = slurm.python or ("python3" if slurm.container_image else sys.executable)
    training = shlex.join([python, str(Path(slurm.train_script or RUN_TRAINING).absolute())])
    return f"""#!/bin/bash
# {config.project_name}: {_about(config, slurm)}.
# Written by `python run_training.py launcher=slurm`. Submitted again, it goes on with the newest checkpoint.
{options}

{chr(10).join([*exports, *slurm.pre_launch_commands])}

# Process 0 listens on the first node, at the address that Slurm knows it by and a port of this job's own.
node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export JAX_COORDINATOR_ADDRESS=$address:$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))

restarts=${{SLURM_RESTART_COUNT:-0}}
echo "$(date '+%F %T') job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restarted $restarts times, process 0 on $address"

# srun tells only the largest exit code of its tasks; each notes its own, because the worst decides.
ends={shlex.quote(str(folder))}/exit_codes.$SLURM_JOB_ID
rm -rf "$ends" && mkdir "$ends"
{_srun(slurm, folder)} \\
  bash -c 'trap : TERM USR1; mkdir -p "$TMPDIR"; "$@"; code=$?; echo $code > "$0/$SLURM_PROCID"; exit $code' "$ends" \\
  {training} {resume}
code=$?

# {exits.STOPPED}: stopped early, everything saved. {exits.PEER}: a process died or hung; so did one that the JAX
# runtime aborted (134) or that was killed from outside (137). 143 and 138: told to end
# before it began, or because another task had ended. All others are final: what led to them would only come again.
for worse in {AGAIN.replace("|", " ")}; do grep -qsx $worse "$ends"/* && code=$worse; done
final=$(grep -hsvxE '0|{AGAIN}' "$ends"/* | head -n 1)
code=${{final:-$code}}
rm -r "$ends"
case $code in {AGAIN})
  if [ "$restarts" -lt {slurm.max_requeues} ]; then
    echo "$(date '+%F %T') exit code $code: queued again, $restarts of {slurm.max_requeues} times so far"
    scontrol requeue "$SLURM_JOB_ID"
  fi ;;
esac
exit $code
"""


def _resume(path: Path) -> str:
    """The override as Hydra and the shell read it."""
    plain = re.fullmatch(r"[\w/.:+-]+", str(path))
    return f"resume={path}" if plain else shlex.quote(f"resume='{str(path).replace(chr(39), chr(92) + chr(39))}'")


def _options(config: Config, slurm: Slurm, folder: Path) -> list[str]:
    """What sbatch is asked for; null and false ask for nothing."""
    wanted = {
        "job-name": _job_name(config),
        "nodes": slurm.nodes,
        "ntasks-per-node": slurm.tasks,
        "gpus-per-node": slurm.gpus_per_node or None,
        "cpus-per-task": slurm.cpus_per_task,
        "mem": slurm.memory,
        "exclusive": slurm.exclusive,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "account": slurm.account,
        "constraint": slurm.constraint,
        "time": slurm.time_limit,
        "signal": f"USR1@{slurm.signal_before_end_s}",
        "requeue": True,
        "mail-user": slurm.email,
        "mail-type": "BEGIN,END,FAIL" if slurm.email else None,
        "chdir": Path.cwd(),
        "output": str(_logs(slurm, folder) / "slurm-%j.out"),
        "open-mode": "append",
    }
    given = {name: value for name, value in wanted.items() if value is not None and value is not False}
    return [name if value is True else f"{name}={shlex.quote(str(value))}" for name, value in given.items()]


def _srun(slurm: Slurm, folder: Path) -> str:
    """One task a process; when one ends badly, Slurm ends the others."""
    words = ["srun", "--kill-on-bad-exit=1", "--label"]  # --unbuffered would make tasks believe in a terminal
    if slurm.cpus_per_task:
        words.append(f"--cpus-per-task={slurm.cpus_per_task}")  # steps do not inherit it
    if slurm.container_image:
        # What the task needs: the run's folder, the program, and the folder that relative paths start from.
        needed = {str(path): None for path in (folder, RUN_TRAINING.parent, Path.cwd())}
        mounts = [*([slurm.container_mounts] if slurm.container_mounts else []), *(f"{path}:{path}" for path in needed)]
        words += [f"--container-image={slurm.container_image}", f"--container-mounts={','.join(mounts)}"]
        words.append(f"--container-workdir={Path.cwd()}")
    return shlex.join(words)


def _export(assignment: str) -> str:
    name, _, value = assignment.partition("=")
    return f"export {name}={shlex.quote(value)}"


def _about(config: Config, slurm: Slurm) -> str:
    """Size of the job in words."""

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's' if noun[-1] != 's' else 'es'}"

    devices = count(slurm.gpus_per_node, "GPU") if slurm.gpus_per_node else "CPUs only"
    where = f"{count(slurm.nodes, 'node')}, {devices} each, {count(slurm.nodes * slurm.tasks, 'process')}"
    return f"{config.run_name}, {where}" if config.run_name else where


def _logs(slurm: Slurm, folder: Path) -> Path:
    return Path(slurm.logs_path).absolute() if slurm.logs_path else folder


def _job_name(config: Config) -> str:
    return config.run_name or config.project_name


def _stamp(folder: Path) -> str:
    """Date and time of the run, where its folder is named by them."""
    return "-".join(folder.parts[-2:])
