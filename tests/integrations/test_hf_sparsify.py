"""The Trainer that makes its model sparse: with transformers' own Trainer and with TRL's."""

import contextlib
import copy
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch.utils.data import IterableDataset
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from horst.integrations import hf_sparsify
from horst.integrations.hf import horst
from horst.integrations.hf_sparsify import SparsifyMixin, SparsifyTrainer
from horst.pruning import prune
from horst.recovery import NotSparse, SparsifyConfig, kl_divergence
from horst.sparsity import Static, find_layers

WORKER = Path(__file__).parent / "hf_sparsify_worker.py"


def dataset(rows=32):
    tokens = torch.randint(0, 32, (rows, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, 6:] = tokens[:, :6]  # something to learn
    return [{"input_ids": row, "labels": row} for row in tokens]


def gpt2(blocks=2):
    set_seed(0)
    size = {"n_embd": 16, "n_layer": blocks, "n_head": 2}
    config = GPT2Config(vocab_size=32, n_positions=12, bos_token_id=0, eos_token_id=0, **size)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    for layer in find_layers(model, "blocks"):
        layer.param.data.normal_(std=0.3)
    return model


def arguments(tmp_path, **options):
    return TrainingArguments(
        str(tmp_path), **{
            "max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "report_to": [], "use_cpu": True,
            "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "dataloader_pin_memory": False,
            "seed": 0, **options,
        },
    )  # fmt: skip


def make(tmp_path, model=None, config=None, trainer=SparsifyTrainer, teacher=None, **options):
    model = model or gpt2()
    config = config or SparsifyConfig(sparsity=0.5, samples=8)
    args = arguments(tmp_path, **options)
    return trainer(
        model, args, train_dataset=dataset(), eval_dataset=dataset(8), sparsify=config, teacher=teacher,
        optimizer_cls_and_kwargs=horst(args),
    )  # fmt: skip


def zeros(model):
    return {layer.name: int((layer.param == 0).sum()) / layer.param.numel() for layer in find_layers(model, "blocks")}


@pytest.mark.parametrize("method", ["sparsegpt", "magnitude"])
def test_the_model_is_pruned_before_the_first_step_and_stays_so(method, tmp_path):
    trainer = make(tmp_path, config=SparsifyConfig(sparsity=0.5, method=method, samples=8))
    trainer.train()
    assert set(zeros(trainer.model).values()) == {0.5}
    plain = Trainer(trainer.model, trainer.args, eval_dataset=dataset(8))
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]  # the teacher has no part in it


@pytest.mark.parametrize("method", ["sparsegpt", "magnitude"])
def test_one_threshold_divides_the_zeros_and_paper_leaves_the_outer_blocks_dense(method, tmp_path):
    config = SparsifyConfig(sparsity=0.6, method=method, distribution="global", layers="paper", samples=8)
    trainer = make(tmp_path, model=gpt2(blocks=3), config=config)
    trainer.train()
    shares = zeros(trainer.model)
    assert len({share for name, share in shares.items() if ".h.1." in name}) > 1
    assert {share for name, share in shares.items() if ".h.1." not in name} == {0.0}


