"""Hugging Face Trainer: HORST as its optimizer and AC/DC as a callback, on the source of Python's standard library."""

import pathlib
import sysconfig
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from horst.integrations import hf
from horst.sparsity import ACDC, acdc_steps

set_seed(0)
text = pathlib.Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
rows = torch.tensor(list(text[: len(text) // 64 * 64])).view(-1, 64)
dataset = [{"input_ids": row, "labels": row} for row in rows]
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=200,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        save_steps=100,  # trainer.train(resume_from_checkpoint=True) goes on from there, masks and all
        report_to=[],
        use_cpu=True,
    )
    callback = hf.SparsityCallback(ACDC, sparsity=0.8, schedule=acdc_steps)
    trainer = Trainer(
        model, args, train_dataset=dataset, callbacks=[callback], optimizer_cls_and_kwargs=hf.horst(args, alpha=5.0)
    )
    loss = trainer.train().training_loss
print(f"training loss {loss:.2f}; {callback.sparsifier.current_sparsity:.0%} of the blocks' weights are zero")
