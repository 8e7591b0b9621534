"""Lightning: HORST in configure_optimizers and RigL as a callback, on scikit-learn's digits."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from horst import HORST, param_groups
from horst.integrations.lightning import SparsityCallback
from horst.sparsity import RigL, rigl_steps


class Digits(lightning.LightningModule):  # noqa: D101
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch, _):  # noqa: D102
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):  # noqa: D102
        return HORST(param_groups(self, weight_decay=0.1, alpha=5.0), lr=1e-3)


lightning.seed_everything(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
callback = SparsityCallback(RigL, sparsity=0.9, schedule=lambda total: rigl_steps(total, every=20), layers="all_linear")
trainer = lightning.Trainer(
    max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback]
)
model = Digits()
trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
accuracy = (model.net(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
print(f"{callback.sparsifier.current_sparsity:.1%} zeros, {accuracy:.1%} of the training images right")
