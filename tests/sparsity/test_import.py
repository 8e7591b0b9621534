"""What ``import horst.sparsity`` costs: torch, and nothing that torch itself does not load."""

import subprocess
import sys


def test_importing_the_masks_loads_no_distributed_tensors_and_no_compiler():
    code = (
        "import torch, sys; before = set(sys.modules); import horst.sparsity; "
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('horst')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = (
        "triton",
        "sympy",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
    )
    assert [module for module in loaded if module.startswith(heavy)] == []
