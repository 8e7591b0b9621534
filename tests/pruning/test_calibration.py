"""The driver: on every architecture it does what whole-model runs do, moves one block at a time, and tidies up."""

import copy
import logging

import pytest
import torch
import transformers
from small_models import ARCHITECTURES, bert, hf_gpt2, padded, small_gpt2, spread, tokens
from torch import nn
from torch.testing import assert_close

from horst.pruning import Hessian, InputNorms, SparseGPT, calibrate, prune
from horst.pruning.chains import block_sequences, layers_by_block
from horst.sparsity import find_layers
from horst.sparsity.masks import Block


def run(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


def rows(x, batch):
    """The inputs of a layer as a matrix, without padding."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    x = x if mask is None or x.shape[:2] != mask.shape else x[mask.bool()]
    return x.reshape(-1, x.shape[-1])


@torch.no_grad()
def inputs_by_whole_runs(model, batches, layers):
    """The reference: run the whole model on every batch, and keep all inputs of these layers."""
    modules = {id(m.weight): m for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    seen = {layer.name: [] for layer in layers}
    for batch in batches:
        handles = [
            modules[id(layer.param)].register_forward_pre_hook(
                lambda module, args, name=layer.name: seen[name].append(rows(args[0].clone(), batch))  # noqa: B023
            )
            for layer in layers
        ]
        run(model, batch)
        for handle in handles:
            handle.remove()
    return {name: torch.cat(found) for name, found in seen.items()}


@torch.no_grad()
def prune_by_whole_runs(model, batches, method, sparsity, layers, sequential):
    """Block after block (or all at once): whole runs, then each layer of the block."""
    groups = [
        inside for s in block_sequences(model).values() for inside in layers_by_block(layers, s).values() if inside
    ]  # fmt: skip
    rest = [layer for layer in layers if not any(layer in group for group in groups)]
    groups = [group for group in [*groups, rest] if group]
    for group in groups if sequential else [layers]:
        seen = inputs_by_whole_runs(model, batches, group)
        for layer in group:
            W = layer.param.detach() if layer.input_dim == 1 else layer.param.detach().t()
            statistic = method.statistic(W.shape[1])
            statistic.add(seen[layer.name])
            method.prune(W, method.prepare(W, statistic, layer.name), Block(), int(sparsity * W.numel()))


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_block_at_a_time_does_what_runs_of_the_whole_model_do(name, sequential):
    model, batches = ARCHITECTURES[name]()
    reference = copy.deepcopy(spread(model))
    method = SparseGPT()
    prune(model, 0.5, method=method, data=batches, sequential=sequential, layers="all_linear", exclude=outside(name))
    layers = find_layers(reference, "all_linear", exclude=outside(name))
    prune_by_whole_runs(reference, batches, method, 0.5, layers, sequential)
    for (key, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def outside(name):
    """A head that is tied to the embedding is not pruned here: its inputs would change with it."""
    tied = {
        "our_gpt2": "transformer.wte.weight",
        "hf_gpt2": "transformer.wte.weight",
        "gemma": "model.embed_tokens.weight",
        "t5": "shared.weight",
    }
    return [tied[name]] if name in tied else []


def chosen(model, **options):
    return find_layers(model, **options)


def gathered(model, batches, layers, sequential=False, statistic=InputNorms):
    found = {}
    calibrate(model, batches, layers, statistic=statistic, visit=lambda _, s: found.update(s), sequential=sequential)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_is_left_behind(name):
    model, batches = ARCHITECTURES[name]()
    model.train()
    model.get_submodule(next(iter(next(iter(block_sequences(model).values()))))).eval()
    before = [(key, module.training, dict(module.__dict__).keys()) for key, module in model.named_modules()]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    use_cache = getattr(getattr(model, "config", None), "use_cache", None)
    gathered(model, batches, chosen(model))
    assert before == [(key, module.training, dict(module.__dict__).keys()) for key, module in model.named_modules()]
    assert getattr(getattr(model, "config", None), "use_cache", None) == use_cache
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


def test_an_error_leaves_nothing_behind_either():
    model, batches = hf_gpt2()
    model.train()
    keys = [set(module.__dict__) for module in model.modules()]

    def fail(layers, statistics):
        raise KeyError("visit")

    with pytest.raises(KeyError, match="visit"):
        calibrate(model, batches, chosen(model), statistic=InputNorms, visit=fail, sequential=True)
    with pytest.raises(IndexError):  # from the model itself: a token that is not in the vocabulary
        gathered(model, [torch.full((1, 4), 99)], chosen(model))
    assert model.training
    assert keys == [set(module.__dict__) for module in model.modules()]
    assert model.config.use_cache
    assert not any(module._forward_pre_hooks for module in model.modules())


def opt():
    """Its feed-forward layers are given rows, not a batch of sequences."""
    config = transformers.OPTConfig(
        vocab_size=50, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config), padded()


def deepseek():
    """A layer of its attention is given batch x 1 x length x inputs."""
    config = transformers.DeepseekV3Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, kv_lora_rank=4, q_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=2,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config), padded()


@pytest.mark.parametrize("build", [bert, opt, deepseek])
def test_padded_positions_do_not_count(build):
    model, batches = build()
    spread(model)
    trimmed = [
        {"input_ids": ids[None, : int(mask.sum())], "attention_mask": mask[None, : int(mask.sum())]}
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    layers = chosen(model)
    found, expected = (gathered(model, data, layers, statistic=Hessian) for data in (batches, trimmed))
    for name, statistic in expected.items():
        assert found[name].rows == statistic.rows
        assert_close(found[name].matrix, statistic.matrix, rtol=1e-4, atol=1e-5)


def test_one_block_at_a_time_is_on_the_device_and_goes_home():
    model, batches = hf_gpt2()
    device = torch.device("cpu", 0)  # another name of the same place, so that moves show
    away, log = set(), []
    for k, block in enumerate(model.transformer.h):

        def to(place, k=k, block=block):
            (away.add if place == device else away.discard)(k)
            log.append((k, place, set(away)))
            return block

        block.to = to
    for method in ("wanda", "sparsegpt"):
        prune(model, 0.5, method=method, data=batches, device=device)
    assert {k for k, _, _ in log} == {0, 1, 2}
    assert max(len(now) for _, _, now in log) == 1
    assert away == set()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_on_the_host_is_pruned_on_a_gpu(name, method):
    model, batches = ARCHITECTURES[name]()
    on_host = copy.deepcopy(spread(model))
    prune(on_host, 0.5, method=method, data=batches)
    prune(model, 0.5, method=method, data=batches, device="cuda")
    for (key, found), expected in zip(model.named_parameters(), on_host.parameters(), strict=True):
        assert found.device.type == "cpu"
        assert int((found == 0).sum()) == int((expected == 0).sum()), key


@pytest.mark.gpu
def test_on_a_gpu_there_is_never_more_than_one_block():
    model = small_gpt2(width=1024, layers=16, heads=8)
    size = sum(p.nbytes for p in model.transformer.h[0].parameters())
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    prune(model, 0.5, method="wanda", data=tokens(), device="cuda")
    # Beside the block: scores, keys and order of its largest matrix, and the libraries' work space.
    assert torch.cuda.max_memory_allocated() - start < 6 * size


class InPlace(nn.Module):
    """Adds to its input in place."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        x += self.fc(x)
        return x


class Chained(nn.Module):
    """Runs its blocks by a rule of its own."""

    def __init__(self, rule, block=InPlace, number=3):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(number))
        self.head = nn.Linear(6, 2)
        self.rule = rule

    def forward(self, x):
        return self.head(self.rule(self.blocks, x))


