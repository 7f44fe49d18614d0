#!/usr/bin/env bash
# A private Slurm of two nodes on this host, for tests: munged, slurmctld and two slurmd, on 127.0.0.1 only.
#   slurm_up.sh        start what is not running; everything lives in $SLURM_TEST_ROOT
#   slurm_up.sh down   cancel its jobs, stop these daemons by their pid files
set -euo pipefail
ROOT=${SLURM_TEST_ROOT:?a folder for the state of the cluster}
BASE=${SLURM_TEST_PORT:-17000} # slurmctld; slurmd i listens on BASE+1+i
CPUS=4                         # told, not bound to real cores
GPUS=2                         # pretended: plain files
HOST=$(hostname -s)
export SLURM_CONF=$ROOT/slurm.conf

alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }
stop() { # TERM to all, then KILL after 3 s
  local file pid
  for file in "$@"; do alive "$file" && kill "$(cat "$file")" 2>/dev/null || true; done
  for file in "$@"; do
    pid=$(cat "$file" 2>/dev/null) || continue
    for _ in $(seq 30); do
      kill -0 "$pid" 2>/dev/null || continue 2
      sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null || true
  done
}

if [ "${1:-up}" = down ]; then
  if alive "$ROOT/slurmctld.pid"; then
    timeout 20 scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 75); do
      [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
      sleep 0.2
    done
  fi
  stop "$ROOT"/slurmd.node0.pid "$ROOT"/slurmd.node1.pid "$ROOT/slurmctld.pid" "$ROOT/munge/munged.pid"
  exit 0
fi

umask 022
mkdir -p "$ROOT"/{state,munge,dev,spool.node0,spool.node1}
chmod 711 "$ROOT/munge"
if [ ! -s "$ROOT/munge/key" ]; then
  head -c 256 /dev/urandom >"$ROOT/munge/key"
  chmod 400 "$ROOT/munge/key"
fi
if ! alive "$ROOT/munge/munged.pid"; then # --force: the parent folders may not pass its check of owners
  rm -f "$ROOT/munge/socket"*
  munged --force --key-file="$ROOT/munge/key" --socket="$ROOT/munge/socket" --pid-file="$ROOT/munge/munged.pid" \
    --seed-file="$ROOT/munge/seed" --log-file="$ROOT/munge/log" --num-threads=2 2>>"$ROOT/munge/stderr"
fi

# cred_expire=5, the least: a job that is queued again starts after seconds, not two minutes. KillWait: SIGTERM to SIGKILL.
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$BASE
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$ROOT/munge/socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool.%n
SlurmctldPidFile=$ROOT/slurmctld.pid
SlurmdPidFile=$ROOT/slurmd.%n.pid
SlurmctldLogFile=$ROOT/slurmctld.log
SlurmdLogFile=$ROOT/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
KillWait=5
MinJobAge=600
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[0-1] NodeHostname=$HOST NodeAddr=127.0.0.1 Port=[$((BASE + 1))-$((BASE + 2))] CPUs=$CPUS RealMemory=8000 Gres=gpu:$GPUS State=UNKNOWN
PartitionName=low  Nodes=node[0-1] Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE
PartitionName=high Nodes=node[0-1] Default=NO  MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
CONF
for gpu in $(seq 0 $((GPUS - 1))); do : >"$ROOT/dev/gpu$gpu"; done
echo "NodeName=node[0-1] Name=gpu File=$ROOT/dev/gpu[0-$((GPUS - 1))]" >"$ROOT/gres.conf"

alive "$ROOT/slurmctld.pid" || slurmctld -f "$SLURM_CONF"
for node in node0 node1; do
  alive "$ROOT/slurmd.$node.pid" || slurmd -f "$SLURM_CONF" -N "$node"
done
for _ in $(seq 150); do
  up=$(timeout 5 sinfo -h -N -p low -o %t 2>/dev/null | grep -cE '^(idle|mix|alloc)$' || true)
  [ "$up" -ge 2 ] && exit 0
  sleep 0.2
done
timeout 5 sinfo >&2 || true
tail -qn 5 "$ROOT"/*.log >&2
exit 1
