"""Pruned models saved in compressed formats, loaded, and run sparse."""

from horst.export.comparison import Comparison, compare
from horst.export.generation import Decoder, generate
from horst.export.hf import load_pretrained, save_hugging_face
from horst.export.int8_head import Int8Embedding, Int8Linear, quantize_head
from horst.export.onnx import export_onnx
from horst.export.plan import Plan
from horst.export.semi_structured import is_two_four, to_semi_structured
from horst.export.sparse_linear import SparseLinear, plan_for, sparsify
from horst.export.sparse_safetensors import load_sparse, read_layout, read_metadata, read_parts, save_sparse
from horst.export.stored_tensor import StoredTensor
from horst.files import InvalidFileError

__all__ = [
    "Comparison",
    "Decoder",
    "Int8Embedding",
    "Int8Linear",
    "InvalidFileError",
    "Plan",
    "SparseLinear",
    "StoredTensor",
    "compare",
    "export_onnx",
    "generate",
    "is_two_four",
    "load_pretrained",
    "load_sparse",
    "plan_for",
    "quantize_head",
    "read_layout",
    "read_metadata",
    "read_parts",
    "save_hugging_face",
    "save_sparse",
    "sparsify",
    "to_semi_structured",
]