def in_turn(blocks, x):
    x = x.clone()
    for block in blocks:
        x = block(x)
    return x


def test_a_block_that_changes_its_input_in_place_is_calibrated_on_what_it_was_given():
    model, data = Chained(in_turn), [torch.randn(5, 6) for _ in range(2)]
    reference, kept = copy.deepcopy(model), [batch.clone() for batch in data]
    prune(model, 0.5, method="sparsegpt", data=data, layers="all_linear")
    prune_by_whole_runs(reference, data, SparseGPT(), 0.5, find_layers(reference, "all_linear"), sequential=True)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(data, kept, strict=True))


def side_by_side(blocks, x):
    return sum(block(x.clone()) for block in blocks)


def twice(blocks, x):
    return in_turn(blocks, in_turn(blocks, x))


def with_something_between(blocks, x):
    for block in blocks:
        x = block(x * 1.5)
    return x


def backwards(blocks, x):
    return in_turn(list(blocks)[::-1], x)


def without_the_last(blocks, x):
    return in_turn(list(blocks)[:-1], x)


@pytest.mark.parametrize("rule", [side_by_side, with_something_between, backwards, twice])
def test_blocks_that_are_no_chain_are_calibrated_in_runs_of_the_whole_model(rule, caplog):
    model, data = Chained(rule), [torch.randn(5, 6) for _ in range(2)]
    layers = find_layers(model, "all_linear")
    expected = inputs_by_whole_runs(model, data, layers)
    with caplog.at_level(logging.WARNING):
        found = gathered(model, data, layers)
    assert "blocks.* is not a chain of blocks" in caplog.text
    for name, X in expected.items():
        assert_close(found[name].norms(), X.square().mean(0).sqrt())


