"""Greedy generation on a CUDA device: a captured step, compiled or not, gives the tokens of transformers' own loop."""

import copy
import gc

import pytest
import torch

from horst.export import Decoder, Plan, SparseLinear, decode_attention, generate, sparse_linear, sparsify
from horst.export.gpu_kernels import LAUNCHES

pytestmark = pytest.mark.gpu
TRITON = next(name for name in LAUNCHES if "staged" not in name)


@pytest.fixture(params=["gpt2", "llama"])
def model(request):
    """In float32: the most likely token does not hang on rounding."""
    transformers = pytest.importorskip("transformers")
    no_ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if request.param == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 64, "n_positions": 128}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_ends))
    else:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **no_ends))
    for name, p in model.named_parameters():
        if p.dim() == 2 and (".layers." in name or ".h." in name):
            p.data = 10 * p.data * (torch.rand_like(p) > 0.8)
    return model.eval().cuda()


@pytest.fixture
def sparse_model(model, monkeypatch):
    plan = Plan({1: {"dense": 1.0, TRITON: 0.1}, 64: {"expanded": 0.1, TRITON: 1.0}})
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: plan)
    sparse = sparsify(copy.deepcopy(model))
    assert sum(isinstance(module, SparseLinear) for module in sparse.modules()) >= 8
    return sparse


def prompt_of(texts, tokens):
    return torch.randint(1, 64, (texts, tokens), device="cuda")


def by_transformers(model, prompt, **options):
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)


@pytest.mark.parametrize("compiled", [False, True], ids=["graph", "compiled"])
@pytest.mark.parametrize("texts", [1, 2])
def test_a_captured_step_gives_the_tokens_of_transformers(model, sparse_model, texts, compiled):
    for one in (model, sparse_model):
        decoder = Decoder(one, length=72, batch_size=texts, compile=compiled)
        for tokens in (40, 5, 1, 30):  # the step is captured once, for prompts of all lengths
            prompt = prompt_of(texts, tokens)
            expected = by_transformers(model, prompt, max_new_tokens=32)
            assert torch.equal(decoder.generate(prompt, max_new_tokens=32), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", [False, True], ids=["graph", "compiled"])
def test_the_kernel_reads_the_cache_in_every_step(model, compiled, monkeypatch):
    """Without sdpa for single tokens, the step is captured all the same; afterwards the model has sdpa again."""
    sdpa = decode_attention._sdpa()

    def prompts_only(module, query, *args, **options):
        assert query.shape[2] > 1
        return sdpa(module, query, *args, **options)

    prompt = prompt_of(1, 8)
    expected = by_transformers(model, prompt, max_new_tokens=20)
    monkeypatch.setattr(decode_attention, "_sdpa", lambda: prompts_only)
    decoder = Decoder(model, length=1024 if model.config.model_type == "llama" else 128, compile=compiled)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(decoder.generate(prompt, max_new_tokens=20), expected)
    assert model.config._attn_implementation == "sdpa"
    torch.compiler.reset()


def test_texts_end_as_by_transformers(sparse_model):
    prompt = prompt_of(2, 20)
    free = by_transformers(sparse_model, prompt, max_new_tokens=60)[:, 20:]
    for ends in ([int(free[0, 3])], [int(free[0, 2]), int(free[1, 40])]):
        options = {"max_new_tokens": 60, "eos_token_id": ends, "pad_token_id": 63}
        assert torch.equal(generate(sparse_model, prompt, **options), by_transformers(sparse_model, prompt, **options))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_steps_do_not_wait_for_the_device(sparse_model):
    decoder = Decoder(sparse_model, length=64)
    prompt = prompt_of(1, 8)
    decoder.start(prompt)
    torch.cuda.set_sync_debug_mode("error")
    newest = decoder.advance(20)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(newest, by_transformers(sparse_model, prompt, max_new_tokens=21)[:, -1:])


@pytest.mark.parametrize("model", ["gpt2"], indirect=True)  # rotary keys are float32 there, which the cache refuses
def test_a_graph_captured_under_autocast_outlives_it(model):
    prompt = prompt_of(1, 8)
    with torch.autocast("cuda", torch.bfloat16):
        decoder = Decoder(model, length=64)
        expected = decoder.generate(prompt, max_new_tokens=20)
    junk = [torch.full_like(p, torch.nan) for p in model.parameters() for _ in range(4)]
    del junk
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(decoder.generate(prompt, max_new_tokens=20), expected)


def test_a_decoder_leaves_no_memory_behind(model):
    prompt = prompt_of(1, 8)
    generate(model, prompt, max_new_tokens=20)
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    for _ in range(3):
        generate(model, prompt, max_new_tokens=100)
    after = torch.cuda.memory_allocated()
    gc.enable()
    assert after - before < 2**20
