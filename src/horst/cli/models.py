"""A model by its path, for every command that takes one, and written back in the same form.

A path is a directory: one of Hugging Face's or of timm's (``config.json`` with ``model.safetensors``, or with
``model.sparse.safetensors`` as ``horst export`` writes it), or that of a finished run of ours (``outcome.json`` with
``checkpoints/``). Weights are never read from pickles, and no code in a directory is run.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horst.cli.output import nearest
from horst.export.hf import DENSE_FILE, SPARSE_FILE, check_blocks, copy_side_files, load_pretrained, save_hugging_face
from horst.export.safetensors_header import read_header, shorten
from horst.export.sparse_safetensors import load_sparse, save_sparse
from horst.extras import load_extra
from horst.files import InvalidFileError, path_inside, read_json, whole_directory, write_json
from horst.recovery.data import longest_text

if TYPE_CHECKING:
    import torch
    from torch import nn

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
# Arguments of timm.create_model that would make it fetch or load something.
_LOADING = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "features_only")


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and what is known of it.

    Args:
        model: The model, on the CPU, in evaluation mode.
        path: Directory that it was loaded from.
        reads: Kind of its inputs.
        timm_config: Content of ``config.json`` of a timm model; None for other models.
    """

    model: nn.Module
    path: Path
    reads: Literal["text", "images"]
    timm_config: dict[str, Any] | None = None

    @property
    def has_tokenizer(self) -> bool:
        """Whether there are files of a tokenizer beside the weights."""
        return any((self.path / name).is_file() for name in _VOCABULARIES)

    @property
    def is_transformers(self) -> bool:
        """Whether it is one of transformers' classes."""
        return hasattr(self.model, "get_input_embeddings")

    @property
    def vocabulary(self) -> int:
        """Number of tokens that a text model knows."""
        model: Any = self.model
        return model.get_input_embeddings().num_embeddings if self.is_transformers else model.config.vocabulary

    @property
    def longest(self) -> int | None:
        """Largest number of tokens that a text model takes; None where its config does not say."""
        model: Any = self.model
        return longest_text(model) if self.is_transformers else int(model.config.context)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that an image model takes."""
        model: Any = self.model
        if self.is_transformers:
            side = model.config.image_size
            height, width = side if isinstance(side, (list, tuple)) else (side, side)
            return model.config.num_channels, height, width
        patches = getattr(model, "patch_embed", None)
        if getattr(patches, "img_size", None):
            return (patches.proj.in_channels, *patches.img_size)  # type: ignore[union-attr]
        channels, height, width = model.pretrained_cfg["input_size"]
        return channels, height, width

    @property
    def classes(self) -> int:
        """Number of classes of an image model."""
        model: Any = self.model
        return int(model.config.num_labels if self.is_transformers else model.num_classes)

    @property
    def pixel_statistics(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation per channel, for pixels in [0, 1], that an image model expects, if known."""
        if self.timm_config is not None:
            known = self.timm_config.get("pretrained_cfg", {})
            mean, std = known.get("mean"), known.get("std")
        elif (self.path / "preprocessor_config.json").is_file():
            known = read_json(self.path / "preprocessor_config.json")
            mean, std = known.get("image_mean"), known.get("image_std")
        else:
            return None
        return (mean, std) if mean and std else None

    @property
    def zeros(self) -> float:
        """Share of all weights that are zero."""
        weights = list(self.model.parameters())
        zeros = sum(p.numel() - int(p.count_nonzero()) for p in weights)
        return zeros / sum(p.numel() for p in weights)

    def how_to_load(self, directory: Path) -> str:
        """A line for people: what reads the sparse file that :meth:`save` wrote."""
        if self.timm_config is None:
            return f'Load it with horst.export.load_pretrained("{directory}"); transformers does not read it.'
        return f'Load it with horst.export.load_sparse("{directory / SPARSE_FILE}", model); timm does not read it.'

    def save(self, directory: Path, *, sparse: bool = False, **few_bits: Any) -> None:
        """Write it as a directory that :func:`load_model` reads, whole or not at all.

        Args:
            directory: Directory to make.
            sparse: Whether to write the weights as sparse safetensors.
            **few_bits: ``values``, ``head_values`` and ``group_size`` of :func:`horst.export.save_sparse`.
        """
        if self.timm_config is None:
            tokenizer = self.path if self.has_tokenizer else None
            save_hugging_face(self.model, directory, sparse=sparse, tokenizer=tokenizer, **few_bits)
        else:
            with whole_directory(directory) as temporary:
                write_json(temporary / "config.json", self.timm_config)
                if sparse:
                    save_sparse(self.model, temporary / SPARSE_FILE, **few_bits)
                else:
                    state = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
                    load_extra("safetensors.torch").save_file(state, temporary / DENSE_FILE, {"format": "pt"})
        self.copy_side_files(directory)

    def copy_side_files(self, directory: Path) -> None:
        """Copy what else lies beside the weights, unless they are those of a run of ours."""
        if (self.path / "config.json").is_file():
            copy_side_files(self.path, directory)


