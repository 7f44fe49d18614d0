"""Run a config as a Slurm job: write a readable batch script beside the run's config, submit it, show its output."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tunix.base.errors import UserError
from tunix.base.files import expand_home
from tunix.config import Config, Slurm, compose
from tunix.launch import submission
from tunix.processes import exits
from tunix.processes.identity import FIRST_PORT, NUM_PORTS

RUN_TRAINING = Path(__file__).parents[2] / "run_training.py"
# States of a job that has not ended.
GOING = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STAGE_OUT", "SIGNALING"}
POLL_S = 1.0
TO_RETRY = "|".join(map(str, submission.TO_RETRY))  # exit codes after which a job is queued again


def launch(job: compose.Job) -> int:
    """Write config and script, submit the job, and print how to follow it.

    Returns 0, or with launcher.show_logs the exit code of the job.

    Raises:
        UserError: there is no sbatch, or Slurm refuses the job. All files are then as they were.
    """
    slurm = job.config.launcher
    assert isinstance(slurm, Slurm)
    if job.config.dry_run:
        print(format_script(job.config, slurm, job.run_dir.absolute(), job.resume_step))
        submission.print_numbers(job.config, slurm)
        return 0
    if not slurm.dry_run and not shutil.which("sbatch"):
        raise UserError(
            "launcher=slurm: there is no sbatch on the PATH; submit on a login node of the cluster, "
            "or launcher.dry_run=true writes the script alone"
        )
    is_here = not (slurm.dry_run or slurm.container_image)
    if is_here and slurm.train_script and not expand_home(slurm.train_script).is_file():
        raise UserError(f"launcher.train_script={slurm.train_script} is not a file here")
    with submission.prepare_folder(job) as folder, ExitStack() as written:
        text = format_script(job.config, slurm, folder, job.resume_step)
        when = "-".join(folder.parts[-2:])  # by default the date and time of the run
        name = f"{_job_name(job.config)}-{when}".replace("/", "-")
        file = expand_home(slurm.scripts_path or folder).absolute() / f"{name if slurm.scripts_path else 'job'}.sbatch"
        written.callback(submission.keep(file))
        submission.write_file(file, text)
        if slurm.configs_path is not None:
            copy = expand_home(slurm.configs_path).absolute() / f"{name}.yaml"
            text = (folder / "config.yaml").read_text()
            written.callback(submission.keep(copy))
            submission.write_file(copy, text)
        logs = _log_folder(slurm, folder)
        logs.mkdir(parents=True, exist_ok=True)
        number = None if slurm.dry_run else submit(file)
        written.pop_all()  # Slurm has accepted the job: the files stay
    print(f"run folder: {folder}")
    if number is None:
        print(f"not submitted (launcher.dry_run): sbatch {shlex.quote(str(file))}")
        return 0
    output = logs / f"slurm-{number}.out"
    print(f"submitted job {number}: {submission.describe(job.config, slurm)}")
    print(f"its output: tail -F {shlex.quote(str(output))}    end it: scancel {number}", flush=True)
    return follow(number, output) if slurm.show_logs else 0


def submit(file: Path) -> str:
    """Submit the script and return the number of the job.

    Raises:
        UserError: Slurm refuses the job.
    """
    result = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line.removeprefix("sbatch: error: ") for line in result.stderr.splitlines() if line.strip()]
        raise UserError(f"sbatch refuses the job: {'; '.join(lines)}")
    return result.stdout.strip().split(";")[0]  # sbatch prints NUMBER, or NUMBER;CLUSTER


def follow(number: str, output: Path) -> int:
    """Print the job's output until the job has ended, also while it is queued again; return its exit code."""
    offset, state, code = 0, "PENDING", 0
    try:
        while state in GOING:
            time.sleep(POLL_S)
            state, code = _read_state(number, code)
            if output.exists():
                with output.open("rb") as file:
                    file.seek(offset)
                    sys.stdout.write(file.read().decode(errors="replace"))
                    offset = file.tell()
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\njob {number} goes on; tail -F {output} shows its output, scancel {number} ends it")
        return 0
    print(f"job {number}: {state}, exit code {code}")
    return code or (0 if state == "COMPLETED" else 1)


def _read_state(number: str, last_code: int) -> tuple[str, int]:
    """Return state and exit code of the job. Slurm forgets a job some time after its end: then `last_code` counts."""
    result = subprocess.run(["scontrol", "show", "job", "-o", number], capture_output=True, text=True, check=False)
    if "Invalid job id" in result.stderr:
        return "COMPLETED", last_code
    info = dict(re.findall(r"\b(JobState|ExitCode)=(\S+)", result.stdout))
    if "JobState" not in info:  # the controller is busy or restarts
        return "PENDING", last_code
    exit_code, _, signal_number = info["ExitCode"].partition(":")
    return info["JobState"], int(exit_code) or (128 + int(signal_number) if int(signal_number) else 0)


