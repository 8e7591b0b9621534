"""FSDP2 as torchtitan uses it: each block sharded, HORST over DTensors, AC/DC, a distributed checkpoint.

torchrun --nproc-per-node 2 examples/integrations/fsdp2_torchrun.py (gloo on a CPU)
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from horst import HORST, param_groups
from horst.sparsity import ACDC, acdc_steps

dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Linear(8, 32), nn.Sequential(*blocks), nn.Linear(32, 1))
for module in (*blocks, model):
    fully_shard(module)
optimizer = HORST(param_groups(model, weight_decay=0.1, alpha=5.0), lr=1e-3)  # after sharding
sparsifier = ACDC(model, optimizer, sparsity=0.8, schedule=acdc_steps(40))
for step in range(40):
    torch.manual_seed(1000 * step + dist.get_rank())  # each rank its own data
    x = torch.randn(16, 4, 8)
    (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
    optimizer.step()
    sparsifier.step()
    optimizer.zero_grad()
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])  # here or on another number of ranks
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
print(f"rank {dist.get_rank()}: {sparsifier.current_sparsity:.0%} zeros over all ranks, saved in {folder[0]}")
dist.destroy_process_group()
