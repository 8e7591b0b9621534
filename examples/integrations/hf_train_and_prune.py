"""From text to a sparse Hugging Face model: tokenizer, HORST as the guides advise, schedule, SparseGPT, save, load."""

import argparse
import inspect
import math
import tempfile

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup, set_seed

from horst import HORST, export, param_groups, pruning

set_seed(0)
steps, text = 200, inspect.getsource(argparse)  # your text
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([text], vocab_size=512)
rows = torch.tensor(bpe.encode(text).ids).unfold(0, 64, 64)
train, held_out = rows[:-8], rows[-8:]
size = {"vocab_size": bpe.get_vocab_size(), "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))

groups = param_groups(model, weight_decay=0.1, decay="all", alpha="auto", l1=1.2 / math.sqrt(steps))
optimizer = HORST(groups, lr=1.5e-3, betas=(0.9, 0.95))  # of a small model; else 1e-3 and the default betas
schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
for _ in range(steps):
    ids = train[torch.randint(len(train), (16,))]
    model(ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(), schedule.step(), optimizer.zero_grad()

print(f"dense: loss {model.eval()(held_out, labels=held_out).loss:.2f}")
report = pruning.prune(model, 0.7, data=train.split(16), method="sparsegpt", distribution="global", layers="paper")
print(report.summary())  # layers="paper": all blocks but the first and the last
with tempfile.TemporaryDirectory() as folder:
    export.save_hugging_face(model, folder, sparse=True)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained(folder)
    loaded = export.load_pretrained(folder)  # transformers itself does not read a sparse folder
print(f"pruned, saved, loaded: loss {loaded(held_out, labels=held_out).loss:.2f}")
