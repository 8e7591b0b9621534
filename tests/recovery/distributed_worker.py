"""One rank of several runs on a CPU, started by torchrun, for test_distributed.py.

    torchrun --nproc-per-node 2 distributed_worker.py JOBS

JOBS is a JSON file: for each folder the options of a run. Rank 0 leaves ``final.pt`` in each folder.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from recovery_runs import run_job

from horst.training import processes


def main() -> None:
    torch.set_num_threads(1)
    with processes("cpu"):
        for folder, options in json.loads(Path(sys.argv[1]).read_text()).items():
            run_job(Path(folder), options)
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then


if __name__ == "__main__":
    main()
