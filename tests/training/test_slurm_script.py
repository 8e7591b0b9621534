"""The SLURM script with stand-ins for srun and scontrol: what each process sees, and what becomes of exit codes."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm_train.sh"
SRUN = """#!/bin/bash
shift  # its own option
cores=$SRUN_CPUS_PER_TASK  # as newer ones do, which do not read SLURM_CPUS_PER_TASK
for task in 0 1; do
    CORES=$cores SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" || code=$?
done
exit ${code:-0}
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf "first\\nsecond\\n"; else echo "scontrol $*"; fi
"""


@pytest.fixture
def run(tmp_path):
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "40007",
        "SLURM_JOB_NODELIST": "hosts[1-2]",
        "SLURM_CPUS_PER_TASK": "3",
    }

    def run(*command):
        return subprocess.run(["bash", str(SCRIPT), *command], env=environment, capture_output=True, text=True)

    return run


def test_every_process_gets_the_variables_that_torch_reads(run):
    show = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS $1"'
    done = run("sh", "-c", show, "sh", "two words")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 0 2 first 20007 3 two words", "1 1 2 first 20007 3 two words"]


def test_every_process_gets_the_cores_of_the_job(run):
    done = run("sh", "-c", 'echo "$CORES"')
    assert done.stdout.split() == ["3", "3"], done.stderr


def test_a_run_that_was_stopped_and_saved_is_queued_again(run):
    done = run("sh", "-c", "exit 143")
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["scontrol requeue 40007"]


def test_a_run_that_failed_is_not(run):
    done = run("sh", "-c", "exit 1")
    assert done.returncode == 1
    assert done.stdout == ""


def test_without_a_command_it_says_how_it_is_used(run):
    done = run()
    assert done.returncode == 2
    assert "usage: sbatch [options]" in done.stderr
