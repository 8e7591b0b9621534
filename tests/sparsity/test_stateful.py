"""Random sequences of everything that can happen in a run, for every method, with the invariants checked all along."""

import copy
import io

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sparse_methods import METHODS, TOTAL, Tiny, adamw, differences, expected_zeros, loss_of


class Run(RuleBasedStateMachine):
    """A training run in the hands of an unkind user."""

    @initialize(method=st.sampled_from(sorted(METHODS)), momentum=st.booleans())
    def start(self, method, momentum):
        self.method, self.momentum = method, momentum
        self.model, self.optimizer, self.sparsifier = self.build()
        self.data = 0

    def build(self, **options):
        model = Tiny()
        optimizer = (
            torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) if self.momentum else adamw(model.parameters())
        )
        return model, optimizer, METHODS[self.method](model, optimizer, **options)

    def backward(self):
        self.data += 1
        loss_of(self.model, self.data).backward()

    @rule(micro_batches=st.integers(1, 3), steps=st.integers(1, 12))
    def train(self, micro_batches, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            for _ in range(micro_batches):
                self.backward()
            self.optimizer.step()
            self.sparsifier.step()
            self.zeros_are_zero_and_counts_exact()

    @rule()
    def overflow(self):
        """GradScaler skips the optimizer's step; the sparsifier's is called all the same."""
        self.backward()
        self.optimizer.zero_grad()
        self.sparsifier.step()

    @rule(levels=st.sampled_from([0, 1, 4]))
    def quantise(self, levels):
        """Ties everywhere; with no levels all kept weights are equal."""
        with torch.no_grad():
            for name, mask in self.sparsifier.masks.items():
                weight = self.model.get_parameter(name)
                coarse = (weight * levels).round() / levels if levels else torch.full_like(weight, 0.125)
                weight.copy_(torch.where(mask, coarse, weight))

    @rule(rebuild_first=st.booleans())
    def restart(self, rebuild_first):
        buffer = io.BytesIO()
        torch.save([x.state_dict() for x in (self.model, self.optimizer, self.sparsifier)], buffer)
        buffer.seek(0)
        model_state, optimizer_state, sparsifier_state = torch.load(buffer, weights_only=True)
        hash_before = self.sparsifier.mask_hash()
        self.model, self.optimizer, self.sparsifier = self.build(state_dict=None if rebuild_first else sparsifier_state)
        self.model.load_state_dict(model_state)
        self.optimizer.load_state_dict(optimizer_state)
        if rebuild_first:
            self.sparsifier.load_state_dict(sparsifier_state)
        assert self.sparsifier.mask_hash() == hash_before
        assert differences(self.sparsifier.state_dict(), sparsifier_state) == []

    @rule(noise=st.floats(0.0, 1.0))
    def evaluate_an_average(self, noise):
        average = copy.deepcopy(self.model)
        with torch.no_grad():
            for p in average.parameters():
                p.add_(noise)
        before = copy.deepcopy(average.state_dict())
        with self.sparsifier.evaluate(average):
            for name, mask in self.sparsifier.masks.items():
                assert not average.get_parameter(name)[~mask].any()
        assert differences(dict(average.state_dict()), dict(before)) == []

    @rule(metric=st.floats(-1.0, 1.0))
    def record(self, metric):
        kind = "sparse" if self.sparsifier.is_sparse else "dense"
        best = self.sparsifier.best[kind].metric if kind in self.sparsifier.best else None
        assert self.sparsifier.record(metric) == (best is None or metric > best)

    @precondition(lambda self: self.sparsifier.steps > TOTAL)
    @rule(method=st.sampled_from(sorted(METHODS)))
    def begin_another_run(self, method):
        self.start(method, not self.momentum)

    @invariant()
    def zeros_are_zero_and_counts_exact(self):
        masks = self.sparsifier.masks
        for name, mask in masks.items():
            weight = self.model.get_parameter(name).detach()
            assert torch.equal(weight.masked_fill(mask, 0.0), torch.zeros_like(weight))
        removed = sum(int((~mask).sum()) for mask in masks.values())
        assert removed == expected_zeros(self.method, self.sparsifier.steps)
        assert self.sparsifier.current_sparsity == removed / 384


TestRun = Run.TestCase
# About 4,000 training steps; derandomized, so that a failure is the same for everybody.
TestRun.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
