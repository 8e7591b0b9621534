"""Hugging Face directories: dense zeros that any tool loads, or the sparse file in their place.

A dense directory is what ``save_pretrained`` writes; ``AutoModelForCausalLM`` and its peers load it. A sparse one has
``model.sparse.safetensors`` instead of ``model.safetensors``, beside the same ``config.json`` and tokenizer files, and
is read by :func:`load_pretrained` alone. Weights are read through safetensors only; no code that lies in the directory
is run, and no file outside it is opened.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from horst.export.safetensors_header import read_header, shorten
from horst.export.sparse_linear import sparsify
from horst.export.sparse_safetensors import load_sparse, read_dtypes, save_sparse
from horst.extras import load_extra
from horst.files import InvalidFileError, PathLike, path_inside, read_json, whole_directory
from horst.parameters.quantization import GROUP_SIZE
from horst.sparsity.selection import FLOATS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SPARSE_FILE = "model.sparse.safetensors"
DENSE_FILE, _DENSE_INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_MAX_BLOCKS = 1000
_MAX_SIDE_FILE, _MAX_SIDE_FILES = 64 << 20, 256 << 20  # bytes of one, and of all
# Weights in any format, states of a training, and what tells of the old weights.
_NOT_CARRIED = (
    *(".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".ot", ".npz", ".npy"),
    *(".onnx", ".data", ".onnx_data", ".gguf", ".tflite", ".xml", "/report.md", "/report.html", "/report.json"),
)


def save_hugging_face(
    model: nn.Module,
    directory: PathLike,
    *,
    sparse: bool = False,
    tokenizer: PreTrainedTokenizerBase | PathLike | None = None,
    values: str | None = None,
    head_values: str | None = None,
    group_size: int = GROUP_SIZE,
) -> pathlib.Path:
    """Write a model as a Hugging Face directory, whole or not at all.

    Args:
        model: A transformers model, or one with a method ``to_hugging_face()`` that returns one.
        directory: A new or empty directory.
        sparse: Whether to write the weights as sparse safetensors, for :func:`load_pretrained`. The default writes
            dense zeros, as large as before pruning, which every tool reads.
        tokenizer: A tokenizer to save beside the model, or a directory to copy the tokenizer's files from.
        values: Precision of the matrices in the sparse file, see :func:`save_sparse`; None keeps theirs.
        head_values: Precision of embeddings and heads in the sparse file; None keeps theirs.
        group_size: Inputs that share a scale, for integers.
    """
    if (values or head_values) and not sparse:
        raise ValueError("values and head_values are for the sparse file: give sparse=True, too.")
    hf_model = _as_transformers(model)
    with whole_directory(directory) as temporary:
        if sparse:
            # As save_pretrained does it, which would write the dense weights as well.
            config = copy.deepcopy(hf_model.config)
            config.architectures = [type(hf_model).__name__]
            config.save_pretrained(temporary)
            if hf_model.can_generate() and getattr(hf_model, "generation_config", None) is not None:
                hf_model.generation_config.save_pretrained(temporary)
            path = temporary / SPARSE_FILE
            save_sparse(hf_model, path, values=values, head_values=head_values, group_size=group_size)
        else:
            hf_model.save_pretrained(temporary)
        if tokenizer is not None:
            _write_tokenizer(tokenizer, temporary)
    return pathlib.Path(directory)


def copy_side_files(source: PathLike, directory: PathLike) -> list[str]:
    """Copy what else lies beside a model's weights: tokenizer, processor, card, the modules of sentence-transformers.

    Left out are weights, hidden files, links that lead out of ``source``, and what is there already. The folders that
    ``modules.json`` names are modules of their own, so their weights do come along. Files of more than 64 MiB are left
    out with a warning, and so is what exceeds 256 MiB in all.

    Returns:
        The names of the copied files.
    """
    source, directory = pathlib.Path(source), pathlib.Path(directory)
    modules = _module_folders(source)
    copied, left, total = [], [], 0
    for folder, folders, files in os.walk(source):
        inside = pathlib.Path(folder).relative_to(source)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(file for file in files if not file.startswith(".")):
            relative = (inside / name).as_posix()
            if f"/{name}".endswith(_NOT_CARRIED) and inside.as_posix() not in modules:
                continue
            try:
                path = path_inside(source, relative)
                size = path.stat().st_size
            except (InvalidFileError, OSError):
                left.append(relative)
                continue
            if os.path.lexists(directory / relative):
                continue
            if size > _MAX_SIDE_FILE or total + size > _MAX_SIDE_FILES:
                left.append(relative)
                continue
            (directory / inside).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, directory / relative)
            copied.append(relative)
            total += size
    if left:
        logger.warning("not copied from %s, as too large or not in the folder: %s.", source, shorten(left))
    return copied


def _module_folders(source: pathlib.Path) -> set[str]:
    """The folders of sentence-transformers' modules other than the model itself."""
    with contextlib.suppress(InvalidFileError, OSError, ValueError):
        listed = json.loads(path_inside(source, "modules.json").read_bytes())
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        paths = [entry.get("path") for entry in entries if not str(entry.get("type")).endswith(".Transformer")]
        return {path.strip("/") for path in paths if isinstance(path, str)}
    return set()


