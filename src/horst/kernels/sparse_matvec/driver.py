"""Launches of a compiled kernel by the CUDA driver, with little work on the host.

torch's own launcher of compiled source builds every argument anew and finds the driver again, which takes longer than a
small kernel runs. Here all but the addresses is built once. A launch may be programmatic: it then begins while the
kernel before it ends, and that kernel's outputs are read after ``griddepcontrol.wait`` alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)

# Of cuda.h.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
# The first driver (12.3) that captures programmatic launches into graphs.
_DRIVER_THAT_OVERLAPS = 12030
_SHARED_BYTES_WITHOUT_ASKING = 48 * 1024

# The device of the calling thread, and a device's current stream as a number: torch's public ways take a microsecond
# each. A torch without CUDA has neither.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
on_device = torch.cuda.device


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes whose first is the switch."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def library() -> Any:
    """NVIDIA's driver, which torch has loaded before."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def check(result: int) -> None:
    """Raise where a call of the driver failed."""
    if result:
        words = ctypes.c_char_p()
        library().cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError(f"the CUDA driver failed: {(words.value or b'').decode()} (error {result}).")


@functools.cache
def can_launch() -> bool:
    """Whether there is a driver, and it takes launches with attributes (11.8 and later)."""
    try:
        return hasattr(library(), "cuLaunchKernelEx")
    except OSError:
        return False


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether a launch may begin while the kernel before it ends: sm_90, driver 12.3 and later. The log says if not."""
    version, (major, _) = ctypes.c_int(), torch.cuda.get_device_capability(device)
    check(library().cuDriverGetVersion(ctypes.byref(version)))
    if major >= 9 and version.value >= _DRIVER_THAT_OVERLAPS:
        return True
    _log.info(
        "sparse layers on %s are launched one after the other: overlapping needs sm_90 and a driver for CUDA 12.3",
        torch.cuda.get_device_name(device),
    )
    return False


class Launcher:
    """One kernel with its grid and its numbers; a call gives the addresses.

    Args:
        function: The driver's handle of the kernel.
        grid: Blocks.
        threads: Threads per block.
        shared_bytes: Dynamic shared memory per block.
        addresses: How many addresses the kernel takes, before its numbers.
        numbers: The kernel's numbers, 32 bits each.
        overlap: Whether the kernel waits for the one before it by itself.
    """

    def __init__(
        self,
        function: int,
        *,
        grid: int,
        threads: int,
        shared_bytes: int,
        addresses: int,
        numbers: Sequence[int],
        overlap: bool,
    ) -> None:
        self._addresses, self._numbers = (ctypes.c_uint64 * addresses)(), (ctypes.c_int32 * len(numbers))(*numbers)
        self._write = struct.Struct(f"={addresses}Q").pack_into
        places = [ctypes.addressof(self._addresses) + 8 * k for k in range(addresses)]
        places += [ctypes.addressof(self._numbers) + 4 * k for k in range(len(numbers))]
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        attributes = (ctypes.pointer(self._attribute), 1) if overlap else (None, 0)
        self._config = _Config(grid, 1, 1, threads, 1, 1, shared_bytes, None, *attributes)
        self._arguments = (
            ctypes.byref(self._config),
            ctypes.c_void_p(function),
            (ctypes.c_void_p * len(places))(*places),
            None,
        )
        self._launch, self._lock = library().cuLaunchKernelEx, threading.Lock()
        if shared_bytes > _SHARED_BYTES_WITHOUT_ASKING:
            check(library().cuFuncSetAttribute(self._arguments[1], _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes))

    def __call__(self, stream: int, *addresses: int) -> None:
        """Launch on a stream, given as a number as torch does."""
        with self._lock:  # the arguments are this object's: another thread waits until the driver has read them
            self._write(self._addresses, 0, *addresses)
            self._config.stream = stream
            result = self._launch(*self._arguments)
        if result:
            check(result)
