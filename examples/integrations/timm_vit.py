"""timm: HORST by name through its optimizer factory, on a small ViT and scikit-learn's digits.

python examples/integrations/timm_vit.py
With timm's own script: python -m horst.integrations.timm train.py --opt horst --opt-kwargs alpha=5 ...
"""

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler

import horst.integrations.timm  # noqa: F401 - puts "horst" and "ham" into timm's registry
from horst.sparsity import ACDC, acdc_steps

EPOCHS, BATCH = 20, 64
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "embed_dim": 48, "depth": 2, "num_heads": 3}
model = timm.create_model("vit_tiny_patch16_224", **sizes)
print(list_optimizers("h*", with_description=True))

optimizer = create_optimizer_v2(model, "horst", lr=1e-3, weight_decay=0.1, alpha=5.0)
scheduler = CosineLRScheduler(optimizer, t_initial=EPOCHS, warmup_t=2, warmup_lr_init=1e-4)
steps = -(-len(x) // BATCH)
sparsifier = ACDC(model, optimizer, sparsity=0.8, schedule=acdc_steps(EPOCHS * steps))
for epoch in range(EPOCHS):
    for batch in torch.randperm(len(x)).split(BATCH):
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        sparsifier.step()
        optimizer.zero_grad()
    scheduler.step(epoch + 1)
with torch.no_grad():
    accuracy = (model.eval()(x).argmax(1) == y).float().mean()
print(f"{sparsifier.current_sparsity:.1%} of the blocks' weights zero, {accuracy:.1%} of the training images right")
