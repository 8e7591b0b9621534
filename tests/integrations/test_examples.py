"""The examples: each at most 40 lines, each run as it stands, each with what it claims in its output."""

import copy
import dataclasses
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types

import pytest
import torch

import horst

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
    found = re.search(r"loss ([\d.]+) dense, ([\d.]+) with (\d+)% zeros", output_of("hf_trainer", capsys))
    dense, pruned, zeros = map(float, found.groups())
    assert dense < 2.5  # 5.5 before training
    assert pruned < dense + 0.3
    assert zeros == 70


def test_hf_train_and_prune(capsys):
    output = output_of("hf_train_and_prune", capsys)
    (dense,) = re.findall(r"dense: loss ([\d.]+)", output)
    (pruned,) = re.findall(r"pruned, saved, loaded: loss ([\d.]+)", output)
    assert float(dense) < 4.5  # 6.2 before training
    assert float(pruned) < 1.05 * float(dense)
    assert 69.9 < percentages(output)[-2] < 70.1  # of the pruned layers


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


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*treespec.*")
def test_lightning_cli(capsys, monkeypatch):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse[signatures]")
    monkeypatch.setattr(sys, "argv", ["lightning_cli.py"])  # it reads them beside those that it is given
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what Lightning calls
    assert output_of("lightning_cli", capsys).splitlines()[-1] == "HORST alpha 5.0"


def test_pytorch_optimizer_registry(capsys):
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    named, trained = output_of("pytorch_optimizer_registry", capsys).splitlines()
    assert named == "['horst']: MatrixHORST, decay in 2 groups"
    zeros, right = percentages(trained)
    assert zeros == 90.0
    assert right > 90


class StandIn(torch.optim.Optimizer):
    """What torchtitan 0.3 does with the names and groups of its config, for machines without torchtitan."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list
        implementation: str

        def build(self, model_parts):
            owner = next(one for one in StandIn.__subclasses__() if one.Config is type(self))
            return owner(self, model_parts)

    def __init__(self, config, model_parts):
        modes = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
        self.optimizers = []
        for model in model_parts:
            left = dict(model.named_parameters())
            groups = {}
            for entry in config.param_groups:
                names = [name for name in left if re.search(entry.pattern, name)]
                assert names, f"pattern '{entry.pattern}' matched no parameters"
                own = {"params": [left.pop(name) for name in names], "param_names": names}
                groups.setdefault(entry.optimizer_name, []).append({**own, **modes, **entry.optimizer_kwargs})
            self.optimizers += [self._resolve_optimizer_factory(name)(group) for name, group in groups.items()]
            assert not left
        super().__init__([p for part in model_parts for p in part.parameters()], {})

    @staticmethod
    def _resolve_optimizer_factory(name):
        return {"AdamW": torch.optim.AdamW}[name]

    def __iter__(self):
        return iter(self.optimizers)

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "torchtitan"])
def test_torchtitan_container(capsys, monkeypatch, real):
    if real:
        pytest.importorskip("torchtitan.components.optimizer", reason="torchtitan is not installed")
    else:
        entry = lambda **given: types.SimpleNamespace(**given)  # noqa: E731
        module = types.SimpleNamespace(OptimizersContainer=StandIn, ParamGroupConfig=entry)
        for name in ("torchtitan", "torchtitan.components"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "torchtitan.components.optimizer", module)
    assert output_of("torchtitan_container", capsys).splitlines()[-1] == "['HORST'] [0.0, 5.0]"
    example = runpy.run_path(str(FOLDER / "torchtitan_container.py"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    other = copy.deepcopy(model)
    container = example["horst"](lr=1e-2).build(model_parts=[model])
    groups = [
        {"params": [p for n, p in other.named_parameters() if n.endswith(kind)], "alpha": alpha, "weight_decay": decay}
        for kind, alpha, decay in (("bias", 0.0, 0.0), ("weight", 5.0, 0.1))
    ]
    optimizer = horst.HORST(groups, lr=1e-2)
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for one, update in ((model, container.step), (other, optimizer.step)):
            one.zero_grad()
            one(x).square().mean().backward()
            update()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    if real:  # torchtitan's checkpoints
        again = example["horst"](lr=1e-2).build(model_parts=[copy.deepcopy(model)])
        again.load_state_dict(container.state_dict())
        saved, loaded = container.state_dict(), again.state_dict()
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(torch.as_tensor(saved[k]), torch.as_tensor(loaded[k])) for k in saved if "exp_avg" in k)


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
        [*command, str(pathlib.Path(__file__).parents[1] / "leave_at_once.py"), str(FOLDER / "fsdp2_torchrun.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank [01]: 80% zeros over all ranks", done.stdout)) == 2
    assert len(list(tmp_path.rglob("*.distcp"))) == 2
