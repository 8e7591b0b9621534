"""LightningCLI: HORST by its class path, in a YAML file or on the command line; the model says nothing of it.

In a script that ends with ``LightningCLI(Digits)``: python train.py fit --config horst.yaml
Needs jsonargparse: pip install "jsonargparse[signatures]"
"""

import pathlib
import tempfile

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = """
seed_everything: 0
trainer: {max_epochs: 10, accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false}
optimizer: {class_path: horst.HORST, init_args: {lr: 1.0e-3, weight_decay: 0.1, alpha: 5.0}}
"""


class Digits(lightning.LightningModule):  # noqa: D101
    def __init__(self, width: int = 128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))

    def training_step(self, batch, _):  # noqa: D102
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self):  # noqa: D102
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        return DataLoader(TensorDataset(images.float() / 16, labels), batch_size=64, shuffle=True)


with tempfile.TemporaryDirectory() as folder:
    (file := pathlib.Path(folder, "horst.yaml")).write_text(CONFIG)
    cli = LightningCLI(Digits, args=["fit", "--config", str(file)], save_config_callback=None)
print(type(cli.trainer.optimizers[0]).__name__, "alpha", cli.trainer.optimizers[0].param_groups[0]["alpha"])
