"""Greedy generation with a fixed cache: the tokens of transformers' own loop, what follows an end, and errors."""

import copy
import functools

import pytest
import torch
from torch import nn

from horst.export import (
    Decoder,
    Plan,
    SparseLinear,
    decode_attention,
    generate,
    generation,
    quantize_head,
    sparse_linear,
    sparsify,
)
from horst.kernels.backends import runs_kernels

transformers = pytest.importorskip("transformers")
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def small(kind, **options):
    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 96}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **NO_ENDS, **options))
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
        config = transformers.LlamaConfig(**sizes, **heads, **NO_ENDS, max_position_embeddings=96, **options)
        model = transformers.LlamaForCausalLM(config)
    return with_large_weights(model)


def with_large_weights(model):
    for name, p in model.named_parameters():
        if p.dim() == 2 and (".layers." in name or ".h." in name):
            p.data = 10 * p.data * (torch.rand_like(p) > 0.6)  # large: tokens that differ
    return model.eval()


def prompt_of(texts=1, tokens=7):
    return torch.randint(1, 64, (texts, tokens))


def by_transformers(model, prompt, **options):
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("new", [1, 40])
def test_tokens_are_those_of_transformers(kind, texts, attention, new):
    model, prompt = small(kind, attn_implementation=attention), prompt_of(texts)
    expected = by_transformers(model, prompt, max_new_tokens=new)
    found = generate(model, prompt, max_new_tokens=new)
    assert new == 1 or len(expected[0, 7:].unique()) > 4
    assert torch.equal(found, expected)
    assert torch.equal(generate(model, prompt.int(), max_new_tokens=new), expected)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokens_of_a_sparse_model_are_those_of_the_dense_one(kind, monkeypatch):
    model, prompt = small(kind), prompt_of(2)
    plan = Plan({1: {"dense": 1.0, "bag": 0.1}})
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: plan)
    sparse = sparsify(copy.deepcopy(model))
    assert sum(isinstance(module, SparseLinear) for module in sparse.modules()) == {"gpt2": 8, "llama": 14}[kind]
    expected = by_transformers(model, prompt, max_new_tokens=20)
    assert torch.equal(generate(sparse, prompt, max_new_tokens=20), expected)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("checked", [1, 3, 32])
def test_a_text_ends_and_is_padded_as_by_transformers(kind, checked, monkeypatch):
    monkeypatch.setattr(generation, "_TOKENS_PER_CHECK", checked)
    model, prompt = small(kind), prompt_of(2)
    free = by_transformers(model, prompt, max_new_tokens=30)[:, 7:]
    decoder = Decoder(model, length=37, batch_size=2)
    cases = [[int(free[0, at])] for at in (0, 3, 12, 29)] + [[int(free[0, 2]), int(free[1, 8])]]
    for ends in cases:
        expected = by_transformers(model, prompt, max_new_tokens=30, eos_token_id=ends, pad_token_id=63)
        options = {"max_new_tokens": 30, "pad_token_id": 63}
        assert torch.equal(decoder.generate(prompt, eos_token_id=ends, **options), expected)
    assert expected.shape[1] < 37  # both ended
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = cases[0][0], None
    assert torch.equal(generate(model, prompt, max_new_tokens=30), by_transformers(model, prompt, max_new_tokens=30))
    assert torch.equal(generate(model, prompt, max_new_tokens=30, eos_token_id=())[:, 7:], free)


def replace_one(model):
    weight = model.get_input_embeddings().weight
    weight.data = weight.data.clone()


# What puts other tensors in the place of weights. The model is sparse for the first alone.
REPLACING = {
    "sparse": lambda model: model.load_state_dict(model.state_dict()),
    "assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "data": replace_one,
    "sparsified": sparsify,
    "quantized": quantize_head,
}


@pytest.mark.parametrize("how", REPLACING)
def test_a_graph_is_not_replayed_after_weights_were_replaced(how, monkeypatch):
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: Plan({1: {"dense": 1.0, "bag": 0.1}}))
    model = small("llama")
    if how == "sparse":
        sparsify(model)
    decoder = Decoder(model, length=16)
    decoder.start(PROMPT)
    # in place of a graph captured on a GPU, which reads what the model held then
    decoder._graph, decoder._captured = object(), generation._places_in_memory(model)
    for p in model.parameters():
        p.data.mul_(1.5)  # in place: no matter
    decoder._check_weights()
    REPLACING[how](model)
    for go_on in (lambda: decoder.advance(0), lambda: decoder.start(PROMPT)):
        with pytest.raises(RuntimeError, match=r"load_state_dict .* Make another Decoder"):
            go_on()
    decoder._graph = None  # without one that is no matter
    found = decoder.generate(PROMPT, max_new_tokens=8)
    assert torch.equal(found, by_transformers(model, PROMPT, max_new_tokens=8))


