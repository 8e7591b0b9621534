"""Records by hand, restarts, and the figure."""

import json

import pytest
import torch
from sparse_methods import PHASES, TOTAL, Tiny, adamw, differences, train_step
from torch import nn

from horst.sparsity import ACDC, Phases, Recorder
from horst.sparsity.diagnostics import plot


def test_overlap_and_sign_flips_by_hand():
    model = nn.Linear(8, 1, bias=False)
    model.weight.data = torch.tensor([[8.0, -7.0, 6.0, 5.0, 1.0, 1.0, 1.0, 1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = ACDC(model, optimizer, sparsity=0.5, schedule=Phases((1, 2, 3), end=5), layers="all_linear")
    recorder = Recorder(sparsifier, quantiles=(0.5, 1.0))
    sparsifier.step()  # keeps 0..3
    sparsifier.step()  # dense
    model.weight.data = torch.tensor([[-8.0, -7.0, 6.0, 0.0, 9.0, 1.0, 1.0, 1.0]])
    sparsifier.step()  # keeps 0, 1, 2, 4
    sparse, dense, again = (record["layers"]["weight"] for record in recorder.records)
    assert sparse == {"sparsity": 0.5, "overlap": None, "sign_flips": None, "quantiles": {"0.5": 6.0, "1.0": 8.0}}
    assert (dense["sparsity"], dense["overlap"]) == (0.0, None)
    assert again == {
        "sparsity": 0.5,
        "overlap": 3 / 4,
        "sign_flips": 1 / 3,
        "quantiles": {"0.5": 7.0, "1.0": 9.0},
    }
    assert [(r["overlap"], r["sign_flips"]) for r in recorder.records] == [(None, None), (None, None), (3 / 4, 1 / 3)]
    assert [(r["step"], r["kind"]) for r in recorder.records] == [(1, "prune"), (2, "restore"), (3, "prune")]


def test_shares_over_all_layers_count_weights_not_layers():
    model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    model[1].weight.data = torch.tensor([[5.0, 1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = ACDC(model, optimizer, sparsity=0.6, schedule=Phases((1, 2, 3), end=5), layers="all_linear")
    recorder = Recorder(sparsifier, quantiles=())
    sparsifier.step()  # keeps the first three, and one of the second layer
    sparsifier.step()
    model[0].weight.data = torch.tensor([[-8.0, -7.0, 6.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    model[1].weight.data = torch.tensor([[1.0, 5.0]])
    sparsifier.step()  # the first three again, two of them with another sign; the other of the second layer
    last = recorder.records[-1]
    assert [(row["overlap"], row["sign_flips"]) for row in last["layers"].values()] == [(1.0, 2 / 3), (0.0, None)]
    assert (last["overlap"], last["sign_flips"]) == (3 / 4, 2 / 3)
    assert all(row["quantiles"] == {} for row in last["layers"].values())


def test_the_sparsifiers_state_holds_its_recorders():
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=PHASES)
    recorder = Recorder(sparsifier)
    for step in range(15):
        train_step(model, [optimizer], sparsifier, step)
    assert len(recorder.records) == 3
    other = Tiny()
    resumed = ACDC(other, adamw(other.parameters()), sparsity=0.9, schedule=PHASES)
    again = Recorder(resumed)
    resumed.load_state_dict(sparsifier.state_dict())
    assert again.records == recorder.records
    assert again._previous.keys() == recorder._previous.keys()
    without = {key: value for key, value in sparsifier.state_dict().items() if key != "observers"}
    resumed.load_state_dict(without)  # of a run that had no recorder
    assert again.records == recorder.records


def test_a_sparsifier_built_from_a_state_hands_it_to_its_recorders():
    model = Tiny()
    sparsifier = ACDC(model, adamw(model.parameters()), sparsity=0.9, schedule=PHASES)
    recorders = [Recorder(sparsifier), Recorder(sparsifier, quantiles=[0.5])]
    for _ in range(15):
        sparsifier.step()
    state, other = sparsifier.state_dict(), Tiny()
    resumed = ACDC(other, adamw(other.parameters()), sparsity=0.9, schedule=PHASES, state_dict=state)
    again = [Recorder(resumed), Recorder(resumed, quantiles=[0.5]), Recorder(resumed)]
    assert [len(recorder.records) for recorder in again] == [3, 3, 0]
    assert [recorder.records for recorder in again[:2]] == [recorder.records for recorder in recorders]
    assert again[0]._previous.keys() == recorders[0]._previous.keys()


def test_records_survive_a_restart():
    def run(stop=None):
        model = Tiny()
        optimizer = adamw(model.parameters())
        sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=PHASES)
        recorder = Recorder(sparsifier)
        for step in range(TOTAL):
            if step == stop:
                state = recorder.state_dict()
                sparsifier.observers.clear()
                recorder = Recorder(sparsifier)
                recorder.load_state_dict(state)
            train_step(model, [optimizer], sparsifier, step)
        return recorder.records

    whole = run()
    assert len(whole) == 5
    assert whole[4]["layers"]["blocks.0.fc1.weight"]["overlap"] is not None
    assert differences(whole, run(stop=15)) == []


def test_records_are_written_and_drawn(tmp_path):
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=PHASES)
    recorder = Recorder(sparsifier)
    for step in range(TOTAL):
        train_step(model, [optimizer], sparsifier, step)
    recorder.save(tmp_path / "records.json")
    assert json.loads((tmp_path / "records.json").read_text()) == recorder.records
    plot(recorder.records, tmp_path / "records.png")
    assert (tmp_path / "records.png").read_bytes().startswith(b"\x89PNG")


def test_quantiles_must_be_shares():
    model = Tiny()
    sparsifier = ACDC(model, adamw(model.parameters()), sparsity=0.9, schedule=PHASES)
    with pytest.raises(ValueError, match=r"quantiles must lie in \(0, 1\], got \[50\]"):
        Recorder(sparsifier, quantiles=[50])


@pytest.mark.gpu
def test_records_go_on_from_a_checkpoint_read_on_the_cpu():
    model = Tiny().cuda()
    optimizer = adamw(model.parameters())
    sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=PHASES)
    recorder = Recorder(sparsifier)
    for _ in range(TOTAL):
        sparsifier.step()
        state = recorder.state_dict()
        on_cpu = {name: [bits.cpu() for bits in both] for name, both in state["previous"].items()}
        recorder.load_state_dict({**state, "previous": on_cpu})
    assert [r["step"] for r in recorder.records] == list(PHASES.changes)
