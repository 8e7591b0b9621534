"""Hugging Face Trainer: HORST with the recommended groups, then pruned once, on the source of Python's library."""

import pathlib
import sysconfig
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from horst import param_groups, pruning
from horst.integrations import hf

set_seed(0)
text = pathlib.Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()  # your text
rows = torch.tensor(list(text[: len(text) // 64 * 64])).view(-1, 64)
train, held_out = ([{"input_ids": row, "labels": row} for row in part] for part in (rows[:-64], rows[-64:]))
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)

with tempfile.TemporaryDirectory() as folder:
    small = {"learning_rate": 1.5e-3, "adam_beta2": 0.95}  # of a small model; else 1e-3 and 0.999
    schedule = {"max_steps": 200, "warmup_steps": 20, "lr_scheduler_type": "cosine"}
    args = TrainingArguments(folder, per_device_train_batch_size=16, **small, **schedule, report_to=[], use_cpu=True)

    def groups(model):
        return param_groups(model, weight_decay=0.1, decay="all", alpha="auto", l1=1.2 / args.max_steps**0.5)

    optimizer = hf.horst(args, groups=groups)
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=held_out, optimizer_cls_and_kwargs=optimizer)
    trainer.train()
    dense = trainer.evaluate()["eval_loss"]
    data = rows[:-64].split(16)
    report = pruning.prune(model, 0.7, data=data, method="sparsegpt", distribution="global", layers="paper")
    pruned = trainer.evaluate()["eval_loss"]
print(f"loss {dense:.2f} dense, {pruned:.2f} with {report.sparsity_of_pruned_layers:.0%} zeros in all blocks but two")