def test_models_that_take_no_mask_for_all_texts_decode_too():
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "vocab_size": 64}
    config = transformers.XGLMConfig(**sizes, **NO_ENDS, max_position_embeddings=96)
    model, prompt = with_large_weights(transformers.XGLMForCausalLM(config)), prompt_of(2)
    assert torch.equal(generate(model, prompt, max_new_tokens=9), by_transformers(model, prompt, max_new_tokens=9))


def test_a_decoder_serves_prompts_of_all_lengths():
    model = small("llama")
    decoder = Decoder(model, length=40)
    for tokens in (20, 3, 39, 1):
        prompt = prompt_of(1, tokens)
        new = min(40 - tokens, 9)
        found = decoder.generate(prompt, max_new_tokens=new)
        assert torch.equal(found, by_transformers(model, prompt, max_new_tokens=new))
    decoder.start(prompt)
    assert torch.equal(decoder.advance(5), by_transformers(model, prompt, max_new_tokens=6)[:, -1:])


def test_a_compiled_step_gives_the_same_tokens():
    model, prompt = small("llama"), prompt_of()
    compiled = Decoder(model, length=20, compile=True)
    assert torch.equal(compiled.generate(prompt, max_new_tokens=8), by_transformers(model, prompt, max_new_tokens=8))


