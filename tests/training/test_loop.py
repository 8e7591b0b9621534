"""The loop against a few plain lines; what it writes down, when it evaluates, what it refuses."""

import copy
import dataclasses
import itertools
import json
import logging
import math
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_runs import (
    CONFIG,
    SCHEDULE,
    STEPS,
    Toy,
    ToyData,
    ToyLM,
    equal,
    loss_of,
    make_optimizer,
    make_sparsifier,
    read_metrics,
    text_task,
    toy_run,
    toy_task,
)

from horst.optimizers.horst import HORST
from horst.training import Constant, LoopConfig, NonFiniteLoss, Task, train
from horst.training.interruption import StopRequest
from horst.training.run import Run

PLAIN = LoopConfig(precision="float32", compile="off", checkpoint_every=None)


def run(config, directory, *, steps=12, model=None, optimizer=None, **task):
    model = Toy() if model is None else model
    optimizer = make_optimizer("adamw", model.parameters()) if optimizer is None else optimizer
    task = dataclasses.replace(toy_task(model), **task)
    return model, train(task, optimizer, config, steps=steps, directory=directory)


@pytest.mark.parametrize("optimizer", ["adamw", "horst"])
@pytest.mark.parametrize("method", [None, "acdc", "rigl", "srste"])
def test_the_loop_is_these_few_lines(optimizer, method, tmp_path):
    weights, result = toy_run(tmp_path, optimizer=optimizer, method=method)

    torch.manual_seed(3)
    model = Toy(dropout=0.1)
    opt = make_optimizer(optimizer, model.parameters())
    sparsifier = make_sparsifier(method, model, opt)
    average = copy.deepcopy(model)
    batches = ToyData().batches(0)
    losses = []
    for step in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = 0.02 * SCHEDULE.factor(step, STEPS)
        opt.zero_grad()
        loss = loss_of(model, *next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if sparsifier is not None:
            sparsifier.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 1 - CONFIG.ema_decay)
        losses.append(loss.detach())
    weights.pop("mask hash", None)
    assert equal(weights, model.state_dict())
    logged = {line["step"]: line["loss"] for line in read_metrics(tmp_path) if "loss" in line}
    assert logged[8] == pytest.approx(torch.stack(losses[4:8]).mean().item(), rel=1e-6)
    assert logged[30] == pytest.approx(torch.stack(losses[28:30]).mean().item(), rel=1e-6)
    model.eval()
    average.eval()
    with torch.no_grad():
        evaluate = toy_task(model).evaluate
        assert result.metrics["error"] == evaluate(model)["error"]
        if sparsifier is not None:
            sparsifier.apply_to(average)  # an average is masked before it is judged
        assert result.metrics["ema_error"] == pytest.approx(evaluate(average)["error"], rel=1e-5)


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path):
    torch.manual_seed(0)
    whole, parts = Toy(), Toy()
    parts.load_state_dict(whole.state_dict())
    run(PLAIN, tmp_path / "whole", model=whole)
    run(dataclasses.replace(PLAIN, accumulate=4), tmp_path / "parts", model=parts)
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert parts.seen == 4 * whole.seen
    for a, b in zip(read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    with pytest.raises(ValueError, match=r"accumulate=3 must divide the rows of each rank's batch, which has 8"):
        run(dataclasses.replace(PLAIN, accumulate=3), tmp_path / "odd")


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("parts", [2, 8])
def test_accumulation_counts_every_target_once_however_they_are_spread(parts, terms, tmp_path):
    """Torch's mean is NaN for a part without targets; a second term, of all tokens, counts by itself."""
    torch.manual_seed(0)
    runs = {1: ToyLM(), parts: ToyLM()}
    runs[parts].load_state_dict(runs[1].state_dict())
    two = {
        "loss": lambda model, x, y: torch.stack([model.loss(x, y), model.loss(x, x)]),
        "count": lambda x, y: torch.stack([(y != -100).sum(), torch.tensor(x.numel())]),
    }
    for accumulate, model in runs.items():
        optimizer, config = torch.optim.SGD(model.parameters(), 0.1), dataclasses.replace(PLAIN, accumulate=accumulate)
        task = dataclasses.replace(text_task(model), **(two if terms == 2 else {}))
        train(task, optimizer, config, steps=20, directory=tmp_path / str(accumulate))
    for p, q in zip(runs[1].parameters(), runs[parts].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    for a, b in zip(read_metrics(tmp_path / "1"), read_metrics(tmp_path / str(parts)), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_bf16_computes_under_autocast_and_keeps_float32_weights(tmp_path):
    seen = []

    def loss(model, x, y):
        out = model(x)
        seen.append(out.dtype)
        return (out.float() - y).square().mean()

    model, _ = run(dataclasses.replace(PLAIN, precision="bf16"), tmp_path, steps=2, loss=loss)
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in model.parameters())


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for the device: numbers taken out of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default or "nonzero" in str(function):
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [None, "acdc"])
def test_the_loss_is_read_when_it_is_logged_and_not_at_other_steps(method, tmp_path):
    counts = []

    class Counting(ToyData):
        def batches(self, start):
            for batch in super().batches(start):
                counts.append(reads.count)
                yield batch

    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # AdamW on a CPU reads its own step counts
    sparsifier = make_sparsifier(method, model, optimizer)
    config = LoopConfig(compile="off", clip_norm=1.0, ema_decay=0.9, log_every=10, checkpoint_every=None)
    task = dataclasses.replace(toy_task(model), train=Counting())
    with HostReads() as reads:
        train(task, optimizer, config, steps=30, sparsifier=sparsifier, directory=tmp_path)
    steps = [b - a for a, b in itertools.pairwise(counts)]  # steps 0 to 28
    events = {3, 7, 12, 16, 20} if method else set()
    assert [i for i, reads in enumerate(steps) if reads and i not in events] == [9, 19]
    assert steps[9] <= 2  # the loss and the gradient's norm


def test_evaluations_come_when_asked_and_at_the_end(tmp_path):
    model = Toy()
    seen = []

    def evaluate(model):
        seen.append((model.training, torch.is_grad_enabled(), model))
        return {"loss": len(seen)}

    _, result = run(dataclasses.replace(PLAIN, eval_every=5), tmp_path, model=model, evaluate=evaluate)
    assert [(mode, grad) for mode, grad, _ in seen] == [(False, False)] * 3
    assert all(judged is model for _, _, judged in seen)  # not a wrapper, not compiled
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line] == [(5, 1), (10, 2), (12, 3)]
    assert [line["step"] for line in lines if "loss" in line] == [10, 12]
    assert result.metrics == {"loss": 3.0}
    assert (result.step, result.checkpoint) == (12, None)
    assert model.training


