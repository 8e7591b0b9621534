"""A stand-in for NVIDIA's driver on a CPU: it reads a launch as the driver does, and computes it by the reference."""

import contextlib
import ctypes
import types

import torch

from horst.kernels.sparse_matvec import SparseRows, driver, sparse_matvec_reference, staged


def _tensor(address, size, dtype):
    """The memory at an address."""
    return torch.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(address), dtype=dtype)


class StandInDriver:
    """What :mod:`horst.kernels.sparse_matvec.driver` calls, and the launches it has seen."""

    def __init__(self, computes=True):
        self.launches, self.computes, self.result = [], computes, 0

    def cuLaunchKernelEx(self, config, function, places, extra):
        if not self.computes:
            return 0
        config = config._obj
        attributes = [(config.attributes[k].id, config.attributes[k].value) for k in range(config.attribute_count)]
        self.launches.append(types.SimpleNamespace(config=config, function=function.value, attributes=attributes))
        x, words, starts, order, bias, y = (ctypes.c_uint64.from_address(place).value for place in places[:6])
        rows, width, tokens, has_bias = (ctypes.c_int32.from_address(place).value for place in places[6:])
        starts = _tensor(starts, rows + 1, torch.int32)
        size = 4 * int(starts[-1])
        columns = _tensor(words, size, torch.int32) if size else torch.zeros(0, dtype=torch.int32)
        matrix = SparseRows(
            columns, None, starts, _tensor(order, rows, torch.int32), None, (rows, width), torch.bfloat16
        )
        inputs = _tensor(x, tokens * width, torch.bfloat16).view(tokens, width)
        offsets = _tensor(bias, rows, torch.bfloat16) if has_bias else None
        _tensor(y, tokens * rows, torch.bfloat16).view(tokens, rows).copy_(
            sparse_matvec_reference(inputs, matrix, offsets)
        )
        return self.result

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attribute = (attribute, value)
        return 0

    def cuGetErrorString(self, result, words):
        words._obj.value = b"invalid argument"
        return 0


def install(monkeypatch, computes=True):
    """Make the staged kernel run on a CPU, in bfloat16, by a stand-in that is returned."""
    stand_in = StandInDriver(computes)
    monkeypatch.setattr(driver, "library", lambda: stand_in)
    monkeypatch.setattr(driver, "can_overlap", lambda device: True)
    monkeypatch.setattr(staged, "can_stage", lambda matrix: True)
    fits = (1, 2, 4, 8)
    monkeypatch.setattr(
        staged, "tokens_at_a_time", lambda width, device, tokens: fits[(min(tokens, 8) - 1).bit_length()]
    )
    monkeypatch.setattr(
        staged, "_compiled", lambda *settings: types.SimpleNamespace(func=types.SimpleNamespace(value=7))
    )
    monkeypatch.setattr(staged, "launcher", staged.launcher.__wrapped__)
    monkeypatch.setattr(driver, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(driver, "current_device", lambda: -1)
    monkeypatch.setattr(driver, "current_stream", lambda index: 0x1234)
    return stand_in