def test_modes_of_model_and_torch_are_kept():
    model, prompt = small("gpt2", resid_pdrop=0.5, embd_pdrop=0.5), prompt_of()
    expected = by_transformers(model, prompt, max_new_tokens=8)
    model.train()
    model.transformer.h[0].eval()
    with torch.inference_mode():
        decoder = Decoder(model, length=20)
        assert torch.equal(decoder.generate(prompt, max_new_tokens=8), expected)
    assert torch.equal(decoder.generate(prompt, max_new_tokens=8), expected)
    assert model.training
    assert not model.transformer.h[0].training
    assert torch.is_grad_enabled()
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model, prompt, max_new_tokens=8)
        assert torch.is_autocast_cache_enabled()
        assert torch.equal(found, by_transformers(model, prompt, max_new_tokens=8))


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel decodes on a CPU too."""
    if not runs_kernels(torch.ones(1)):
        pytest.skip("needs Triton's interpreter; with a CUDA device tests/gpu has these tests")
    monkeypatch.setattr(decode_attention, "_DEVICES", ("cpu", "cuda"))


@pytest.fixture
def calls(interpreted, monkeypatch):
    """The number of places at each call of the kernel."""
    lengths, kernel = [], decode_attention.decode_attention

    def counted(query, key, value, mask, scale):
        lengths.append(key.shape[2])
        return kernel(query, key, value, mask, scale)

    monkeypatch.setattr(decode_attention, "decode_attention", counted)
    return lengths


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokens_by_the_kernel_are_those_of_transformers(kind, calls):
    model, prompt = small(kind), prompt_of(2)
    found = generate(model, prompt, max_new_tokens=9)
    assert calls == 2 * 9 * [16]  # two layers; one step to check the model; the prompt gives the first of nine tokens
    assert torch.equal(found, by_transformers(model, prompt, max_new_tokens=9))
    assert len(calls) == 2 * 9
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["lengths", "models"])
def test_the_step_of_every_decoder_is_compiled_and_once_for_equal_ones(kind, monkeypatch):
    graphs, models = [], [small("llama") for _ in range(3 if kind == "models" else 1)]

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    with torch._dynamo.config.patch(recompile_limit=2):
        for model in models * 2:
            for length in (20, 21, 22) if kind == "lengths" else (20,):
                Decoder(model, length=length, compile=True).generate(prompt_of(), max_new_tokens=3)
    assert len(graphs) == 3


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_step_holds_the_kernel(monkeypatch):
    model, prompt = small("llama"), prompt_of()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep, fullgraph=True))
    found = generate(model, prompt, max_new_tokens=6, compile=True)
    assert torch.equal(found, by_transformers(model, prompt, max_new_tokens=6))
    assert len(graphs) == 1
    assert sum(node.target is torch.ops.horst.decode_attention for node in graphs[0].graph.nodes) == 2


def test_the_models_attention_is_put_back_when_a_call_fails(calls, monkeypatch):
    model = small("llama")
    decoder = Decoder(model, length=8)
    seen = []

    def fail(*args):
        seen.append(model.config._attn_implementation)
        raise RuntimeError("no more memory")

    monkeypatch.setattr(decode_attention, "decode_attention", fail)
    decoder.start(PROMPT)
    with pytest.raises(RuntimeError, match="no more memory"):
        decoder.advance(1)
    assert seen == [decode_attention.NAME]
    assert model.config._attn_implementation == "sdpa"


def test_attention_of_another_kind_is_left_alone(calls, monkeypatch):
    prompt = prompt_of()
    eager = small("llama", attn_implementation="eager")
    assert torch.equal(generate(eager, prompt, max_new_tokens=4), by_transformers(eager, prompt, max_new_tokens=4))
    model = small("llama")
    assert decode_attention.configs_to_switch(model) == [model.config]
    tried = []
    with monkeypatch.context() as broken:
        broken.setattr(decode_attention, "runs_right", lambda *given: tried.append(given))
        assert decode_attention.configs_to_switch(model) == []
        assert decode_attention.configs_to_switch(small("llama", head_dim=24)) == []
        assert decode_attention.configs_to_switch(small("llama", head_dim=264)) == []
    where = (torch.float32, torch.device("cpu"))
    assert tried == [(2, 8, *where), (2, 24, *where)], "queries per key head, and the size of a head"
    assert decode_attention._heads(transformers.MambaConfig()) is None
    # a model that does something of its own for the name
    monkeypatch.setattr(decode_attention, "_asks_for_sdpa", lambda module: True)
    assert decode_attention.configs_to_switch(model) == []
    monkeypatch.undo()
    assert decode_attention._asks_for_sdpa("transformers.models.falcon.modeling_falcon")
    assert not decode_attention._asks_for_sdpa("transformers.models.llama.modeling_llama")
    assert calls == []


def test_versions_of_transformers_without_a_registry_keep_sdpa(calls, monkeypatch):
    monkeypatch.setattr(decode_attention, "load_extra", lambda name: object())
    decode_attention._register.cache_clear()
    model = small("llama")
    assert generate(model, PROMPT, max_new_tokens=3).shape == (1, 7)
    assert calls == []
    decode_attention._register.cache_clear()


SPECIAL = {
    "softcap": {"softcap": 30.0},
    "sinks": {"s_aux": torch.zeros(4)},
    "window": {"sliding_window": 3},
    "bias": {"position_bias": torch.zeros(1, 4, 1, 6)},
    "dropout": {"dropout": 0.5},
    "unknown": {"something_new": 1},
    "no mask": {"attention_mask": None},
    "added mask": {"attention_mask": torch.zeros(1, 1, 1, 6)},
    "mask per head": {"attention_mask": torch.ones(1, 4, 1, 6) > 0},
    "two tokens": {"query": torch.randn(1, 4, 2, 8), "attention_mask": torch.ones(1, 1, 2, 6) > 0},
    "float64": {name: torch.randn(1, 4, 1 if name == "query" else 6, 8).double() for name in ("query", "key", "value")},
    "other value size": {"value": torch.randn(1, 4, 6, 5)},
    "gradient": {"query": torch.randn(1, 4, 1, 8, requires_grad=True)},
}


@pytest.mark.parametrize("special", SPECIAL)
def test_attention_that_needs_more_is_left_to_sdpa(special, calls, monkeypatch):
    given = []
    monkeypatch.setattr(decode_attention, "_sdpa", lambda: lambda *args, **options: given.append((args, options)))
    tensors = {"query": torch.randn(1, 4, 1, 8), "key": torch.randn(1, 4, 6, 8), "value": torch.randn(1, 4, 6, 8)}
    usual = {**tensors, "attention_mask": torch.ones(1, 1, 1, 6) > 0, "position_ids": PROMPT, "use_cache": True}
    usual |= {"sliding_window": None, "softcap": None, "output_attentions": False, "is_causal": True}
    asked = {**usual, **SPECIAL[special]}
    decode_attention.attention_forward(None, **asked)
    assert calls == []
    [(args, options)] = given
    names = ("query", "key", "value", "attention_mask")
    assert all(found is asked[name] for name, found in zip(names, args[1:], strict=True))
    assert options == {"scaling": None, "dropout": 0.0} | {k: v for k, v in asked.items() if k not in names}
    out, weights = decode_attention.attention_forward(None, **usual)
    scaled = torch.nn.functional.scaled_dot_product_attention(*tensors.values())
    torch.testing.assert_close(out, scaled.transpose(1, 2))
    assert weights is None
    assert calls == [6]


PROMPT = torch.ones(1, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([[1, 2]], {}, TypeError, "prompt must be a tensor of token ids, got list"),
        (PROMPT.float(), {}, TypeError, r"int64 or int32, got torch.float32. Call prompt.long\(\)"),
        (PROMPT[0], {}, ValueError, r"texts x tokens with at least one of each, got shape \(4,\). For one text"),
        (PROMPT[:, :0], {}, ValueError, r"got shape \(1, 0\)"),
        (PROMPT, {"max_new_tokens": 0}, ValueError, "max_new_tokens must be a whole number of at least 1, got 0"),
        (PROMPT, {"max_new_tokens": 2.5}, ValueError, "at least 1, got 2.5"),
        (
            PROMPT,
            {"max_new_tokens": 93},
            ValueError,
            r"model's 96 positions \(max_position_embeddings\), got 97 tokens",
        ),
        (PROMPT, {"graph": True}, ValueError, "graph=True needs a model on a CUDA device, got one on cpu"),
    ],
)
def test_wrong_arguments_are_refused(prompt, options, error, words):
    with pytest.raises(error, match=words):
        generate(small("gpt2"), prompt, **{"max_new_tokens": 3, **options})


def test_wrong_models_are_refused():
    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    others = [nn.Linear(2, 2), small("gpt2").transformer]
    others.append(transformers.T5ForConditionalGeneration(transformers.T5Config(**t5, decoder_start_token_id=0)))
    for model in others:
        with pytest.raises(TypeError, match=f"causal language model of transformers, got {type(model).__name__}. Load"):
            generate(model, PROMPT, max_new_tokens=3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads))
    with pytest.raises(ValueError, match=r"StaticSlidingWindowLayer.*Use model.generate\(\)"):
        generate(model, PROMPT, max_new_tokens=3)
    model = small("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attention must be sdpa or eager, got flex_attention"):
        generate(model, PROMPT, max_new_tokens=3)


def with_local_attention(window):
    """GPT-Neo cuts the mask of its local layers by the length of the keys, which with a fixed cache is the cache's."""
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "max_position_embeddings": 96}
    kinds = {"attention_types": [[["global", "local"], 1]], "window_size": window}
    return with_large_weights(transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, **kinds, **NO_ENDS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_a_fixed_cache_changes_is_refused(dtype):
    model = with_local_attention(window=8).to(dtype)
    with pytest.raises(ValueError, match=r"GPTNeoForCausalLM gives other logits .* Use model.generate\(\)"):
        generate(model, PROMPT, max_new_tokens=30)
    fits = with_local_attention(window=32).to(dtype)
    assert torch.equal(generate(fits, PROMPT, max_new_tokens=9), by_transformers(fits, PROMPT, max_new_tokens=9))


def test_falcon_with_alibi_is_refused():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "alibi": True}
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, **NO_ENDS))
    with pytest.raises(ValueError, match=r"FalconForCausalLM does not run with a mask .* Use model.generate\(\)"):
        generate(model, PROMPT, max_new_tokens=3)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_short_decoder_is_checked_too(length):
    assert Decoder(with_local_attention(window=8), length=length).length == length


def test_a_decoder_refuses_what_does_not_fit():
    decoder = Decoder(small("gpt2"), length=8)
    with pytest.raises(RuntimeError, match=r"Call start\(prompt\) first"):
        decoder.advance(1)
    with pytest.raises(ValueError, match="need a length of 9, the decoder's is 8"):
        decoder.generate(PROMPT, max_new_tokens=5)
    with pytest.raises(ValueError, match="made for batch_size=1, got 2 texts"):
        decoder.generate(PROMPT.expand(2, 4), max_new_tokens=2)
    with pytest.raises(ValueError, match="A prompt of 8 tokens leaves no room in length=8"):
        decoder.start(prompt_of(1, 8))
    decoder.start(PROMPT)
    with pytest.raises(ValueError, match=r"tokens must lie in \[0, 3\]"):
        decoder.advance(4)
