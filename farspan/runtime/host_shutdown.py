"""Looks whether the host of a worker that got a signal is being taken away, by what the host itself
shows: else the signal was for the process alone."""

from __future__ import annotations

import os
import subprocess

#: Set for the processes of a job of Slurm, PBS, LSF, OAR, Flux and HTCondor, and of a pod of
#: Kubernetes: their SIGTERM ends all of the job that is on a host.
JOB_VARIABLES = (
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "OAR_JOB_ID",
    "FLUX_JOB_ID",
    "_CONDOR_SLOT",
    "KUBERNETES_SERVICE_HOST",
)
#: systemd answers within this, also while it shuts down.
SYSTEMD_TIMEOUT_S = 5.0


def is_host_leaving() -> bool:
    """Return whether this worker's job ends on this host, or the system shuts down."""
    if any(name in os.environ for name in JOB_VARIABLES):
        return True
    try:
        done = subprocess.run(
            ["systemctl", "is-system-running"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SYSTEMD_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == b"stopping"
