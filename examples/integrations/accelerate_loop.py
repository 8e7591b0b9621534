"""accelerate: HORST and a sparsifier in its loop, with gradient accumulation, clipping and saved state."""

import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from horst import HORST, param_groups
from horst.sparsity import GMP, Cubic

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = HORST(param_groups(model, weight_decay=0.1, alpha=5.0), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
sparsifier = GMP(model, optimizer, sparsity=0.9, schedule=Cubic(0, 200, every=10), layers="all_linear")
accelerator.register_for_checkpointing(sparsifier)

for _ in range(20):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                sparsifier.step()
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)  # model, optimizer, random states and masks; load_state(folder) resumes
accuracy = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
accelerator.print(f"{sparsifier.current_sparsity:.1%} zeros, {accuracy:.1%} of the training images right")