def _load_dense_directory(directory: pathlib.Path) -> PreTrainedModel:
    model_class, _ = _class_and_config(directory)
    for file in _dense_files(directory):
        with open(file, "rb") as opened:
            read_header(opened, file)
    model, info = model_class.from_pretrained(
        directory, use_safetensors=True, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    if info["missing_keys"]:
        missing = shorten(sorted(info["missing_keys"]))
        raise InvalidFileError(f"{directory} does not hold all weights of {model_class.__name__}: it lacks {missing}.")
    return model


def load_pretrained(directory: PathLike, *, sparse: bool = False) -> PreTrainedModel:
    """Load a directory that :func:`save_hugging_face` wrote, dense or sparse, into the transformers model it was.

    The class is the one that ``config.json`` names. Zeros come back as zeros: :func:`horst.sparsity.keep_zeros` keeps
    them while the model is trained on.

    Args:
        directory: Directory with ``config.json`` and ``model.sparse.safetensors``, or dense safetensors.
        sparse: Whether to turn linear layers that are faster sparse into that form, for inference on this CPU; see
            :func:`horst.export.sparsify`.

    Raises:
        InvalidFileError: A weight is missing, or a file is damaged, lies outside the directory, or is a pickle
            (``pytorch_model.bin``). Adapters are refused too, and models whose code lies in the directory.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=8, n_positions=4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = load_pretrained(save_hugging_face(model, f"{folder}/pruned", sparse=True))
        >>> type(model).__name__
        'GPT2LMHeadModel'
    """
    directory = pathlib.Path(directory)
    load = _load_sparse_directory if (directory / SPARSE_FILE).exists() else _load_dense_directory
    model = load(directory)
    if sparse:
        sparsify(model)
    return model


def _load_sparse_directory(directory: pathlib.Path) -> PreTrainedModel:
    transformers = load_extra("transformers")
    path = path_inside(directory, SPARSE_FILE)
    model_class, config = _class_and_config(directory)
    dtypes = read_dtypes(path)
    with _without_initialisation():
        model = model_class(config)
    model.tie_weights()
    # What is not in the file (masks, scales) has the dtype that it has in a model made in that of the weights.
    weights = next((dtype for dtype in dtypes.values() if dtype in FLOATS), torch.float32)
    with _default_dtype(weights), torch.device("meta"), _without_initialisation():
        dtypes = {name: buffer.dtype for name, buffer in model_class(config).named_buffers()} | dtypes
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
    load_sparse(path, model)
    if (directory / "generation_config.json").exists() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model.eval()


def _as_transformers(model: nn.Module) -> PreTrainedModel:
    transformers = load_extra("transformers")
    if isinstance(model, transformers.PreTrainedModel):
        return model
    convert = getattr(model, "to_hugging_face", None)
    if not callable(convert):
        raise TypeError(
            f"{type(model).__name__} is no transformers model and has no to_hugging_face(): it has no Hugging Face "
            "form. save_sparse writes the weights of any model."
        )
    return convert()


def _class_and_config(directory: pathlib.Path) -> tuple[Any, Any]:
    """The transformers class that ``config.json`` names, and its configuration."""
    transformers = load_extra("transformers")
    if not directory.is_dir():
        is_file = " A sparse file is read by horst.export.load_sparse." if directory.exists() else ""
        raise NotADirectoryError(f"{directory} is not a directory, which load_pretrained needs.{is_file}")
    if not (directory / "config.json").is_file():
        raise InvalidFileError(f"{directory} has no config.json: it is no Hugging Face model.")
    content = read_json(path_inside(directory, "config.json"))
    check_blocks(content, directory)
    # Both make transformers read weights from a place that another file names.
    if "transformers_weights" in content or (directory / "adapter_config.json").exists():
        raise InvalidFileError(
            f"{directory} takes its weights from elsewhere (an adapter, or transformers_weights in config.json). Merge "
            "the adapter into its model and save that."
        )
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    model_class = getattr(transformers, name, None) if name else None
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise InvalidFileError(
            f"config.json of {directory} names the architecture {name!r}, which transformers "
            f"{transformers.__version__} has not. Code that comes with a model is not run."
        )
    return model_class, transformers.AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )


def check_blocks(config: Mapping[str, Any], where: PathLike) -> None:
    """Refuse a number of blocks that no model has: building them would take hours before the weights are compared."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_blocks(value, where)
        elif ("layer" in key or key == "depth") and isinstance(value, (int, float)) and value > _MAX_BLOCKS:
            raise InvalidFileError(f"{where} is damaged or forged: {key} is {value:g}, more than {_MAX_BLOCKS} blocks.")


def _dense_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files that transformers would read, none of them outside the directory."""
    if (directory / DENSE_FILE).exists():
        return [path_inside(directory, DENSE_FILE)]
    if not (directory / _DENSE_INDEX).exists():
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
        found = f" {shorten(pickles)} may be pickles, which can run code and are never loaded here." if pickles else ""
        raise InvalidFileError(f"{directory} has no safetensors weights.{found} Save it with them.")
    index = read_json(path_inside(directory, _DENSE_INDEX))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidFileError(f"{_DENSE_INDEX} of {directory} has no weight_map from tensors to files.")
    # Not a set: a value of the wrong type may not be hashable. path_inside refuses it.
    files = dict.fromkeys(path_inside(directory, name) for name in weight_map.values())
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise InvalidFileError(f"{_DENSE_INDEX} of {directory} names files that are not there: {shorten(absent)}.")
    return list(files)


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase | PathLike, directory: pathlib.Path) -> None:
    if not isinstance(tokenizer, (str, os.PathLike)):
        tokenizer.save_pretrained(directory)
        return
    found = [name for name in TOKENIZER_FILES if (pathlib.Path(tokenizer) / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{tokenizer} has no tokenizer files ({', '.join(TOKENIZER_FILES)}).")
    for name in found:
        shutil.copyfile(pathlib.Path(tokenizer) / name, directory / name)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _without_initialisation() -> contextlib.AbstractContextManager[Any]:
    """Skips the random initialisation, which takes longer than the loading; it moved within transformers."""
    for module in ("transformers.initialization", "transformers.modeling_utils"):
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(module).no_init_weights()
    return contextlib.nullcontext()
