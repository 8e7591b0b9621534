"""HORST from configure_optimizers: the Trainer does what a loop does, with clipping, accumulation and checkpoints."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from horst import HORST, param_groups

pytestmark = [
    # Lightning's advice on workers, loggers and test-sized runs.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*"),
]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4))

    def training_step(self, batch, _):
        return 10 * (self.net(batch[0]) - 1).square().mean()

    def configure_optimizers(self):
        optimizer = HORST(param_groups(self, weight_decay=0.1, alpha=5.0), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader():
    return DataLoader(TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(0))), batch_size=4)


def fit(tmp_path, epochs, ckpt_path=None):
    seed_everything(0, verbose=False)
    model = Net()
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, loader(), ckpt_path=ckpt_path)
    return model, trainer


def assert_same(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_the_trainer_does_what_a_loop_does(tmp_path):
    model, _ = fit(tmp_path, epochs=3)
    seed_everything(0, verbose=False)
    other = Net()
    parts = other.configure_optimizers()
    optimizer, scheduler = parts["optimizer"], parts["lr_scheduler"]["scheduler"]
    params = [p for group in optimizer.param_groups for p in group["params"]]  # in the order Lightning sums their norms
    for _ in range(3):
        for k, batch in enumerate(loader()):
            (other.training_step(batch, k) / 2).backward()
            if k % 2 == 1:
                assert nn.utils.clip_grad_norm_(params, 0.5) > 0.5
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert_same(model, other)


def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path):
    whole, _ = fit(tmp_path, epochs=3)
    _, trainer = fit(tmp_path, epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = fit(tmp_path, epochs=3, ckpt_path=tmp_path / "two.ckpt")
    assert_same(resumed, whole)
