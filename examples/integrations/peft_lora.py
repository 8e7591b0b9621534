"""PEFT: LoRA on a pruned network. Merging an ordinary adapter fills the zeros; one trained under the mask does not."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import nn

from horst import HORST, param_groups, sparsity
from horst.integrations.peft import keep_zeros, merge_and_unload

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(model, rows, lr, weight_decay):
    optimizer = HORST(param_groups(model, weight_decay=weight_decay, alpha=5.0), lr=lr)
    for _ in range(150):
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


torch.manual_seed(0)
base = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = train(base, y % 2 == 0, lr=1e-3, weight_decay=0.1)
sparsity.Static(base, optimizer, sparsity=0.8, layers="all_linear").close()  # prunes; the base knows even digits only
for adapter in ("ordinary", "ordinary, zeros put back", "masked"):
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, target_modules=["0", "2"]))
    if adapter == "masked":
        keep_zeros(model)
    train(model, y >= 0, lr=5e-3, weight_decay=0.0)  # all digits; so few steps need the larger rate
    model = merge_and_unload(model) if adapter == "masked" else model.merge_and_unload()
    if adapter == "ordinary, zeros put back":
        model[0].weight.data *= base[0].weight != 0
        model[2].weight.data *= base[2].weight != 0
    zeros, right = (model[0].weight == 0).float().mean(), (model(x).argmax(1) == y).float().mean()
    print(f"{adapter}: merged, {zeros:.0%} zeros in the first layer, {right:.1%} of the images right")