def load_model(path: Path) -> LoadedModel:
    """Load the model at ``path``.

    Raises:
        FileNotFoundError: There is nothing.
        InvalidFileError: It is no model, is damaged, or would have to be unpickled.
    """
    if not path.exists():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        is_name = path.name == str(path) or not path.parent.is_dir()  # gpt2, owner/name
        fetch = (
            " Fetch a model of the Hugging Face Hub first, with the tool of huggingface_hub: "
            f"hf download {path} --local-dir {path.name}"
        )
        fetch = fetch if is_name and not near and re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", str(path)) else ""
        raise FileNotFoundError(f"there is no model {path}.{near} A model is a directory.{fetch}")
    if not path.is_dir():
        raise InvalidFileError(
            f"{path} is a file; a model is a directory with config.json and model.safetensors, or that of a finished "
            "run. Files of weights alone, pickles (.bin, .pt) among them, are not loaded."
        )
    try:
        if (path / "config.json").is_file():
            content = read_json(path_inside(path, "config.json"))
            loaded = _load_timm(path, content) if "architecture" in content else _load_transformers(path)
        else:
            loaded = _load_run(path)
    except (OSError, ValueError, ImportError, RuntimeError):
        raise
    except Exception as error:  # whatever a library makes of a config that was tampered with
        raise InvalidFileError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    loaded.model.eval()
    return loaded


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or the GPU where there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = {
        "cpu": lambda: 1,
        "cuda": torch.cuda.device_count,
        "xpu": torch.xpu.device_count,
        "mps": lambda: int(torch.backends.mps.is_available()),
    }
    kind, _, index = name.partition(":")
    if kind not in kinds or (":" in name and not index.isdecimal()):
        raise ValueError(f"--device must be one of {', '.join(kinds)}, or such as cuda:1, got {name!r}.")
    count = kinds[kind]()
    if int(index or 0) >= count:
        raise ValueError(f"--device {name}: this machine has {count} devices of that kind. Use --device cpu.")
    return torch.device(name)


def _load_transformers(path: Path) -> LoadedModel:
    load_extra("transformers.utils.logging").disable_progress_bar()
    model = load_pretrained(path)
    inputs = {"input_ids": "text", "pixel_values": "images"}
    if model.main_input_name not in inputs:
        raise InvalidFileError(
            f"{path} holds a {type(model).__name__}, which reads {model.main_input_name}; models of text and of images "
            "can be used here."
        )
    return LoadedModel(model, path, inputs[model.main_input_name])  # type: ignore[arg-type]