def format_script(config: Config, slurm: Slurm, folder: Path, resume_step: int | None = None) -> str:
    """Return the text of the batch script."""
    options = "\n".join(f"#SBATCH --{option}" for option in _options(config, slurm, folder))
    variables = [word.partition("=") for word in ("PYTHONUNBUFFERED=1", *slurm.extra_env)]
    exports = [f"export {name}={shlex.quote(value)}" for name, _, value in variables]
    # In double quotes: $SLURM_JOB_ID is replaced on the node.
    quoted = re.sub(r'(["`\\])', r"\\\1", str(expand_home(slurm.tmp_dir)))
    setup = "\n".join([f'export TMPDIR="{quoted}"', *exports, *slurm.pre_launch_commands])
    resume = compose.format_resume(folder)
    if resume_step is not None:  # the first start begins at the given step; those behind it take the newest
        first, behind = compose.format_resume(folder / "checkpoints" / str(resume_step)), "$restarts -gt 0"
        if newer := submission.find_newer(config, folder, resume_step):
            behind = f'"$(stat -c %Y {shlex.quote(str(newer[0]))} 2>&1)" != {newer[1]}'
        resume = f'"$([ {behind} ] && echo {resume} || echo {first})"'
    python = str(expand_home(slurm.python or ("python3" if slurm.container_image else sys.executable)))
    training = shlex.join([python, str(expand_home(slurm.train_script or RUN_TRAINING).absolute())])
    # Below, {x} is a value of Python's, {{x}} stands for {x} in the script, and \\ for a backslash.
    return f"""#!/bin/bash
# {config.project_name}: {submission.describe(config, slurm)}.
# Written by `python run_training.py launcher=slurm`. Submitted again, it goes on with the newest checkpoint.
{options}

{setup}

# Process 0 listens on the first node, at the address that Slurm knows it by and a port of this job's own.
node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export JAX_COORDINATOR_ADDRESS=$address:$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))

restarts=${{SLURM_RESTART_COUNT:-0}}
echo "$(date '+%F %T') job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restarted $restarts times, process 0 on $address"

# srun returns the largest exit code of its tasks, and the largest is not the worst: 76 (a process died) hides 2 (wrong
# input). So each task writes its own code to a file; the shell around it outlives stop signals to do so (trap).
ends={shlex.quote(str(folder))}/exit_codes.$SLURM_JOB_ID
rm -rf "$ends" && mkdir "$ends"
{_srun_command(slurm, folder)} \\
  bash -c 'trap : TERM USR1; mkdir -p "$TMPDIR"; "$@"; code=$?; echo $code > "$0/$SLURM_PROCID"; exit $code' "$ends" \\
  {training} {resume}
code=$?

# {exits.STOPPED}: stopped early, everything saved. {exits.PEER}: a process died or hung. 134: the JAX runtime aborted
# the process. 137: killed from outside. 143 and 138: stopped before it began, or because another task had ended.
# After these the job is queued again. All other codes are final: the next start would fail in the same way.
for worse in {TO_RETRY.replace("|", " ")}; do grep -qsx $worse "$ends"/* && code=$worse; done
final=$(grep -hsvxE '0|{TO_RETRY}' "$ends"/* | head -n 1)
code=${{final:-$code}}
rm -r "$ends"
case $code in {TO_RETRY})
  if [ "$restarts" -lt {slurm.max_requeues} ]; then
    echo "$(date '+%F %T') exit code $code: queued again, $restarts of {slurm.max_requeues} times so far"
    scontrol requeue "$SLURM_JOB_ID"
  fi ;;
esac
exit $code
"""


def _options(config: Config, slurm: Slurm, folder: Path) -> list[str]:
    """Return the options of sbatch; values that are null or false are left out."""
    flags = {
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
        # Slurm replaces %j by the job's number, and %% by a % of the folder's name.
        "output": str(_log_folder(slurm, folder)).replace("%", "%%") + "/slurm-%j.out",
        "open-mode": "append",
    }
    options = {name: value for name, value in flags.items() if value is not None and value is not False}
    return [name if value is True else f"{name}={shlex.quote(str(value))}" for name, value in options.items()]


def _srun_command(slurm: Slurm, folder: Path) -> str:
    """Return the srun command: one task for each process; when one fails, Slurm ends the others."""
    command = ["srun", "--kill-on-bad-exit=1", "--label"]  # not --unbuffered: tasks would think they have a terminal
    if slurm.cpus_per_task:
        command.append(f"--cpus-per-task={slurm.cpus_per_task}")  # srun does not take it from sbatch
    if slurm.container_image:
        # The container sees the run's folder, the program, and the folder from which relative paths start.
        needed = {str(path): None for path in (folder, RUN_TRAINING.parent, Path.cwd())}
        mounts = [*([slurm.container_mounts] if slurm.container_mounts else []), *(f"{path}:{path}" for path in needed)]
        command += [f"--container-image={slurm.container_image}", f"--container-mounts={','.join(mounts)}"]
        command.append(f"--container-workdir={Path.cwd()}")
    return shlex.join(command)


def _log_folder(slurm: Slurm, folder: Path) -> Path:
    return expand_home(slurm.logs_path).absolute() if slurm.logs_path else folder


def _job_name(config: Config) -> str:
    return config.run_name or config.project_name