def test_metrics_are_strict_json_with_rate_and_time(tmp_path):
    config = dataclasses.replace(PLAIN, clip_norm=1.0, log_every=6)
    _, result = run(
        config, tmp_path, evaluate=lambda model: {"a": math.inf, "b": math.nan}, unit="tokens", units_per_row=5
    )
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1] == {"step": 12, "eval_a": "inf", "eval_b": None}
    assert set(lines[0]) == {"step", "loss", "lr", "gradient_norm", "tokens_per_second", "seconds"}
    assert lines[0]["tokens_per_second"] > 0
    assert result.units_per_second == pytest.approx(lines[1]["tokens_per_second"])


class BrokenAt15(ToyData):
    def batches(self, start):
        for step, (x, y) in enumerate(super().batches(start), start + 1):
            yield x, y * math.nan if step == 15 else y


@pytest.mark.parametrize(
    ("log_every", "message"),
    [
        (5, "the loss is nan at step 15; all was finite until step 12"),
        (100, "a loss or a weight is not finite at step 16; all was finite until step 12"),  # seen before a checkpoint
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_good_checkpoint(log_every, message, tmp_path):
    config = dataclasses.replace(PLAIN, log_every=log_every, checkpoint_every=4)
    with pytest.raises(NonFiniteLoss, match=message) as caught:
        run(config, tmp_path, steps=40, train=BrokenAt15())
    assert f"The last good checkpoint is {tmp_path / 'checkpoints' / 'step-00000012'}" in str(caught.value)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000008", "step-00000012"]


@pytest.mark.parametrize("options", [{"checkpoint_every": 4}, {"eval_every": 4}, {"steps": 4}])
def test_weights_that_are_not_finite_are_not_saved_or_judged_though_the_loss_still_is(options, tmp_path):
    options = dict(options)

    class Breaking(HORST):
        def step(self, closure=None):
            super().step(closure)
            if self.state[self.param_groups[0]["params"][0]]["step"] == 4:
                self.param_groups[0]["params"][0].data[0, 0] = math.nan

    model = Toy()
    optimizer = Breaking(model.parameters(), lr=1e-3)
    message = r"a loss or a weight is not finite at step 4; all was finite until step 3. There is no checkpoint yet"
    steps = options.pop("steps", 12)
    config = dataclasses.replace(PLAIN, log_every=4, **options)
    with pytest.raises(NonFiniteLoss, match=message):
        run(config, tmp_path, steps=steps, model=model, optimizer=optimizer)


def refuse_broken(directory, weight):
    model = nn.Linear(*weight.shape[::-1], dtype=weight.dtype)
    model.weight.data.copy_(weight)
    task = dataclasses.replace(toy_task(model), evaluate=lambda model: {})
    Run(
        task, torch.optim.SGD(model.parameters()), PLAIN, 12, Constant(), None, directory, StopRequest()
    )._check_finite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_broken_by_one_entry_and_not_by_their_sum(dtype, tmp_path):
    weight = torch.full((300, 300), 60000.0, dtype=dtype)  # float16 ends at 65504
    refuse_broken(tmp_path, weight)
    for bad in (math.nan, math.inf, -math.inf):
        weight[7, 7] = bad
        with pytest.raises(NonFiniteLoss, match="a weight is not finite"):
            refuse_broken(tmp_path, weight)


def test_deterministic_is_set_for_the_run_and_put_back(tmp_path):
    seen = []

    def loss(model, x, y):
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic))
        return loss_of(model, x, y)

    run(dataclasses.replace(PLAIN, deterministic=True), tmp_path, steps=1, loss=loss)
    assert seen == [(True, True)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


def test_lottery_tickets_rewind_the_learning_rate_too(tmp_path):
    config = dataclasses.replace(CONFIG, log_every=1, checkpoint_every=None)
    toy_run(tmp_path, config, method="imp")
    rates = {line["step"]: line["lr"] for line in read_metrics(tmp_path) if "lr" in line}
    assert rates[10] == rates[3]  # the first step of round 1 is that after two steps of round 0
    assert rates[16] == rates[9]
    assert rates[17] == rates[3]


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(dataclasses.replace(PLAIN, tensorboard=True, log_every=4), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    lines = [line for line in read_metrics(tmp_path) if "loss" in line]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in lines
    ]
    assert len(events.Scalars("eval_error")) == 1


class Ending(ToyData):
    """A run with it dies after so many steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def batches(self, start):
        return itertools.islice(super().batches(start), self.steps - start)


def test_tensorboard_shows_a_run_that_died_and_began_anew_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = dataclasses.replace(PLAIN, tensorboard=True, log_every=4)
    with pytest.raises(ValueError, match="ended after step 11"):
        run(config, tmp_path, train=Ending(11))
    run(config, tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [4, 8, 12]


def test_a_log_that_cannot_be_opened_whole_leaves_no_file_open(tmp_path, monkeypatch):
    files = []

    def note(*args):
        files.append(open(*args))  # noqa: SIM115 - closed by the log
        return files[0]

    monkeypatch.setattr("horst.training.metrics.open", note, raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[tensorboard\]"'):
        run(dataclasses.replace(PLAIN, tensorboard=True), tmp_path)
    assert files[0].closed


@pytest.fixture
def wandb_runs(monkeypatch):
    """The runs that Weights & Biases is asked for; it calls them run0, run1, ..."""

    class Project:
        def __init__(self, **options):
            self.options, self.logged, self.finished = options, [], False
            self.id = options["id"] or f"run{len(runs)}"
            runs.append(self)

        def log(self, numbers, step):
            self.logged.append((step, numbers))

        def finish(self):
            self.finished = True

    runs = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=Project))
    return runs


def test_weights_and_biases_gets_the_numbers_and_a_resumed_run_goes_on_in_the_same(tmp_path, wandb_runs):
    config = dataclasses.replace(PLAIN, wandb="toys", checkpoint_every=6)
    run(config, tmp_path)
    run(config, tmp_path)
    assert [r.options["id"] for r in wandb_runs] == [None, "run0"]
    assert wandb_runs[0].options["project"] == "toys"
    assert wandb_runs[0].options["config"]["config"]["steps"] == 12
    assert [step for step, numbers in wandb_runs[0].logged if "loss" in numbers] == [10, 12]
    assert all(r.finished for r in wandb_runs)


def test_weights_and_biases_gets_another_run_where_one_died_and_begins_anew(tmp_path, wandb_runs):
    config = dataclasses.replace(PLAIN, wandb="toys", checkpoint_every=6)
    for steps in (4, 11, 11):  # the last one from the checkpoint of step 6
        with pytest.raises(ValueError, match=f"ended after step {steps}"):
            run(config, tmp_path, train=Ending(steps))
    assert [r.options["id"] for r in wandb_runs] == [None, None, "run1"]


def test_where_there_is_no_terminal_progress_is_lines_in_the_log(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="horst.training"):
        run(PLAIN, tmp_path, unit="tokens", units_per_row=7)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("step 10 of 12: loss ")
    assert "tokens/s, 0:00:00 left" in lines[0]
    assert lines[-1].startswith("step 12: error ")


def test_in_a_terminal_there_is_a_bar(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    run(PLAIN, tmp_path)
    shown = capsys.readouterr().err
    assert "12/12" in shown
    assert "images/s" in shown
    assert "step 12: error" in shown


def test_compiled_is_the_same_run_and_evaluations_compile_nothing(tmp_path):
    torch.manual_seed(0)
    eager, compiled = Toy(), Toy()
    compiled.load_state_dict(eager.state_dict())
    run(PLAIN, tmp_path / "eager", model=eager)
    counters = torch._dynamo.utils.counters["stats"]
    graphs = []

    def evaluate(model):
        graphs.append(counters["unique_graphs"])
        return {"rows": len(model(torch.zeros(len(graphs), 6)))}  # another shape each time

    config = dataclasses.replace(PLAIN, compile="on", eval_every=3, accumulate=2)
    run(config, tmp_path / "compiled", model=compiled, evaluate=evaluate)
    assert graphs[0] >= 1
    assert graphs == graphs[:1] * 4
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_every": 0}, "eval_every must be at least 1, got 0"),
        ({"log_every": 0}, "log_every must be at least 1"),
        ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0. Use None for no clipping"),
        ({"precision": "bfloat16"}, "precision must be one of 'bf16', 'float32', got 'bfloat16'"),
        ({"precision": "fp32"}, "precision must be one of 'bf16', 'float32', got 'fp32'"),
        ({"compile": "yes"}, "compile must be one of 'auto', 'on', 'off', 'max-autotune', got 'yes'"),
        ({"compile": True}, "compile must be one of .* got True"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoopConfig(**options)


def test_a_run_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        run(PLAIN, tmp_path, steps=0)


def test_batches_that_end_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="the training batches ended after step 3 of 12"):
        run(PLAIN, tmp_path, train=Ending(3))


def test_a_decay_outside_its_range_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ema_decay must lie in \[0, 1\), got 1.0"):
        run(dataclasses.replace(PLAIN, ema_decay=1.0), tmp_path)


def test_a_model_whose_state_is_no_tensor_is_refused(tmp_path):
    class Odd(Toy):
        def get_extra_state(self):
            return "text"

    with pytest.raises(TypeError, match=r"_extra_state is a str"):
        run(PLAIN, tmp_path, model=Odd())


def test_a_constant_schedule_leaves_the_rate(tmp_path):
    run(PLAIN, tmp_path)
    assert {line["lr"] for line in read_metrics(tmp_path) if "lr" in line} == {0.02}
    assert isinstance(toy_task(Toy()), Task)
