"""Models of every shape that is pruned here, small, with random weights; and real sentences."""

import ast
import pathlib
import re
import sysconfig

import timm
import torch
import transformers

from horst.lab.models.gpt2 import GPT2, GPT2Config


def small_gpt2(vocabulary=50, context=16, width=16, layers=4, heads=2):
    return GPT2(GPT2Config(vocabulary=vocabulary, context=context, width=width, layers=layers, heads=heads))


def tokens(batches=3, size=2, length=8, vocabulary=50):
    return [torch.randint(vocabulary, (size, length)) for _ in range(batches)]


def padded(batches=3, size=4, length=8, vocabulary=50):
    """Mappings with an attention mask, whose rows have different lengths."""
    lengths = torch.arange(size) + length - size + 1
    mask = (torch.arange(length) < lengths[:, None]).long()
    return [{"input_ids": torch.randint(vocabulary, (size, length)), "attention_mask": mask} for _ in range(batches)]


def spread(model):
    """Random weights with columns of unlike size, so that the methods differ; larger than at initialisation."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5).mul_(torch.rand(p.shape[1]) + 0.1)
    return model.eval()


def hf_gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    return transformers.GPT2LMHeadModel(config), tokens()


def llama():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), [{"input_ids": batch} for batch in tokens()]


def gemma():
    """Every other block attends within a sliding window: blocks are called with different masks."""
    config = transformers.Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=3, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config), [{"input_ids": batch} for batch in tokens()]


def bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24
    )
    return transformers.BertModel(config), padded()


def t5():
    """Two chains; the first block of each returns the position bias that all others are given."""
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, [{"input_ids": a, "decoder_input_ids": a[:, :5]} for a in tokens()]


def vit():
    model = timm.create_model(
        "deit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=5
    )
    return model, [torch.randn(2, 3, 32, 32) for _ in range(3)]


ARCHITECTURES = {
    "our_gpt2": lambda: (small_gpt2(), tokens()),
    "hf_gpt2": hf_gpt2,
    "llama": llama,
    "gemma": gemma,
    "bert": bert,
    "t5": t5,
    "vit": vit,
}


def sentences():
    """English sentences from the docstrings of the standard library, in a fixed order that mixes the modules."""
    found = set()
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::4]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                text = " ".join((ast.get_docstring(node) or "").split())
                found |= set(re.findall(r"(?<=[.] )[A-Z][a-z]+ [^.>`_=]{40,150}[.](?= |$)", text))
    ordered = sorted(found)
    return [ordered[i] for i in torch.randperm(len(ordered), generator=torch.Generator().manual_seed(0))]