def _load_timm(path: Path, config: dict[str, Any]) -> LoadedModel:
    model = _build_timm(path, config)
    if (path / SPARSE_FILE).exists():
        weights = load_sparse(path_inside(path, SPARSE_FILE))
    elif (path / DENSE_FILE).exists():
        file = path_inside(path, DENSE_FILE)
        with open(file, "rb") as opened:
            read_header(opened, file)
        weights = load_extra("safetensors.torch").load_file(file)
    else:
        raise InvalidFileError(f"{path} has neither {DENSE_FILE} nor {SPARSE_FILE}; pickles are never loaded.")
    # timm's save_for_hf leaves model_args out unless it is given them: then these are not the model's weights.
    shapes = [{name: tuple(tensor.shape) for name, tensor in part.items()} for part in (model.state_dict(), weights)]
    if wrong := [name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name)]:
        wrong.sort(key=lambda name: name in shapes[0] and name in shapes[1])  # what one of them lacks says most
        raise InvalidFileError(
            f"the weights of {path} are not those of the {config['architecture']} that its config.json describes; they "
            f"differ in {shorten(wrong)}. Add model_args to config.json, the arguments that the model was made with, "
            'such as "model_args": {"depth": 2}, or give them to timm.models.save_for_hf.'
        )
    model.load_state_dict(weights)
    return LoadedModel(model, path, "images", config)


def _build_timm(path: Path, config: dict[str, Any]) -> nn.Module:
    timm = load_extra("timm")
    name, arguments = config["architecture"], config.get("model_args", {})
    if not (isinstance(name, str) and timm.is_model(name)):
        raise InvalidFileError(
            f"config.json of {path} names the architecture {name!r}, which timm {timm.__version__} does not have."
        )
    if not isinstance(arguments, dict) or (forbidden := sorted(arguments.keys() & set(_LOADING))):
        raise InvalidFileError(f"model_args of {path} must build a model and load nothing, got {forbidden}.")
    check_blocks(arguments, path)
    classes = {"num_classes": config["num_classes"]} if "num_classes" in config else {}
    model: nn.Module = timm.create_model(name, pretrained=False, **{**classes, **arguments})
    return model


def _load_run(path: Path) -> LoadedModel:
    """A run of ours: what was trained stands in ``outcome.json``, the weights in the newest checkpoint."""
    from horst.lab.models.gpt2 import GPT2, GPT2Config
    from horst.training.checkpoint import find_checkpoint, trained_weights
    from horst.training.run_state import load_tensors, named_tensors

    if not (path / "outcome.json").is_file():
        raise InvalidFileError(
            f"{path} is no model: it has neither config.json (Hugging Face, timm) nor outcome.json with checkpoints (a "
            "finished run of ours that kept checkpoints)."
        )
    step = find_checkpoint(path)
    if step is None:
        raise InvalidFileError(
            f"{path} is a finished run that kept no checkpoint. Run its recipe again with --checkpoint-every (in steps "
            "for language models, in epochs for image models) and --overwrite."
        )
    outcome = read_json(path / "outcome.json")
    config = outcome.get("config", {})
    shape = config.get("run", config).get("model", {})
    check_blocks(shape, path)
    model: nn.Module
    if "vocabulary" in shape:
        model = GPT2(GPT2Config(**shape))
        loaded = LoadedModel(model, path, "text")
    else:
        timm_config = _timm_config_of_deit(shape)
        model = _build_timm(path, timm_config)
        loaded = LoadedModel(model, path, "images", timm_config)
    load_tensors(named_tensors(model), trained_weights(step))
    return loaded


def _timm_config_of_deit(shape: dict[str, Any]) -> dict[str, Any]:
    from horst.lab.models.deit import DeiTConfig

    config = DeiTConfig(**shape)
    return {
        "architecture": "deit_small_patch16_224",
        "num_classes": config.classes,
        "model_args": {
            "img_size": config.image_size,
            "patch_size": config.patch_size,
            "in_chans": config.channels,
            "global_pool": "token" if config.class_token else "avg",
            "class_token": config.class_token,
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": config.mlp_ratio,
        },
    }
