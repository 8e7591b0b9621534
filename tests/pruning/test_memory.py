"""Pruning needs no second copy of the model."""

import pathlib
import subprocess
import sys

import pytest

CODE = """
import gc, pathlib, torch
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.pruning import prune

def kilobytes(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])

torch.manual_seed(0)
data = [torch.randint(64, (1, 32))]
for number in (2, 24):  # the small one loads what is loaded on first use
    model = GPT2(GPT2Config(layers=number, heads=8, width=256, context=32, vocabulary=64))
    for method, distribution in (("magnitude", "uniform"), ("wanda", "owl"), ("sparsegpt", "uniform")):
        gc.collect()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = kilobytes("VmRSS")
        prune(model, 0.5, method=method, data=data, distribution=distribution)
        rise = (kilobytes("VmHWM") - before) * 1024 / sum(p.nbytes for p in model.parameters())
        if number == 24:
            print(method, distribution, rise)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from /proc")
def test_the_peak_of_the_memory_rises_by_less_than_the_model():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    rises = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in run.stdout.splitlines()}
    assert len(rises) == 3
    assert {name: rise for name, rise in rises.items() if rise > 0.5} == {}  # of 76 MB; a second copy would be 1
