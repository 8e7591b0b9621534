"""The batches: each row once per epoch, a function of the step alone; and what is refused."""

import itertools
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given
from torch import nn

from horst.recovery import data as data_module
from horst.recovery.data import RowBatches, fingerprint, read_examples


def read(data, model=None, batch_size=2):
    return read_examples(data, model or nn.Identity(), batch_size=batch_size, seed=0)


@given(rows=st.integers(1, 12), batch_size=st.integers(1, 15), start=st.integers(0, 6), seed=st.integers(0, 5))
def test_every_epoch_has_each_row_once_and_any_step_restores_the_rest(rows, batch_size, start, seed):
    source = RowBatches(torch.arange(rows), torch.arange(rows), batch_size=batch_size, seed=seed)
    count = -(-3 * rows // batch_size) + start + 1
    batches = [x for x, _ in itertools.islice(source.batches(0), count)]
    assert all(len(batch) == batch_size for batch in batches)
    read = torch.cat(batches).tolist()
    for epoch in range(3):
        assert sorted(read[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    for again, batch in zip(source.batches(start), batches[start:], strict=False):
        assert torch.equal(again[0], batch)


def test_the_order_differs_between_epochs_and_seeds():
    orders = [RowBatches(torch.zeros(50), None, batch_size=1, seed=s).order(e).tolist() for s in (0, 1) for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_ranks_share_a_batch(monkeypatch):
    whole = next(RowBatches(torch.arange(9), torch.arange(9), batch_size=6).batches(1))[0]
    monkeypatch.setattr(data_module, "world_size", lambda: 2)
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(data_module, "rank", lambda rank=rank: rank)
        parts.append(next(RowBatches(torch.arange(9), torch.arange(9), batch_size=6).batches(1))[0])
    assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(ValueError, match="batch_size=3 cannot be divided among 2 processes"):
        RowBatches(torch.arange(9), None, batch_size=3)


def test_token_windows_predict_the_next_token():
    examples = read(torch.tensor([[5, 6, 7]]), batch_size=1)
    inputs, targets = next(examples.source.batches(0))
    assert inputs.tolist() == [[5, 6, 7]]
    assert targets.tolist() == [[6, 7, -100]]
    assert (examples.unit, examples.units_per_row, examples.rows) == ("tokens", 3, 1)


def test_named_tensors_come_back_by_name():
    ids, mask = torch.randint(50, (4, 3)), torch.tensor([[1, 1, 0]] * 4)
    examples = read({"input_ids": ids.int(), "attention_mask": mask}, batch_size=4)
    inputs, targets = next(examples.source.batches(0))
    order = examples.source.order(0)
    assert torch.equal(examples.arguments(inputs)["input_ids"], ids[order])
    assert torch.equal(examples.counts(inputs), mask[order].bool())
    assert targets.tolist() == [-100] * 4
    assert not examples.has_labels


def test_labels_of_a_causal_model_are_shifted_and_those_of_others_are_not():
    data = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[-100, 2, 3]])}
    causal = transformers.OPTForCausalLM(
        transformers.OPTConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, ffn_dim=8,
                               word_embed_proj_dim=8, max_position_embeddings=8, pad_token_id=1, bos_token_id=2,
                               eos_token_id=2)
    )  # fmt: skip
    assert next(read(data, causal, 1).source.batches(0))[1].tolist() == [[2, 3, -100]]
    assert next(read(data, nn.Embedding(9, 2), 1).source.batches(0))[1].tolist() == [[-100, 2, 3]]
    for encodes, expected in ((False, [[2, 3, -100]]), (True, [[-100, 2, 3]])):  # as Llava, and as T5
        model = type(
            "ForConditionalGeneration", (nn.Embedding,), {"config": SimpleNamespace(is_encoder_decoder=encodes)}
        )
        assert next(read(data, model(9, 2), 1).source.batches(0))[1].tolist() == expected


def test_calibration_takes_as_many_rows_as_asked_for():
    windows = torch.randint(50, (30, 4))
    batches = read(windows).calibration(20)
    assert sum(map(len, batches)) == 20
    assert len(torch.cat(batches).unique(dim=0)) == len(windows[read(windows).source.order(0)[:20]].unique(dim=0))

    class Source:
        def batches(self, start):
            return iter([(windows[:6], windows[:6])] * 10)

    assert [len(batch) for batch in read(Source()).calibration(14)] == [6, 6, 2]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (torch.zeros(3, 4), TypeError, "one tensor must hold token windows, .* got float32 of shape"),
        (torch.zeros(3, dtype=torch.int64), TypeError, "one tensor must hold token windows"),
        (torch.zeros(3, 1, dtype=torch.int64), ValueError, "at least two tokens"),
        (torch.zeros(0, 4, dtype=torch.int64), ValueError, "the data is empty"),
        (torch.tensor([[1, 99]]), ValueError, "tokens from 1 to 99, the model knows 50, from 0 to 49"),
        (torch.tensor([[1, -1]]), ValueError, "tokens from -1 to 1"),
        ((torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64)), ValueError, "3 rows of inputs and 2 of targets"),
        ((torch.zeros(3, 2), torch.zeros(3)), TypeError, "labels must be classes or tokens, integers"),
        ((torch.zeros(3, 2), torch.tensor([0, -1, -100])), ValueError, "labels count from 0, and -100 is .* got -1"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, TypeError, r"inputs and perhaps 'labels', got \['labels'\]"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(3, 4)}, ValueError, "one shape and one kind of number"),
        ("text.txt", TypeError, "data must be a tensor of token windows, .* got str"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        read(data, nn.Sequential(nn.Embedding(50, 2)))


@given(st.integers(0, 19), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]))
def test_any_other_value_has_another_fingerprint(place, dtype):
    values = (torch.arange(20) % 2).to(dtype)
    other = values.clone()
    other[place] = 1 - int(other[place])
    assert fingerprint([values]) == fingerprint([values.clone()])
    assert fingerprint([values]) != fingerprint([other])


def test_shapes_and_the_division_into_tensors_are_part_of_the_fingerprint():
    x = torch.ones(6)
    assert len({fingerprint(parts) for parts in ([x], [x[:3], x[3:]], [x[:2], x[2:]], [x.view(2, 3)])}) == 4
