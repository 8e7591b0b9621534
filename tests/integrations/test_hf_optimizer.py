"""HORST in Hugging Face's Trainer: its groups, its arguments, resuming, and a sparse export loaded back into it."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from horst import HORST, param_groups
from horst.export import load_pretrained, save_hugging_face
from horst.integrations import hf
from horst.sparsity import ACDC, Static, acdc_steps

STEPS = 20


def gpt2():
    set_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def make_trainer(tmp_path, model=None, *, optimizer=None, ours=False, callbacks=None, model_init=None, **options):
    defaults = {"save_strategy": "no", "weight_decay": 0.1, "adam_beta2": 0.95, "lr_scheduler_type": "cosine"}
    args = TrainingArguments(
        str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        **{**defaults, **options},
    )
    tokens = torch.randint(0, 32, (64, 12), generator=torch.Generator().manual_seed(0))
    return Trainer(
        model,
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=(optimizer, None),
        optimizer_cls_and_kwargs=hf.horst(args, alpha=5.0, beta=0.01) if ours else None,
        model_init=model_init,
        callbacks=callbacks,
    )


def train(*args, resume=None, **options):
    trainer = make_trainer(*args, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def assert_same(a, b):
    for (name, p), q in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


def test_the_trainers_groups_decay_and_matrices_are_mirrored(tmp_path):
    by_hand = gpt2()
    groups = {}
    for name, p in by_hand.named_parameters():
        matrix = p.ndim >= 2
        assert matrix == ("bias" not in name and "ln_" not in name)
        options = {"params": [], "weight_decay": 0.1 * matrix, "alpha": 5.0 * matrix, "beta": 0.01 * matrix}
        groups.setdefault(matrix, options)["params"].append(p)
    optimizer = HORST(groups.values(), lr=0.01, betas=(0.9, 0.95))
    train(tmp_path, by_hand, optimizer=optimizer)
    assert_same(train(tmp_path, gpt2(), ours=True), by_hand)


def test_only_the_mirror_step_sets_it_apart_from_the_trainers_adamw(tmp_path):
    def without_mirror_step():
        trainer = make_trainer(tmp_path, gpt2(), ours=True)
        trainer.optimizer_cls_and_kwargs[1].update(alpha=0.0, beta=0.0)
        trainer.train()
        return trainer.model

    adamw = train(tmp_path, gpt2(), optim="adamw_torch", optim_args="foreach=False")
    for (name, p), q in zip(without_mirror_step().named_parameters(), adamw.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def test_the_trainer_may_build_the_model_too(tmp_path):
    given = make_trainer(tmp_path, gpt2(), ours=True)
    gpt2()  # draws what model_init draws before the data is shuffled
    given.train()
    assert_same(train(tmp_path, ours=True, model_init=gpt2), given.model)


def recommended(model):
    return param_groups(model, weight_decay=0.1, decay="all", alpha="auto", l1=0.2)


@pytest.mark.filterwarnings("ignore:lr=0.01 is more than 0.1 times")
def test_groups_of_the_model_equal_an_optimizer_built_by_hand(tmp_path):
    by_hand = gpt2()
    train(tmp_path, by_hand, optimizer=HORST(recommended(by_hand), lr=0.01, betas=(0.9, 0.95)))

    def with_groups(model=None, **options):
        trainer = make_trainer(tmp_path, model, **options)
        trainer.optimizer_cls_and_kwargs = hf.horst(trainer.args, groups=recommended)
        return trainer

    given = with_groups(gpt2())
    given.train()
    assert type(given.optimizer.optimizer) is HORST
    assert_same(given.model, by_hand)

    again = with_groups(gpt2())
    gpt2()  # draws what model_init draws before the data is shuffled
    again.train()
    built = with_groups(model_init=gpt2)
    built.train()
    assert_same(built.model, again.model)


def test_groups_need_a_trainer_that_gives_the_model(tmp_path, monkeypatch):
    monkeypatch.delattr("transformers.trainer.is_optimizer_factory")
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ImportError, match=r"groups= needs transformers 5.2 or newer, found .* optimizers=\(HORST\("):
        hf.horst(args, groups=recommended)


def options_of(name):
    """The two ways to hand HORST over, each with its model."""
    model = gpt2()
    if name == "optimizer_cls_and_kwargs":
        return {"model": model, "ours": True}
    return {"model": model, "optimizer": HORST(param_groups(model, weight_decay=0.1, alpha=5.0), lr=0.01)}


@pytest.mark.parametrize("name", ["optimizers", "optimizer_cls_and_kwargs"])
def test_interrupted_and_resumed_equals_uninterrupted(name, tmp_path):
    def acdc():
        return [hf.SparsityCallback(ACDC, sparsity=0.8, schedule=acdc_steps)]

    whole = train(tmp_path, callbacks=acdc(), save_strategy="steps", save_steps=13, **options_of(name))
    resumed = train(tmp_path, callbacks=acdc(), resume=str(tmp_path / "checkpoint-13"), **options_of(name))
    assert_same(resumed, whole)
    weights = [p for n, p in resumed.named_parameters() if ".h." in n and p.ndim == 2]
    assert sum(int((w == 0).sum()) for w in weights) == sum(w.numel() for w in weights) * 8 // 10


def test_a_run_of_the_trainers_default_adamw_changes_over_at_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # where the kernel cannot run, AdamW's fused step can
    first = make_trainer(tmp_path, gpt2(), optim="adamw_torch_fused", save_strategy="steps", save_steps=13)
    first.train()
    assert first.optimizer.param_groups[0]["fused"] is True
    trainer = make_trainer(tmp_path, gpt2(), ours=True)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-13"))
    (group, _), (state, *_) = trainer.optimizer.param_groups, trainer.optimizer.state.values()
    assert (group["alpha"], group["fused"], int(state["step"])) == (5.0, None, STEPS)
    changed = [not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), first.model.parameters(), strict=True)]
    assert any(changed)  # the last steps were HORST's


def test_what_the_training_arguments_say_is_not_said_twice(tmp_path):
    args = TrainingArguments(str(tmp_path), learning_rate=3e-4, report_to=[], use_cpu=True)
    assert hf.horst(args, l1=0.1)[1] == {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "l1": 0.1}
    with pytest.raises(TypeError, match=r"lr, weight_decay comes from the training arguments. Set TrainingArguments"):
        hf.horst(args, lr=1e-3, weight_decay=0.1, alpha=5.0)


def pruned_gpt2():
    model = gpt2()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".h." in name and p.ndim == 2:
                p.mul_(torch.rand(p.shape) < 0.1)
    return model


@pytest.mark.parametrize("sparse", [True, False])
def test_a_sparse_export_comes_back_and_is_trained_on_with_its_zeros(sparse, tmp_path):
    model = pruned_gpt2()
    save_hugging_face(model, tmp_path / "pruned", sparse=sparse)
    assert (tmp_path / "pruned" / "model.sparse.safetensors").exists() == sparse
    loaded = load_pretrained(tmp_path / "pruned")
    assert isinstance(loaded, GPT2LMHeadModel)
    assert_same(loaded, model)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    zeros = {name: p == 0 for name, p in loaded.named_parameters() if ".h." in name and p.ndim == 2}
    before = loaded.transformer.h[0].mlp.c_fc.weight.clone()
    train(tmp_path / "run", loaded, ours=True, callbacks=[hf.SparsityCallback(Static)])
    for name, p in loaded.named_parameters():
        if name in zeros:
            assert torch.equal(p == 0, zeros[name]), name
    assert not torch.equal(loaded.transformer.h[0].mlp.c_fc.weight, before)


def test_an_export_can_be_run_sparse(tmp_path):
    save_hugging_face(pruned_gpt2(), tmp_path / "pruned", sparse=True)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        dense, sparse = (load_pretrained(tmp_path / "pruned", sparse=flag)(tokens).logits for flag in (False, True))
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)
