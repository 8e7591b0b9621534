"""Shared set-up: Triton kernels run on the GPU where there is one, else in Triton's interpreter."""

import os
import pathlib
import subprocess
import sys
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
def other(tmp_path: pathlib.Path) -> Iterator[subprocess.Popen]:
    """A process that has locked ``tmp_path``."""
    hold = f"from horst.files import locked\nwith locked({str(tmp_path)!r}): print(flush=True); input()"
    command = [sys.executable, "-c", hold]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture(params=["mixtral", "qwen2_moe", "gpt_oss"])
def mixture(request: pytest.FixtureRequest) -> torch.nn.Module:
    """A small mixture-of-experts model of transformers: gpt-oss stores its experts as in x out, the others out x in."""
    import transformers

    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    if request.param == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts))
    elif request.param == "qwen2_moe":
        options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "intermediate_size": 24}
        config = transformers.Qwen2MoeConfig(**sizes, **options, shared_expert_intermediate_size=20)
        model = transformers.Qwen2MoeForCausalLM(config)
    else:
        config = transformers.GptOssConfig(**sizes, **experts, head_dim=4, initial_context_length=32)
        model = transformers.GptOssForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.eval()


@pytest.fixture
def device() -> torch.device:
    """The device kernels are tested on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # not item.keywords: they name the folders too, such as a checkout "gpu"
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