def test_stages_that_change_the_width_are_calibrated_in_runs_of_the_whole_model(caplog):
    """As those of Swin, whose next norm or head takes no hidden state of the first stage."""
    widths = [(6, 8), (8, 12), (12, 16)]
    stages = [nn.Sequential(nn.Linear(*sizes), nn.Tanh()) for sizes in widths]
    model, data = nn.Sequential(nn.Sequential(*stages), nn.Linear(16, 2)), [torch.randn(5, 6) for _ in range(2)]
    layers = find_layers(model, "all_linear")
    expected = inputs_by_whole_runs(model, data, layers)
    with caplog.at_level(logging.WARNING):
        found = gathered(model, data, layers)
    assert "0.* is not a chain of blocks (the model fails on what the first block returns: " in caplog.text
    for name, X in expected.items():
        assert_close(found[name].norms(), X.square().mean(0).sqrt())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # data that are wrong stay the model's own error
        gathered(model, [torch.randn(5, 7)], layers)


def test_one_sample_shows_whether_a_block_is_called_again():
    """A head's outputs for whole batches may be larger than the model: only one sample goes as far."""
    model, batches = bert()
    sizes = []
    model.pooler.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    gathered(model, batches, chosen(model))
    assert sizes == [1]


class Pairwise(nn.Module):
    """Needs an even number of samples."""

    def __init__(self):
        super().__init__()
        self.chained = Chained(in_turn)

    def forward(self, x, size):
        assert len(x) == size
        return self.chained(x.view(2, -1, 6).flatten(0, 1))


def test_a_batch_that_cannot_be_cut_is_run_whole():
    model, data = Pairwise(), [(torch.randn(4, 6), 4)]
    found = gathered(model, data, chosen(model))
    assert all(statistic.rows == 4 for statistic in found.values())


@pytest.mark.parametrize("kind", [tuple, list])
def test_labels_beside_the_inputs_are_explained(kind):
    model, batches = hf_gpt2()
    data = [kind((batch, batch)) for batch in batches]  # as a loader yields them
    text = rf"raised AttributeError .* a {kind.__name__} of 2 tensors, .* positional arguments\. Give the inputs alone"
    with pytest.raises(TypeError, match=text) as raised:
        prune(model, 0.5, method="wanda", data=data)
    assert isinstance(raised.value.__cause__, AttributeError)
    assert "\n" not in str(raised.value)


def test_labels_are_explained_for_a_model_without_blocks_too():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    with pytest.raises(TypeError, match="positional arguments") as raised:
        prune(model, 0.5, method="wanda", data=[(x, x)], layers="all_linear")
    assert isinstance(raised.value.__cause__, TypeError)


@pytest.mark.parametrize("batch", [torch.randn(3, 5), (torch.randn(3, 5),)])
def test_errors_of_the_model_on_one_tensor_stay_its_own(batch):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        prune(nn.Sequential(nn.Linear(4, 4)), 0.5, method="wanda", data=[batch], layers="all_linear")


def test_a_layer_that_is_never_reached_is_an_error_that_names_it():
    model, data = Chained(without_the_last), [torch.randn(5, 6)]
    with pytest.raises(ValueError, match=r"no calibration input reached blocks\.2\.fc\.weight: .*exclude=\[\.\.\.\]"):
        prune(model, 0.5, method="wanda", data=data)


