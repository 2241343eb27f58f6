"""Real Slurm on the hosts of a lab: munge, the controller on the first host, a daemon on every one."""

from __future__ import annotations

import subprocess
import time

from launching import HANGS_S, wait_until

from manyhosts.lab import Lab

_FOLDER = "/root/slurm"
_CONFIG = """\
ClusterName=lab
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
ReturnToService=2
KillWait=10
JobRequeue=1
SchedulerParameters=sched_interval=1,sched_min_interval=100000
NodeName={names} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def start_slurm(lab: Lab) -> None:
    """Start it, and wait until every host is idle. It ends with the lab.

    A job that is queued again waits until its credential has expired: 15 seconds, not Slurm's own two minutes.
    """
    names = ",".join(lab.names)
    config = _CONFIG.format(first=lab[0].name, names=names, folder=_FOLDER)
    for host in lab:
        host.run(["mkdir", "-p", f"{_FOLDER}/state", f"{_FOLDER}/spool", "/etc/slurm"])
        host.path("/etc/slurm/slurm.conf").write_text(config)
        host.path("/etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # the older one asks for no mounts
        key = host.path(f"{_FOLDER}/munge.key")
        key.write_bytes(bytes(range(256)) * 4)
        key.chmod(0o600)
        places = [
            f"--{name}=/run/munge.{name.partition('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        _start(lab, host.name, ["munged", "--foreground", "--force", f"--key-file={_FOLDER}/munge.key", *places])
    for host in lab:
        wait_until(host.path("/run/munge.socket").exists, f"munge of {host.name} listens")
    _start(lab, lab[0].name, ["slurmctld", "-D"])
    for host in lab:
        _start(lab, host.name, ["slurmd", "-D"])
    deadline = time.monotonic() + HANGS_S
    while (states := _states(lab)) != ["idle"] * len(lab):
        assert time.monotonic() < deadline, f"Slurm does not start: {states}"
        time.sleep(0.1)


def _start(lab: Lab, name: str, words: list[str]) -> None:
    lab.host(name).start(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _states(lab: Lab) -> list[str]:
    return lab[0].run(["sinfo", "-h", "-N", "-o", "%t"], check=False).stdout.split()
