"""The Lightning callback: the same masks as a hand-written loop, restarts, accumulation, averages."""

import pathlib
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from horst.integrations.lightning import SparsityCallback
from horst.sparsity import ACDC, SRSTE, Phases, RigL, Static, acdc_steps, rigl_steps

pytestmark = [
    # Lightning's advice on workers, loggers and test-sized runs.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*"),
]
STEPS = 24


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.seen_at_validation = []

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, _):
        self.seen_at_validation.append(int((self.net[0].weight == 0).sum()))
        self.log("score", float(len(self.seen_at_validation)))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def loader(batches=STEPS):
    x = torch.randn(4 * batches, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=4)


def fit(callback, tmp_path, *, max_steps=STEPS, ckpt_path=None, callbacks=(), batches=STEPS, **options):
    seed_everything(0, verbose=False)
    model = Net()
    trainer = Trainer(
        max_steps=max_steps,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[*callbacks, callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(model, loader(batches), loader(1), ckpt_path=ckpt_path)
    return model, trainer


CALLBACKS = {
    "acdc": lambda: SparsityCallback(ACDC, sparsity=0.75, schedule=Phases((3, 9, 15), end=STEPS), layers="all_linear"),
    "rigl": lambda: SparsityCallback(
        RigL, sparsity=0.75, schedule=lambda total: rigl_steps(total, every=5), layers="all_linear"
    ),
    "srste": lambda: SparsityCallback(SRSTE, layers="all_linear", exclude=["net.0.*"]),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_the_trainer_does_what_a_loop_does(name, tmp_path):
    callback = CALLBACKS[name]()
    model, _ = fit(callback, tmp_path)
    seed_everything(0, verbose=False)
    other = Net()
    optimizer = other.configure_optimizers()
    arguments = dict(callback.arguments)
    if callable(arguments.get("schedule")):
        arguments["schedule"] = arguments["schedule"](STEPS)
    sparsifier = callback.method(other, optimizer, **arguments)
    for batch in loader():
        optimizer.zero_grad()
        other.training_step(batch, 0).backward()
        optimizer.step()
        sparsifier.step()
    assert sparsifier.steps == callback.sparsifier.steps == STEPS
    assert sparsifier.mask_hash() == callback.sparsifier.mask_hash()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert sparsifier.is_sparse


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_resumed_trainer_goes_on_bit_for_bit(name, tmp_path):
    whole = CALLBACKS[name]()
    expected, _ = fit(whole, tmp_path, batches=12)
    # One epoch of 12 batches, saved, then the second: within an epoch Lightning does not resume the data.
    first = CALLBACKS[name]()
    total = {"schedule": first.arguments["schedule"](STEPS)} if callable(first.arguments.get("schedule")) else {}
    first.arguments |= total
    _, trainer = fit(first, tmp_path, max_steps=12, batches=12)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = CALLBACKS[name]()
    model, _ = fit(second, tmp_path, ckpt_path=tmp_path / "half.ckpt", batches=12)
    assert second.sparsifier.steps == STEPS
    assert second.sparsifier.mask_hash() == whole.sparsifier.mask_hash()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_accumulated_batches_count_as_one_step(tmp_path):
    callback = SparsityCallback(ACDC, sparsity=0.75, schedule=Phases((3,), end=6), layers="all_linear")
    fit(callback, tmp_path, max_steps=6, accumulate_grad_batches=4)
    assert callback.sparsifier.steps == 6
    assert callback.sparsifier.current_sparsity == 0.75


def test_a_schedule_may_be_a_function_of_the_total_number_of_steps(tmp_path):
    callback = SparsityCallback(ACDC, sparsity=0.75, schedule=acdc_steps, layers="all_linear")
    fit(callback, tmp_path)
    assert callback.sparsifier.schedule == acdc_steps(STEPS)


def test_averages_are_masked_at_validation(tmp_path):
    callback = SparsityCallback(ACDC, sparsity=0.75, schedule=Phases((6,), end=STEPS), layers="all_linear")
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="needs Lightning 2.6")
    ema = averaging.EMAWeightAveraging(decay=0.9)
    model, _ = fit(callback, tmp_path, callbacks=[ema], val_check_interval=12, num_sanity_val_steps=0)
    zeros = int((~callback.sparsifier.masks["net.0.weight"]).sum())
    assert zeros > 0
    assert model.seen_at_validation == [zeros, zeros]


def test_an_average_that_becomes_the_final_model_is_masked(tmp_path):
    callback = SparsityCallback(ACDC, sparsity=0.75, schedule=Phases((20,), end=STEPS), layers="all_linear")
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="needs Lightning 2.6")
    model, _ = fit(callback, tmp_path, callbacks=[averaging.EMAWeightAveraging(decay=0.9)], limit_val_batches=0)
    masks = callback.sparsifier.masks
    assert all(torch.equal(model.get_parameter(name) != 0, mask) for name, mask in masks.items())


def test_the_hooks_are_off_after_training(tmp_path):
    callback = SparsityCallback(Static, sparsity=0.75, layers="all_linear")
    model, _ = fit(callback, tmp_path, max_steps=2)
    model.zero_grad()
    model.training_step([torch.ones(4, 6)], 0).backward()
    assert model.net[0].weight.grad[~callback.sparsifier.masks["net.0.weight"]].any()


def test_a_run_without_end_needs_a_schedule_in_steps(tmp_path):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 3

    callback = SparsityCallback(Static, sparsity=0.75, layers="all_linear")
    fit(callback, tmp_path, max_steps=-1, callbacks=[Stop()])
    assert callback.sparsifier.current_sparsity == 0.75
    endless = SparsityCallback(ACDC, sparsity=0.75, schedule=acdc_steps, layers="all_linear")
    with pytest.raises(ValueError, match=r"which this run does not fix \(inf\). Limit the trainer's steps or epochs"):
        fit(endless, tmp_path, max_steps=-1, callbacks=[Stop()])


def test_the_best_sparse_model_is_kept(tmp_path):
    callback = SparsityCallback(
        ACDC, sparsity=0.75, schedule=Phases((6,), end=STEPS), layers="all_linear", metric="score"
    )
    fit(callback, tmp_path, val_check_interval=12, num_sanity_val_steps=0)
    assert (callback.sparsifier.best["sparse"].metric, callback.sparsifier.best["sparse"].step) == (2.0, 24)
    wrong = SparsityCallback(ACDC, sparsity=0.75, schedule=acdc_steps, layers="all_linear", metric="acc")
    with pytest.raises(KeyError, match=r"metric='acc' was not logged; logged are:.*score"):
        fit(wrong, tmp_path)


@pytest.mark.parametrize(
    ("module", "package", "extra"), [("lightning", "lightning", "lightning"), ("hf", "transformers", "hf")]
)
def test_a_missing_package_names_its_extra(module, package, extra):
    code = f"import sys; sys.modules[{package!r}] = None; import horst.sparsity; import horst.integrations.{module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f'pip install ".[{extra}]"' in result.stderr


def test_lightning_saves_and_resumes_masks_under_fsdp2(tmp_path):
    """One file, and one per rank. Lightning starts the second process itself."""
    worker = pathlib.Path(__file__).parent / "lightning_fsdp2_worker.py"
    command = [sys.executable, str(worker), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.count("resumed both") == 2, done.stdout + done.stderr
