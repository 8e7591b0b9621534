"""DeiT, the vision transformer of Tables 1, 3 and 4: timm's model from a config, what costs time on a GPU as fields.

The defaults are DeiT-small as the paper trains it. Parameters carry timm's names and shapes: weights go from timm's
``deit_*`` models to these and back through ``state_dict``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from horst.extras import load_extra
from horst.fields import option
from horst.lab.kernels.short_attention import MAX_HEAD_WIDTH, MAX_TOKENS, short_attention
from horst.lab.models.half_precision import GELU, AutocastPrecision, Residual

Attention = Literal["fused", "matmul", "short"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeiTConfig:
    """The shape of a DeiT, and how it is computed.

    Args:
        image_size: Side of an image, in pixels.
        patch_size: Side of a patch, in pixels.
        channels: Channels of the images.
        classes: Outputs of the head.
        width: Width of the residual stream.
        depth: Number of blocks.
        heads: Attention heads per block.
        mlp_ratio: Width of the hidden layer of a block's MLP, in units of ``width``.
        drop_path: Probability that the last block is skipped for a sample; that of the others rises linearly. DeiT's
            own recipe has 0.1. The paper does not state it; off, since dropping and pruning act on the same blocks.
        class_token: Whether the head reads a token of its own, as in DeiT. Without it the head reads the mean over the
            patches, and there are as many tokens as patches: 64 instead of 65 for 32 x 32 images in patches of 4, a
            multiple of the tiles that GPUs compute in.
        attention: Attention kernel. ``"fused"`` is PyTorch's ``scaled_dot_product_attention``; ``"matmul"`` writes the
            scores out for the compiler to fuse; ``"short"`` is a kernel for at most 128 tokens
            (:mod:`horst.lab.kernels.short_attention`). Only ``"matmul"`` has attention maps to look at.
        residual: Precision of the residual stream under autocast. ``"float32"`` is what adding float32 position
            embeddings gives; ``"autocast"`` is autocast's own, half the memory to move.

    Example:
        >>> config = DeiTConfig(image_size=32, patch_size=4, classes=10)
        >>> config.tokens, dataclasses.replace(config, class_token=False).tokens
        (65, 64)
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    classes: int = 1000
    width: int = 384
    depth: int = 12
    heads: int = 6
    mlp_ratio: float = 4.0
    drop_path: float = 0.0
    class_token: bool = True
    attention: Attention = option("fused", affects="execution")
    residual: Residual = "float32"

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "channels", "classes", "width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size, got {self.image_size} and {self.patch_size}."
            )
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")
        if not self.mlp_ratio > 0:
            raise ValueError(f"mlp_ratio must be positive, got {self.mlp_ratio}.")
        if not 0.0 <= self.drop_path < 1.0:
            raise ValueError(f"drop_path must lie in [0, 1), got {self.drop_path}.")
        for name, allowed in (("attention", get_args(Attention)), ("residual", get_args(Residual))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.attention == "short" and (self.tokens > MAX_TOKENS or self.width // self.heads > MAX_HEAD_WIDTH):
            raise ValueError(
                f"attention='short' is for at most {MAX_TOKENS} tokens and heads at most {MAX_HEAD_WIDTH} wide, got "
                f"{self.tokens} and {self.width // self.heads}. Use 'fused'."
            )

    @property
    def tokens(self) -> int:
        """How many the transformer sees: patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + self.class_token


def build_deit(config: DeiTConfig) -> nn.Module:
    """timm's ``VisionTransformer`` for a config, newly initialised from torch's global generator.

    Args:
        config: Shape of the model.

    Example:
        >>> import torch
        >>> config = DeiTConfig(image_size=8, patch_size=2, channels=1, classes=10, width=16, depth=2, heads=2)
        >>> build_deit(config)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """
    model = load_extra("timm.models.vision_transformer").VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.channels,
        num_classes=config.classes,
        global_pool="token" if config.class_token else "avg",
        class_token=config.class_token,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        drop_path_rate=config.drop_path,
        act_layer=GELU,
    )
    model.patch_embed.proj = PatchConv2d.from_conv(model.patch_embed.proj)
    for block in model.blocks:
        block.attn.fused_attn = config.attention == "fused"  # else timm's environment variable decides
        if config.attention == "short":
            block.attn = ShortAttention(block.attn)
    if config.residual == "autocast":
        model.norm_pre = AutocastPrecision()  # between the position embeddings and the blocks; DeiT has no norm there
    return model


class ShortAttention(nn.Module):
    """timm's attention over few tokens, by :func:`horst.lab.kernels.short_attention.short_attention`.

    Args:
        attention: timm's module, whose projections are taken over, not copied. One with norms, dropout or a gate,
            which DeiT does not have, is refused.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name in ("q_norm", "k_norm", "norm", "gate", "attn_drop", "proj_drop"):  # timm's versions have some of them
            part = getattr(attention, name, None)
            if not (part is None or isinstance(part, nn.Identity) or getattr(part, "p", None) == 0.0):
                raise ValueError(
                    f"attention='short' has no norms, dropout or gate, got {name}={part}. Use attention='fused'."
                )
        self.qkv, self.proj, self.num_heads = attention.qkv, attention.proj, attention.num_heads

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """``(batch, tokens, width)`` to the same. The arguments are timm's; every token sees every other."""
        if attn_mask is not None or is_causal:
            raise ValueError("attention='short' has no masks. Use attention='fused'.")
        return self.proj(short_attention(self.qkv(x), self.num_heads))


class PatchConv2d(nn.Conv2d):
    """A convolution whose stride is its kernel, computed as one matrix product.

    The patches do not overlap, so the two are the same sum. As a matrix product it needs no convolution kernel for
    three channels, its gradient is a matrix product too, and the compiler sees through it.

    Example:
        >>> import torch
        >>> conv = nn.Conv2d(3, 8, kernel_size=4, stride=4)
        >>> x = torch.rand(2, 3, 8, 8)
        >>> torch.allclose(PatchConv2d.from_conv(conv)(x), conv(x), atol=1e-6)
        True
    """

    @classmethod
    def from_conv(cls, conv: nn.Conv2d) -> PatchConv2d:
        """The same layer, with the same parameters: not copies."""
        assert conv.stride == conv.kernel_size, "patches must not overlap"
        patch = cls(
            conv.in_channels,
            conv.out_channels,
            kernel_size=(conv.kernel_size[0], conv.kernel_size[1]),
            stride=(conv.stride[0], conv.stride[1]),
            bias=conv.bias is not None,
            device="meta",  # takes no memory and draws no numbers
        )
        patch.weight, patch.bias = conv.weight, conv.bias
        return patch

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` to ``(batch, out channels, patches down, patches across)``."""
        batch, channels, height, width = x.shape
        kernel_height, kernel_width = self.kernel_size
        down, across = height // kernel_height, width // kernel_width
        patches = x.reshape(batch, channels, down, kernel_height, across, kernel_width).permute(0, 2, 4, 1, 3, 5)
        tokens = F.linear(patches.reshape(batch, down * across, -1), self.weight.flatten(1), self.bias)
        return tokens.transpose(1, 2).unflatten(2, (down, across))
