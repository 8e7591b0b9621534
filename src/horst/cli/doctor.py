"""``horst doctor``: versions, device, and which backends work here and why not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence
from typing import Any

from horst import __version__
from horst.cli import parsing
from horst.cli.output import table, write, write_json
from horst.extras import EXTRA_OF


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Versions and backends of this machine."""

    json: bool = False
    """Print JSON instead of tables."""


def parse(arguments: Sequence[str], prog: str) -> Options:
    """The options, without tyro where there is nothing to parse: the command works without the extra ``lab``."""
    if list(arguments) in ([], ["--json"]):
        return Options(json=bool(arguments))
    parsed: Options = parsing.parse(Options, arguments, prog=prog, description="Versions, device and backends.")
    return parsed


def main(options: Options) -> int:
    """Print what was found; 1 if the optimizer itself does not work here."""
    found = examine()
    if options.json:
        write_json(found)
    else:
        write(table([{"what": k, "found": v} for k, v in found["versions"].items()], "Versions"))
        write(table(found["backends"], "Backends"))
        write(table(found["packages"], "Optional packages"))
    return 0 if found["backends"][0]["works"] == "yes" else 1


def examine() -> dict[str, Any]:
    """Versions, backends and optional packages, as plain values."""
    import torch

    cuda = torch.cuda.is_available()
    versions = {
        "horst": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton") or "not installed",
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu threads": str(torch.get_num_threads()),
        "gpu": ", ".join(_describe(i) for i in range(torch.cuda.device_count())) if cuda else "none",
    }
    packages = [
        {"package": p, "version": _version(p) or "not installed", "installed by": f'pip install ".[{e}]"'}
        for p, e in EXTRA_OF.items()
    ]
    return {"versions": versions, "backends": list(try_backends(cuda)), "packages": packages}


def try_backends(cuda: bool) -> list[dict[str, str]]:
    """One real step with each backend, beside the reference."""
    import torch

    from horst.optimizers.horst import HORST

    rows = []
    devices = ["cpu", "cuda"] if cuda else ["cpu"]
    flags: dict[str, dict[str, Any]] = {
        "for-loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
    for device in devices:
        expected = None
        for name, flag in flags.items():
            theta = torch.nn.Parameter(torch.linspace(-1, 1, 5, device=device))
            theta.grad = torch.ones_like(theta)
            try:
                HORST([theta], lr=0.1, **flag).step()
            except Exception as error:
                works, why = "no", " ".join(str(error).split())
            else:
                expected = theta.detach() if expected is None else expected
                same = torch.allclose(theta.detach(), expected, rtol=1e-5)
                works, why = ("yes", "") if same else ("no", "its result differs from the for-loop's")
            rows.append({"device": device, "backend": name, "works": works, "why not": why})
    return rows


def _describe(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # scikit-learn is imported as sklearn
        names = importlib.metadata.packages_distributions().get(package, [])
        return importlib.metadata.version(names[0]) if names else "unknown"