def test_two_of_four(tmp_path):
    trainer = make(tmp_path, config=SparsifyConfig(pattern="2:4", samples=8))
    trainer.train()
    weight = trainer.model.transformer.h[0].mlp.c_fc.weight.T  # GPT-2 stores its weights inputs first
    assert torch.equal((weight.reshape(-1, 4) != 0).sum(1), torch.full((weight.numel() // 4,), 2))


def test_the_loss_is_the_weighted_sum_of_both_terms(tmp_path):
    model, teacher = gpt2().double(), gpt2().double()
    for p in teacher.parameters():
        p.data += 0.05 * torch.randn_like(p)
    trainer = make(tmp_path, model=model, teacher=teacher)
    rows = {k: torch.stack([r[k] for r in dataset(4)]) for k in ("input_ids", "labels")}
    rows["labels"] = rows["labels"].clone()
    rows["labels"][:2, 8:] = -100
    model.train()
    found = trainer.compute_loss(model, rows)
    logits, dense = (m(input_ids=rows["input_ids"]).logits[:, :-1] for m in (model, teacher))
    targets = rows["labels"][:, 1:]
    counts = targets != -100
    label = F.cross_entropy(logits[counts], targets[counts])
    p, log_p = (dense[counts] / 2).softmax(-1), (dense[counts] / 2).log_softmax(-1)
    distance = 4 * (p * (log_p - (logits[counts] / 2).log_softmax(-1))).sum(-1).mean()
    assert found.item() == pytest.approx(
        (0.33 * label + 0.67 * distance).item(), rel=1e-6
    )  # transformers computes its part in float32


@pytest.mark.parametrize("distill", ["kl", "squarehead"])
def test_accumulated_parts_are_one_batch(distill, tmp_path):
    weights = []
    for options in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
        config = SparsifyConfig(sparsity=0.5, method="magnitude", distill=distill)
        trainer = make(tmp_path, model=gpt2().double(), config=config, max_steps=2, **options)
        if distill == "squarehead":  # a mean of ratios, which is that of the parts only where rows are alike
            trainer.train_dataset = dataset(1) * 32
        trainer.optimizer_cls_and_kwargs = torch.optim.SGD, {"lr": 0.1}  # Adam would divide rounding by itself
        trainer.train()
        weights.append(trainer.model.transformer.h[1].mlp.c_fc.weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("distill", ["kl", "squarehead"])
def test_processes_that_average_their_gradients_see_the_loss_of_one(distill, tmp_path, monkeypatch):
    trainer = make(tmp_path, model=gpt2().double(), config=SparsifyConfig(sparsity=0.5, distill=distill))
    trainer.model.transformer.h[0].mlp.c_fc.weight.data.mul_(0.5)  # unlike the teacher
    trainer.model.train()
    rows = {name: torch.stack([row[name] for row in dataset(4)]) for name in ("input_ids", "labels")}
    items = rows["labels"][:, 1:].numel()
    expected = trainer.compute_loss(trainer.model, rows, num_items_in_batch=items)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    found = trainer.compute_loss(trainer.model, rows, num_items_in_batch=2 * items)  # counted over both
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("name", "value"), [("loss_is_scaled_for_ga", False), ("model_accepts_loss_kwargs", False)])
def test_a_loss_that_the_trainer_divides_is_not_divided_here(name, value, tmp_path):
    teacher = gpt2()
    teacher.transformer.h[0].mlp.c_fc.weight.data.mul_(0.5)
    config = SparsifyConfig(sparsity=0.5, label_weight=0.0)
    trainer = make(tmp_path, config=config, teacher=teacher, gradient_accumulation_steps=4)
    rows = {name: torch.stack([row[name] for row in dataset(4)]) for name in ("input_ids", "labels")}
    trainer.model.train()
    expected = trainer.compute_loss(trainer.model, rows)
    assert expected > 0
    setattr(trainer, name, value)
    torch.testing.assert_close(
        trainer.compute_loss(trainer.model, rows, num_items_in_batch=torch.tensor(200)), expected
    )


class Watched(Trainer):
    """Keeps the weights it is to train: DDP would hide that those of the ranks differ."""

    def train(self, **options):
        self.at_the_start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return super().train(**options)


class WatchedSparsifyTrainer(SparsifyMixin, Watched):
    pass


def train_watched(folder, method, batch_size):
    config = SparsifyConfig(sparsity=0.5, method=method, samples=8)
    options = {"max_steps": 3, "per_device_train_batch_size": batch_size}
    trainer = make(folder, gpt2().double(), config, WatchedSparsifyTrainer, **options)
    trainer.optimizer_cls_and_kwargs = torch.optim.SGD, {"lr": 0.1}  # Adam would divide rounding by itself
    trainer.train()
    return trainer.at_the_start, {name: p.detach() for name, p in trainer.model.named_parameters()}


def test_two_processes_prune_alike_and_train_the_run_of_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(WORKER), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for method, found in first.items():
        for mine, others in zip(found, second[method], strict=True):  # before the training, and after it
            assert all(torch.equal(mine[name], others[name]) for name in mine), method
    _, expected = train_watched(tmp_path, "magnitude", 8)
    for name, weight in first["magnitude"][1].items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-7, msg=name)


def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path):
    whole = make(tmp_path, save_strategy="steps", save_steps=3)
    dense = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.train()
    teacher = gpt2()
    teacher.load_state_dict(dense)
    resumed = make(tmp_path, teacher=teacher)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_weights_that_come_back_are_an_error(tmp_path):
    trainer = make(tmp_path)

    class Meddler(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            model.transformer.h[0].mlp.c_fc.weight.data.add_(1.0)

    trainer.add_callback(Meddler())  # after the one that zeroes them
    with pytest.raises(NotSparse, match=r"c_fc\.weight has 512 masked weights that are not zero"):
        trainer.train()


@pytest.mark.parametrize(
    ("setting", "value", "instead"),
    [
        ("steps", 5, "use TrainingArguments.max_steps"),
        ("stages", (0.3,), "call horst.sparsify"),
        ("lora", 4, "call horst.sparsify"),
        ("batch_size", 8, "use TrainingArguments.per_device_train_batch_size"),
        ("lr", 1e-3, "use TrainingArguments.learning_rate"),
        ("betas", (0.9, 0.95), "use TrainingArguments.adam_beta1 and adam_beta2"),
        ("weight_decay", 0.1, "use TrainingArguments.weight_decay"),
        ("alpha", "auto", r"hf.horst\(args, alpha=...\) or optimizers=\(...\)"),
        ("l1", 0.1, r"hf.horst\(args, l1=...\) or optimizers=\(...\)"),
        ("warmup", 0.1, "use TrainingArguments.warmup_steps"),
        ("seed", 1, "use TrainingArguments.seed"),
        ("gradient_checkpointing", True, "use TrainingArguments.gradient_checkpointing"),
        ("parallel", "fsdp", "start the Trainer with torchrun or accelerate"),
    ],
)
def test_settings_that_the_trainer_decides_are_refused(setting, value, instead, tmp_path):
    config = SparsifyConfig(sparsity=0.5, **{setting: value})
    with pytest.raises(ValueError, match=f"{setting} of SparsifyConfig has no effect in a Trainer.*{instead}"):
        make(tmp_path, config=config)


@pytest.mark.parametrize(
    ("optimizer", "optim", "expected"),
    [("horst", None, "MatrixHORST"), ("adamw", None, "AdamW"), ("horst", "sgd", "SGD")],
)
def test_the_optimizer_is_horst_unless_another_is_asked_for(optimizer, optim, expected, tmp_path, caplog):
    arguments = {} if optim is None else {"optim": optim}
    trainer = make(tmp_path, config=SparsifyConfig(sparsity=0.5, samples=8, optimizer=optimizer), **arguments)
    trainer.optimizer_cls_and_kwargs = None  # the helper of these tests gives one
    with caplog.at_level("INFO", "horst"):
        trainer.create_optimizer()
    assert type(trainer.optimizer).__name__ == expected
    assert ("the optimizer is HORST; for AdamW give" in caplog.text) == (expected == "MatrixHORST")
    assert trainer.optimizer.param_groups[0]["lr"] == trainer.args.learning_rate


def test_an_optimizer_that_was_given_stays(tmp_path):
    trainer = make(tmp_path)
    trainer.optimizer_cls_and_kwargs = torch.optim.SGD, {"lr": 0.1}
    trainer.create_optimizer()
    assert type(trainer.optimizer) is torch.optim.SGD


def test_every_setting_acts_in_a_trainer_or_is_refused():
    acting = {"sparsity", "pattern", "method", "distill", "label_weight", "distill_weight", "temperature"}
    acting |= {"layers", "include", "exclude", "samples", "distribution", "optimizer"}
    assert acting | set(hf_sparsify._NOT_HERE) == {field.name for field in dataclasses.fields(SparsifyConfig)}


# Without a record, more zeros than asked for can also come from a model that was sparse before.
@pytest.mark.parametrize(("sparsity", "recorded"), [(0.5, True), (0.8, True), (0.8, False)])
def test_a_checkpoint_of_another_sparsity_is_refused_before_training(sparsity, recorded, tmp_path):
    make(tmp_path, config=SparsifyConfig(sparsity=0.7, samples=8), save_strategy="steps", save_steps=3).train()
    message = f"was made with sparsity=0.7, and SparsifyConfig asks for sparsity={sparsity}. Give sparsity=0.7 to go on"
    if not recorded:
        (tmp_path / "checkpoint-3" / "sparsify.json").unlink()
        message = "has 69.9% zeros in the pruned layers, and SparsifyConfig asks for sparsity=0.8"
    resumed = make(tmp_path, config=SparsifyConfig(sparsity=sparsity, samples=8))
    resumed.compute_loss = lambda *_, **__: pytest.fail("trained")
    with pytest.raises(ValueError, match=message):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    Static(resumed.model, torch.optim.SGD(resumed.model.parameters())).close()  # none is open


def test_a_training_that_is_broken_off_leaves_the_model_to_the_next_trainer(tmp_path):
    class CtrlC(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = make(tmp_path, config=SparsifyConfig(sparsity=0.5, method="magnitude", distill="none"))
    trainer.add_callback(CtrlC())
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    make(tmp_path, trainer.model, trainer.sparsify_config).train()


def test_a_checkpoint_outside_of_the_output_directory_is_resumed(tmp_path):
    make(tmp_path / "first", save_strategy="steps", save_steps=3).train()
    resumed = make(tmp_path / "second")
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
    assert set(zeros(resumed.model).values()) == {0.5}


def test_a_sparse_model_without_a_teacher_warns_that_it_teaches_itself(tmp_path):
    model = gpt2()
    prune(model, 0.7)
    with pytest.warns(
        UserWarning, match="70% of the weights to prune are zero already.*Give teacher=, the dense model"
    ):
        make(tmp_path, model=model)
    make(tmp_path, model=model, teacher=gpt2())  # warnings are errors


def test_frozen_weights_are_left_alone(tmp_path):
    model = gpt2()
    model.transformer.h[0].requires_grad_(False)
    trainer = make(tmp_path, model=model)
    trainer.train()
    assert set(zeros(model).values()) == {0.5}
    assert all((p != 0).all() for name, p in model.transformer.h[0].named_parameters() if name.endswith("c_fc.weight"))


def test_a_model_that_would_not_be_the_one_that_is_pruned_is_refused(tmp_path):
    config, args = SparsifyConfig(sparsity=0.5, samples=8), arguments(tmp_path)
    with pytest.raises(ValueError, match=r"model_init makes a new model in train\(\)"):
        SparsifyTrainer(None, args, model_init=lambda: gpt2(), train_dataset=dataset(), sparsify=config)
    adapted = get_peft_model(gpt2(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match="the model has PEFT adapters"):
        make(tmp_path, model=adapted)
    model = gpt2()
    with pytest.raises(ValueError, match="the teacher shares weights with the model"):
        make(tmp_path, model=model, teacher=model)


@pytest.mark.parametrize("labels", [torch.rand(4, 3), torch.tensor([0, 2, 1, 2])], ids=["several", "one"])
def test_the_distance_of_a_classifier_is_a_mean_over_its_rows(labels, tmp_path):
    several = labels.dim() == 2
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    kind = "multi_label_classification" if several else "single_label_classification"
    config = BertConfig(vocab_size=32, num_labels=3, problem_type=kind, hidden_dropout_prob=0.0, **size)
    config.attention_probs_dropout_prob = 0.0
    model, teacher = (BertForSequenceClassification(config).double() for _ in range(2))
    settings = SparsifyConfig(sparsity=0.5, label_weight=0.0, distill_weight=1.0)
    trainer = make(tmp_path, model=model, teacher=teacher, config=settings)
    rows = {"input_ids": torch.randint(0, 32, (4, 8)), "labels": labels.double() if several else labels}
    model.train()
    found = trainer.compute_loss(model, rows, num_items_in_batch=torch.tensor(labels.numel()))
    with torch.no_grad():
        expected = kl_divergence(model(rows["input_ids"]).logits, teacher(rows["input_ids"]).logits, 2.0)
    torch.testing.assert_close(found, expected)


def test_a_narrow_teacher_takes_float32_images(tmp_path):
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BeitForImageClassification(BeitConfig(num_labels=3, image_size=16, patch_size=8, **size))
    trainer = make(tmp_path, model=model, teacher=copy.deepcopy(model).bfloat16())
    model.train()
    rows = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
    assert trainer.compute_loss(model, rows).isfinite()


def llava():
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 32, "num_key_value_heads": 2, **size}
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **size}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=31))


