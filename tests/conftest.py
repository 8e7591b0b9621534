"""Shared set-up: Triton kernels run on the GPU where there is one, else in Triton's interpreter."""

import os
from collections.abc import Iterator

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, so before anything of ours

import hypothesis
import pytest

# CI machines pause now and then; a slow example is not a failure
hypothesis.settings.register_profile("horst", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("horst")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _waiting_is_allowed_again() -> Iterator[None]:
    """A test that fails while it forbids the host to wait for the GPU must not make all others fail."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def device() -> torch.device:
    """The device kernels are tested on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
