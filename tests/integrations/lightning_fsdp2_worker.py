"""Lightning with FSDP2 on two CPU processes, which Lightning starts itself, for test_lightning_sparsity.py.

python lightning_fsdp2_worker.py FOLDER
"""

import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from horst import HORST, param_groups
from horst.integrations.lightning import SparsityCallback
from horst.sparsity import ACDC, Phases


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return HORST(param_groups(self), lr=0.05)


def fit(steps, callback, ckpt_path=None, distributed=True):
    seed_everything(0, verbose=False)
    # All rows alike: a resumed Trainer shuffles its data in another order.
    rows = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).expand(32, 6)
    data = DataLoader(TensorDataset(rows), batch_size=4)
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=distributed)
    trainer = Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net()
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer, [p.full_tensor().detach() for p in model.parameters()]


def main(folder):
    def callback():
        return SparsityCallback(ACDC, sparsity=0.75, schedule=Phases((2,), end=8), layers="all_linear")

    warnings.simplefilter("ignore")
    whole = callback()
    _, expected = fit(8, whole)
    for distributed in (True, False):
        first, second = callback(), callback()
        trainer, _ = fit(4, first, distributed=distributed)
        path = f"{folder}/{'sharded' if distributed else 'one.ckpt'}"
        trainer.save_checkpoint(path)
        assert first.sparsifier.is_sharded
        assert first.sparsifier.current_sparsity == 0.75
        _, resumed = fit(8, second, ckpt_path=path, distributed=distributed)
        assert second.sparsifier.steps == 8
        assert second.sparsifier.mask_hash() == whole.sparsifier.mask_hash()
        assert all(map(torch.equal, resumed, expected))
    print("resumed both")


if __name__ == "__main__":
    main(sys.argv[1])