@pytest.mark.parametrize(("to", "is_chain"), [((1, "fc"), True), ((2, "fc"), False)])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_a_tied_weight_is_calibrated_on_all_that_it_multiplies(method, to, is_chain, caplog):
    model, data = Twice(), [torch.randn(6, 6) for _ in range(3)]
    getattr(model.blocks[to[0]], to[1]).weight = model.blocks[1].out.weight
    inputs = []
    for module in (model.blocks[1].out, getattr(model.blocks[to[0]], to[1])):
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    layer = next(layer for layer in find_layers(model) if layer.param is model.blocks[1].out.weight)
    found = gathered(model, data, [layer], statistic=Hessian)[layer.name]
    inputs.clear()
    for batch in data:
        model(batch)
    X = torch.cat(inputs)
    assert found.rows == len(X) == 36
    assert_close(found.matrix, 2 / len(X) * X.T @ X, rtol=1e-4, atol=1e-5)
    prune(model, 0.5, method=method, data=data)
    assert all(int((p == 0).sum()) == 18 for p in model.parameters())
    assert ("is also used outside of its block" in caplog.text) is not is_chain


def test_a_weight_tied_across_two_stacks_of_blocks_is_calibrated_in_both():
    model, data = Stacks(), [torch.randn(6, 6)]
    model.decoder.blocks[1].fc.weight = model.encoder.blocks[1].fc.weight
    assert list(block_sequences(model)) == ["encoder.blocks.", "decoder.blocks."]
    rows = {name: statistic.rows for name, statistic in gathered(model, data, find_layers(model)).items()}
    assert len(rows) == 11
    assert {name for name, n in rows.items() if n != 6} == {"encoder.blocks.1.fc.weight"}
    assert rows["encoder.blocks.1.fc.weight"] == 12


class Stacks(nn.Module):
    """One after the other."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Twice(), Twice()

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Twice(nn.Module):
    """Three blocks of two matrices."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return x + self.out(self.fc(x).tanh())

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Bare(nn.Module):
    """A block with a matrix that no linear layer owns."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.matrix = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return self.fc(x) @ self.matrix


def test_weights_that_no_linear_layer_owns_are_refused():
    model = nn.Sequential(Bare(), Bare())
    with pytest.raises(ValueError, match=r"inputs of 0\.matrix, 1\.matrix cannot be observed"):
        prune(model, 0.5, method="wanda", data=[torch.randn(5, 6)], include=["*.matrix"])


class Attending(nn.Module):
    """A block whose attention's name is part of the name of a linear layer."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2)
        self.after_attn = nn.Linear(8, 8)

    def forward(self, x):
        return self.after_attn(self.attn(x, x, x)[0])


class Calling(nn.MultiheadAttention):
    """One that calls its layer for the output."""

    def forward(self, query, key, value, **options):
        return self.out_proj(query), None


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 2, enable_nested_tensor=False)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("exclude", [[], ["*in_proj_weight"]])
@pytest.mark.parametrize(
    ("build", "advice"),
    [
        (encoder, ["*self_attn*"]),
        (lambda: nn.Sequential(Attending(), Attending()), ["0.attn.*", "1.attn.*"]),
    ],
)
def test_the_advice_for_torchs_attention_works_at_once(build, advice, exclude, method):
    model, options = build(), {"method": method, "data": [torch.randn(3, 2, 8)]}
    with pytest.raises(ValueError, match=r"0\.\w*attn\.out_proj\.weight.* cannot be observed") as refused:
        prune(model, 0.5, exclude=exclude, **options)
    assert str(refused.value).endswith(f"layers. Use exclude={advice}, or method='magnitude'.")
    names = [layer.name for layer in prune(model, 0.5, exclude=advice, **options).layers]
    assert names
    assert not any("in_proj" in name or "out_proj" in name for name in names)


def test_attention_without_other_layers_is_left_to_magnitude():
    model = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match=r"calling its layers\. Use method='magnitude'\.$"):
        prune(model, 0.5, method="wanda", data=[(torch.randn(3, 2, 8),) * 3], layers="all_linear")


def test_an_attention_that_calls_its_layers_is_calibrated():
    model = nn.Sequential(Attending(), Attending())
    for block in model:
        block.attn = Calling(8, 2)
    report = prune(model, 0.5, method="wanda", data=[torch.randn(3, 2, 8)], exclude=["*in_proj*"])
    assert "0.attn.out_proj.weight" in [layer.name for layer in report.layers]


