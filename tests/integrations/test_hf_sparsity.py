"""The Hugging Face callback: the masks that training had, in checkpoints and after resuming."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from horst.integrations.hf import SparsityCallback
from horst.sparsity import ACDC, SET, Phases, Static, acdc_steps, rigl_steps

STEPS = 20


def dataset():
    tokens = torch.randint(0, 32, (64, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def gpt2():
    set_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def train(tmp_path, callback, *, model=None, resume=None, more=(), **options):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        seed=0,
        **{"save_strategy": "no", **options},
    )
    model = model or gpt2()
    trainer = Trainer(
        model, arguments, train_dataset=dataset(), eval_dataset=dataset()[:8], callbacks=[callback, *more]
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


CALLBACKS = {
    "acdc": lambda: SparsityCallback(ACDC, sparsity=0.8, schedule=acdc_steps),
    "set": lambda: SparsityCallback(SET, sparsity=0.8, schedule=lambda total: rigl_steps(total, every=4)),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_resumed_trainer_goes_on_bit_for_bit(name, tmp_path):
    whole = CALLBACKS[name]()
    expected = train(tmp_path, whole, save_strategy="steps", save_steps=9)
    assert whole.sparsifier.steps == STEPS
    assert (tmp_path / "checkpoint-9" / "sparsifier.pt").exists()
    resumed = CALLBACKS[name]()
    model = train(tmp_path, resumed, resume=str(tmp_path / "checkpoint-9"))
    assert resumed.sparsifier.mask_hash() == whole.sparsifier.mask_hash()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_the_blocks_of_gpt2_end_exactly_sparse(tmp_path):
    callback = SparsityCallback(ACDC, sparsity=0.8, schedule=acdc_steps)
    model = train(tmp_path, callback, gradient_accumulation_steps=2, max_grad_norm=0.5)
    weights = [p for n, p in model.named_parameters() if ".h." in n and p.dim() == 2]
    total = sum(w.numel() for w in weights)
    assert sum(int((w == 0).sum()) for w in weights) == total * 8 // 10
    assert "these layers" in callback.sparsifier.summary()


def test_static_keeps_a_pruned_model_pruned(tmp_path):
    model = gpt2()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if ".h." in n and p.dim() == 2:
                p.mul_(torch.rand(p.shape) < 0.5)
    zero = {n: p == 0 for n, p in model.named_parameters() if ".h." in n and p.dim() == 2}
    train(tmp_path, SparsityCallback(Static), model=model)
    for n, p in model.named_parameters():
        if n in zero:
            assert torch.equal(p == 0, zero[n])


def test_best_models_and_their_metric(tmp_path):
    callback = SparsityCallback(
        ACDC, sparsity=0.8, schedule=Phases((12,), end=STEPS), metric="eval_loss", higher_is_better=False
    )
    train(tmp_path, callback, eval_strategy="steps", eval_steps=5)
    assert set(callback.sparsifier.best) == {"dense", "sparse"}
    assert callback.sparsifier.best["dense"].step <= 10
    assert callback.sparsifier.best["sparse"].step in (15, 20)
    for eval_steps in (5, STEPS):
        wrong = SparsityCallback(Static, sparsity=0.5, metric="eval_accuracy")
        with pytest.raises(KeyError, match="'eval_accuracy' is not among the evaluation's"):
            train(tmp_path, wrong, eval_strategy="steps", eval_steps=eval_steps)


def test_the_metric_of_one_of_several_datasets(tmp_path):
    callback = SparsityCallback(Static, sparsity=0.5, metric="eval_b_loss", higher_is_better=False)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    sets = {"a": dataset()[:8], "b": dataset()[8:16]}
    trainer = Trainer(gpt2(), arguments, train_dataset=dataset(), eval_dataset=sets, callbacks=[callback])
    trainer.train()
    assert set(callback.sparsifier.best) == {"sparse"}
    trainer.evaluate(dataset()[16:24], metric_key_prefix="test")  # a metric of another name is no error afterwards


def test_a_run_that_broke_off_leaves_no_hooks_to_the_next(tmp_path):
    class Broken(Exception):
        pass

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise Broken

    callback, model = SparsityCallback(Static, sparsity=0.8), gpt2()
    with pytest.raises(Broken):
        train(tmp_path, callback, model=model, more=[Break()])
    first = callback.sparsifier
    train(tmp_path, callback, model=model)
    assert first._handles == []


def test_a_model_that_ends_with_fewer_zeros_than_asked_for_is_told(tmp_path):
    steps = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    late, callback = Phases((8,), STEPS), CALLBACKS["acdc"]()
    with pytest.warns(UserWarning, match=r"has 0.0% zeros .* ACDC was to reach 80.0%.*load_best_model_at_end"):
        train(tmp_path, SparsityCallback(ACDC, sparsity=0.8, schedule=late), **steps, **best)  # the best is of step 4
    with pytest.warns(UserWarning, match=r"has 0.0% zeros.*ended before the schedule did, after 20 steps"):
        train(tmp_path, SparsityCallback(ACDC, sparsity=0.8, schedule=Phases((30,), 40)))
    train(tmp_path, callback, **steps, load_best_model_at_end=False)


def test_a_checkpoint_without_masks_is_refused(tmp_path):
    train(tmp_path, CALLBACKS["acdc"](), save_strategy="steps", save_steps=9)
    (tmp_path / "checkpoint-9" / "sparsifier.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"resumes at step 9, but .* holds no sparsifier.pt"):
        train(tmp_path, CALLBACKS["acdc"](), resume=str(tmp_path / "checkpoint-9"))
