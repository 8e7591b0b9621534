"""ONNX: the model as a graph that runs without Python. Pruned weights are dense zeros there.

ONNX Runtime has no kernels for unstructured sparsity: pruning makes neither the file smaller nor the run faster.
"""

from __future__ import annotations

import glob
import os
import pathlib
import warnings
from typing import Any

import torch
from torch import nn

from horst.export.int8_head import Int8Linear
from horst.export.sparse_linear import SparseLinear
from horst.extras import load_extra
from horst.files import PathLike, flush, folder_beside
from horst.parameters.modes import Batch, as_call, evaluating


def export_onnx(
    model: nn.Module, example_inputs: Batch, path: PathLike, *, dynamic_shapes: Any | None = None
) -> pathlib.Path:
    """Write ``model`` as ONNX, traced by torch's exporter on ``example_inputs``.

    Weights beyond ONNX's limit of 2 GiB go to a second file, ``path`` with ``.data`` at its end, which belongs to it.

    Args:
        model: The model. It is traced in ``eval()`` mode and left as it was.
        example_inputs: A tensor, a sequence of arguments, or a mapping from names to arguments. For a transformers
            model with a cache give ``{"input_ids": ids, "use_cache": False}``: the output is then the logits alone.
        path: The ``.onnx`` file.
        dynamic_shapes: Dimensions that may vary, as ``torch.export`` takes them; by default none.

    Example:
        >>> import tempfile
        >>> export_onnx(nn.Linear(4, 2), torch.zeros(1, 4), f"{tempfile.mkdtemp()}/model.onnx").name
        'model.onnx'
    """
    for package in ("onnx", "onnxscript"):
        load_extra(package)
    if any(isinstance(module, (SparseLinear, Int8Linear)) for module in model.modules()):
        raise ValueError(
            "ONNX has no sparse linear layers and no int8 head of ours. Export the dense model, before sparsify and "
            "quantize_head."
        )
    path = pathlib.Path(path)
    args, kwargs = as_call(example_inputs)
    with evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter and onnxscript warn of their own code
        program = torch.onnx.export(
            model, args, kwargs=kwargs, dynamic_shapes=dynamic_shapes, dynamo=True, verbose=False
        )
    assert program is not None  # without a file name the exporter returns the program
    # The graph names its data file, so both are written under their own names in a folder of their own.
    with folder_beside(path) as folder:
        program.save(folder / path.name)
        # The graph last: it is not there before what it refers to.
        for file in sorted(folder.glob(f"{glob.escape(path.name)}*"), key=lambda file: file.name == path.name):
            flush(file)
            os.replace(file, path.with_name(file.name))
    return path