class Returning(nn.Module):
    """A block that returns the hidden state in some structure."""

    structure = staticmethod(lambda x: x)

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, mask, *, hidden):
        return self.structure(torch.tanh(self.fc(hidden)) * mask)


def first_of_what_they_return(blocks, x):
    mask = (x > 0).float()
    for block in blocks:
        out = block(mask, hidden=x)
        x = out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, (tuple, list)) else out["hidden"]
    return x


@pytest.mark.parametrize(
    ("structure", "is_chain"),
    [
        (lambda x: x, True),
        (lambda x: (x, None, "more"), True),
        (lambda x: [x], True),
        (lambda x: {"hidden": x}, False),
    ],
)
def test_blocks_may_return_a_tensor_or_a_tuple_and_take_it_anywhere(structure, is_chain, caplog, monkeypatch):
    monkeypatch.setattr(Returning, "structure", staticmethod(structure))
    model, data = Chained(first_of_what_they_return, Returning), [torch.randn(5, 6) for _ in range(2)]
    layers = find_layers(model, "all_linear")
    expected = inputs_by_whole_runs(model, data, layers)
    with caplog.at_level(logging.WARNING):
        found = gathered(model, data, layers)
    assert ("not a chain" in caplog.text) is not is_chain
    for name, X in expected.items():
        assert_close(found[name].norms(), X.square().mean(0).sqrt())


def test_a_model_of_one_block_and_a_model_of_none():
    one, none = Chained(in_turn, number=1), nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    for model in (one, none):
        data = [torch.randn(5, 6)]
        layers = find_layers(model, "all_linear")
        expected = inputs_by_whole_runs(model, data, layers)
        found = gathered(model, data, layers)
        assert found.keys() == {layer.name for layer in layers}
        for name, X in expected.items():
            assert_close(found[name].norms(), X.square().mean(0).sqrt())


def test_how_data_is_cut_into_batches_does_not_matter():
    model = spread(small_gpt2())
    whole = torch.randint(50, (6, 8))
    layers = chosen(model)
    a, b = (gathered(model, data, layers, statistic=Hessian) for data in ([whole], whole.split(1)))
    for name in a:
        assert_close(a[name].matrix, b[name].matrix, rtol=1e-4, atol=1e-6)


def test_the_order_in_which_layers_are_given_does_not_matter():
    model = spread(small_gpt2())
    other, batches = copy.deepcopy(model), tokens()
    for candidate, turn in ((model, 1), (other, -1)):
        layers = chosen(candidate)[::turn]

        def visit(inside, statistics):
            for layer in inside:
                method = SparseGPT()
                known = method.prepare(layer.param.detach(), statistics[layer.name], layer.name)
                method.prune(layer.param.detach(), known, Block(), layer.param.numel() // 2)

        calibrate(candidate, batches, layers, statistic=Hessian, visit=visit, sequential=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_blocks_before_the_first_target_run_and_those_after_the_last_do_not():
    model = spread(small_gpt2(layers=4))
    calls = []
    for k, block in enumerate(model.transformer.h):
        block.register_forward_hook(lambda *_, k=k: calls.append(k))
    layers = [layer for layer in chosen(model) if ".h.1." in layer.name]
    gathered(model, tokens(batches=1), layers, sequential=True)
    # One sample to see that none is called again; to learn how they are called, up to the last; then 0 runs, and 1.
    # (The hook of the last one is not reached the second time.) Of the first two rounds, only 0 really runs.
    assert calls == [0, 1, 2, 3, 0, 1, 2, 0, 1]


def test_a_compiled_model_is_calibrated_uncompiled():
    model = spread(small_gpt2())
    plain, batches = copy.deepcopy(model), tokens()
    compiled = torch.compile(model, backend="eager")
    compiled(batches[0])
    report = prune(compiled, 0.5, method="wanda", data=batches)
    assert report.layers[0].name == "transformer.h.0.attn.c_attn.weight"
    prune(plain, 0.5, method="wanda", data=batches)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_half_precision_models_stay_so():
    model = spread(small_gpt2()).to(torch.bfloat16)
    report = prune(model, 0.5, method="sparsegpt", data=tokens())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert report.sparsity_of_pruned_layers == 0.5