def t5():
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, **size))


@pytest.mark.parametrize(("build", "scored"), [(llava, [1, 2]), (t5, [2, 3])])
def test_predictions_are_compared_where_the_model_has_labels(build, scored, tmp_path):
    """A decoder predicts the next label; an encoder-decoder, which makes its inputs of the labels, the same one."""
    model, teacher = build().double(), build().double()
    trainer = make(tmp_path, model, SparsifyConfig(sparsity=0.5, label_weight=0.0, distill_weight=1.0), teacher=teacher)
    rows = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[-100, -100, 3, 4]])}
    model.train()
    found = trainer.compute_loss(model, rows)
    with torch.no_grad():
        logits, dense = (m(**rows).logits[:, scored] for m in (model, teacher))
    torch.testing.assert_close(found, kl_divergence(logits, dense, 2.0))


def test_an_encoder_decoder_is_pruned_and_trained(tmp_path):
    trainer = make(tmp_path, model=t5())
    trainer.train()
    assert set(zeros(trainer.model).values()) == {0.5}
    with pytest.raises(ValueError, match=r"'squarehead' compares the hidden states of one stack.*Use 'kl'"):
        make(tmp_path, model=t5(), config=SparsifyConfig(sparsity=0.5, distill="squarehead"))


class Stream(IterableDataset):
    def __init__(self, is_read_once):
        self.rows = iter(dataset()) if is_read_once else dataset()

    def __iter__(self):
        return iter(self.rows)


