"""pytorch_optimizer: HORST in its registry, so that load_optimizer and create_optimizer know the name "horst"."""

import torch
from pytorch_optimizer import create_optimizer, get_supported_optimizers
from pytorch_optimizer.optimizer import OPTIMIZERS
from sklearn.datasets import load_digits
from torch import nn

from horst.integrations.matrices import MatrixHORST
from horst.sparsity import ACDC, acdc_steps

OPTIMIZERS["horst"] = MatrixHORST  # a plain dictionary: the whole registration

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = create_optimizer(model, "horst", lr=1e-3, weight_decay=0.1, alpha=5.0)
sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=acdc_steps(600), layers="all_linear")
for _ in range(600):
    batch = torch.randint(len(x), (64,))
    nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
    optimizer.step()
    sparsifier.step()
    optimizer.zero_grad()
accuracy = (model(x).argmax(1) == y).float().mean()
print(f"{get_supported_optimizers('hors*')}: {type(optimizer).__name__}, decay in {len(optimizer.param_groups)} groups")
print(f"{sparsifier.current_sparsity:.1%} zeros, {accuracy:.1%} of the training images right")
