"""One process of a sparsifying Trainer under DDP, for test_hf_sparsify.py: torchrun hf_sparsify_worker.py FOLDER."""

import sys

import torch

if __name__ == "__main__":
    from test_hf_sparsify import train_watched  # found beside this file, which is a script here

    found = {method: train_watched(sys.argv[1], method, 4) for method in ("magnitude", "sparsegpt")}
    torch.save(found, f"{sys.argv[1]}/rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
