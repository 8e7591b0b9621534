"""The examples: each at most 40 lines, each run as it stands, each with what it claims in its output."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "integrations"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_fits_on_a_page(path):
    assert len(path.read_text().splitlines()) <= 40


def output_of(name, capsys):
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def percentages(text):
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


def test_hf_trainer(capsys):
    loss, zeros = re.search(r"training loss ([\d.]+); (\d+)%", output_of("hf_trainer", capsys)).groups()
    assert float(loss) < 3.5  # 5.5 before training
    assert zeros == "80"


def test_accelerate_loop(capsys):
    zeros, right = percentages(output_of("accelerate_loop", capsys))
    assert zeros == 90.0
    assert right > 90


# Lightning's advice on workers, loggers and test-sized runs.
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*treespec.*")
def test_lightning_module(capsys):
    zeros, right = percentages(output_of("lightning_module", capsys).splitlines()[-1])
    assert zeros == 90.0
    assert right > 90


def test_timm_vit(capsys):
    zeros, right = percentages(output_of("timm_vit", capsys))
    assert zeros == 80.0
    assert right > 90


def test_optax_mlp(capsys):
    rows = re.findall(
        r"alpha ([\d.]+): loss ([\d.]+), with 80 % of the weights pruned ([\d.]+)", output_of("optax_mlp", capsys)
    )
    pruned = {float(alpha): float(loss) for alpha, _, loss in rows}
    assert pruned[5.0] < 0.5 * pruned[0.0]


def test_peft_lora(capsys):
    numbers = percentages(output_of("peft_lora", capsys))
    (ordinary, put_back, masked), (right, right_put_back, right_masked) = numbers[::2], numbers[1::2]
    assert (ordinary, put_back, masked) == (0, 80, 80)
    assert right > right_masked > 90 > right_put_back


def test_fsdp2_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(FOLDER / "fsdp2_torchrun.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank [01]: 80% zeros over all ranks", done.stdout)) == 2
    assert len(list(tmp_path.rglob("*.distcp"))) == 2
