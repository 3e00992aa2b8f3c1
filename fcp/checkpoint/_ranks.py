"""The processes that share a checkpoint: what fails on one is raised on all, in the same words.

A rank that raises by itself, before the others have come to the next collective, leaves them waiting. So whatever may
fail on one rank alone (a disk, a file, a leaf) is done between two exchanges, and the exchange says what became of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fcp._process import group_of
from fcp._transformed import Transformed
from fcp._watch import collective
from fcp.checkpoint._folder import DamagedError

__all__ = ["Ranks"]


@dataclass(frozen=True)
class Ranks:
    """The processes that share a checkpoint; one, where one process holds every rank's part."""

    number: int
    count: int
    sizes: dict[str, int]
    mesh: Any = None

    @classmethod
    def of(cls, sharded: Transformed) -> "Ranks":
        if not isinstance(sharded, Transformed):
            raise ValueError(f"checkpoint: {sharded!r} is no transformed function; give fcp.transform(model, ...)")
        sizes = {name: int(size) for name, size in sharded.axes.items()}
        if sharded.mesh is None or not sharded.axes:
            return cls(0, 1, sizes)
        group = group_of(sharded.mesh, tuple(sharded.mesh.mesh_dim_names))
        return cls(dist.get_rank(group), dist.get_world_size(group), sizes, sharded.mesh)

    def together(self, what: str, fn: Callable[[], Any]) -> list[Any]:
        """What `fn` gives on every rank; what it raises on one, the first, is raised on all."""
        value, failure = None, None
        try:
            value = fn()
        except Exception as error:
            failure = error
        told: list[Any] = [(value, None if failure is None else _kind_and_words(failure))]
        if self.mesh is not None:
            names = tuple(self.mesh.mesh_dim_names)
            mine, told = told[0], [None] * self.count
            with collective(what, names):
                dist.all_gather_object(told, mine, group=group_of(self.mesh, names))
        for rank, (_, said) in enumerate(told):
            if said is not None:
                kind, words = said
                if kind is RuntimeError:
                    words = f"{what}: {words}" if self.mesh is None else f"{what}: rank {rank}: {words}"
                raise kind(words) from failure
        return [value for value, _ in told]


def _kind_and_words(failure: Exception) -> tuple[type[Exception], str]:
    """As what an error is raised on every rank: a caller's as it is, any other as a RuntimeError."""
    for kind in (DamagedError, ValueError):
        if isinstance(failure, kind):
            return kind, str(failure)
    return RuntimeError, f"{type(failure).__name__}: {failure}"
