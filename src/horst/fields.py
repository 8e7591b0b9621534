"""What makes a run the same: said once, in the metadata of its config's fields.

A field is made with :func:`option` where it does not decide what a run computes, or where only some optimizers read it.
Checkpoints, outcomes and reports all ask :func:`settings` and :func:`names`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterator
from typing import Any, Literal

__all__ = ["Affects", "names", "option", "settings"]

#: ``result``: the numbers. ``execution``: speed, memory, how often a run is evaluated and saved; it may change when a
#: run is resumed. ``rows``: which runs a table has. ``nothing``: neither the numbers nor the files that a run leaves.
Affects = Literal["result", "execution", "rows", "nothing"]


def option(default: Any, *, affects: Affects = "result", read_by: Collection[str] = ()) -> Any:
    """A field of a config with its default.

    Args:
        affects: What another value changes.
        read_by: Optimizers of a table that read the field; empty for all.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Config:
        ...     steps: int = 10
        ...     workers: int = option(8, affects="nothing")
        ...     alpha: float = option(5.0, read_by=("horst",))
        >>> settings(Config(), without=("nothing",)), settings(Config(), without=("nothing",), reader="adamw")
        ({'steps': 10, 'alpha': 5.0}, {'steps': 10})
    """
    return dataclasses.field(default=default, metadata={"affects": affects, "read_by": tuple(read_by)})


def settings(config: Any, *, without: Collection[Affects] = (), reader: str | None = None) -> dict[str, Any]:
    """A config's fields as nested dictionaries, less those that do not matter.

    Args:
        config: A dataclass, whose fields may be dataclasses.
        without: Fields that affect one of these are left out.
        reader: An optimizer; fields that only others read are left out.
    """
    found = {}
    for field in dataclasses.fields(config):
        read_by = field.metadata.get("read_by") or (reader,)
        if field.metadata.get("affects", "result") in without or (reader is not None and reader not in read_by):
            continue
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        found[field.name] = settings(value, without=without, reader=reader) if nested else value
    return found


def names(*kinds: type, affects: Collection[Affects]) -> frozenset[str]:
    """The names of all fields of dataclasses, and of the dataclasses in them, that affect one of ``affects``."""
    return frozenset(field.name for field in _fields(kinds) if field.metadata.get("affects", "result") in affects)


def _fields(kinds: Collection[type]) -> Iterator[dataclasses.Field[Any]]:
    for kind in kinds:
        types = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield field
            if dataclasses.is_dataclass(types[field.name]):
                yield from _fields([types[field.name]])