def test_data_that_can_be_read_only_once_is_refused_for_calibration(tmp_path):
    for is_read_once, method in ((False, "wanda"), (True, "magnitude"), (True, "wanda")):
        trainer = make(tmp_path, config=SparsifyConfig(sparsity=0.5, samples=8, method=method), max_steps=2)
        trainer.train_dataset = Stream(is_read_once)
        fails = is_read_once and method == "wanda"
        message = "train_dataset can be read only once, and calibration would use it up"
        with pytest.raises(ValueError, match=message) if fails else contextlib.nullcontext():
            trainer.train()


def test_what_would_compare_with_a_part_of_the_model_or_an_empty_teacher_is_refused(tmp_path, monkeypatch):
    config = SparsifyConfig(sparsity=0.5)
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"trains on 2 GPUs.*torchrun --nproc-per-node=2"):
        SparsifyTrainer(gpt2(), args, train_dataset=dataset(), sparsify=config)
    fsdp = SimpleNamespace(cpu_ram_efficient_loading=True, activation_checkpointing=False)
    monkeypatch.setattr(AcceleratorState, "fsdp_plugin", fsdp, raising=False)
    with pytest.raises(ValueError, match="only rank 0 has loaded weights"):
        make(tmp_path, config=config)
    make(tmp_path, config=SparsifyConfig(sparsity=0.5, distill="none"))


def test_trl(tmp_path):
    import trl

    class SparseSFTTrainer(SparsifyMixin, trl.SFTTrainer):
        pass

    args = trl.SFTConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_strategy="no", dataloader_pin_memory=False, bf16=False, max_length=12,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    rows = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in dataset()])
    words = {f"w{i}": i for i in range(31)} | {"<end>": 31}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<end>")), eos_token="<end>", pad_token="<end>"
    )
    trainer = SparseSFTTrainer(
        gpt2(), args, train_dataset=rows, processing_class=tokenizer, sparsify=SparsifyConfig(sparsity=0.5, samples=8)
    )
    trainer.train()
    assert set(zeros(trainer.model).values()) == {0.5}
