"""Transformed: what `fcp.transform` gives, a model function bound to its ranks.

Called, it is the model function again: global parameters and batch in, global loss and logits out, the ranks simulated
or real processes. On processes it also runs on *shards*, each rank's own part of every parameter (`_shards.py`): cut
them, compute from them, put them together again.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from fcp import _shards, pytree
from fcp._agree import agree
from fcp._distribute import distribute
from fcp._layout import part_of
from fcp._prepare import prepare
from fcp._simulate import simulate
from fcp.axes import Axis, bind
from fcp.ops import LOCAL, Ops
from fcp.sharded import Placement, Shapes, Sharded, base_model, mark_varying
from fcp.typing import Inputs, ModelFn, Output, Params

__all__ = ["Transformed"]


@dataclass(frozen=True)
class Transformed:
    """A transformed model function: (params, batch) -> Output, global in and global out.

    Attributes:
        model_fn: the composed function, its axes still to be bound.
        axes: axis name to number of ranks, outermost first; axes of one rank are left out.
        mesh: the DeviceMesh whose processes are the ranks; None where they are simulated.
        own: the axes whose ranks are each handed their own rows of the batch.
        why: what was compared to choose the way to attend across slices, where it was left to cp_impl="auto".
    """

    model_fn: ModelFn
    axes: Mapping[str, int]
    mesh: Any = None
    own: tuple[str, ...] = ()
    why: str = ""

    def __call__(self, params: Params, inputs: Inputs | Mapping[str, Any], ops: Ops = LOCAL) -> Output:
        prepared = prepare(inputs)
        if not self.axes:
            return self.model_fn(params, prepared, ops)
        if self.mesh is not None:
            prepared = self._agreed(params, inputs, prepared)
            return distribute(self.model_fn, self.mesh)(params, prepared, ops)
        return simulate(self.model_fn, **self.axes)(params, prepared, ops)

    def on_shards(
        self,
        shards: Params,
        inputs: Inputs | Mapping[str, Any],
        ops: Ops = LOCAL,
        *,
        micro_batch: tuple[int, int] = (0, 1),
    ) -> Output:
        """The same function of this rank's shards: the parameters are whole in no process.

        Its `torch.func.grad` and `fcp.value_and_grad` give the gradient of each shard: the whole gradient's part.

        Args:
            shards: what `shard` gives.
            inputs: as for the function itself.
            ops: as for the function itself.
            micro_batch: which micro-batch of a step the inputs are, and of how many; all ranks must say the same.

        Raises:
            ValueError: the shards are not this rank's parts of the model's parameters (every leaf is named); the
                model is a plain function, which knows no shapes; or the ranks were handed what is not one step's.
        """
        if not self._split:
            return self(shards, inputs, ops)
        laid = _shards.lay(shards, self._placements, self._shapes, self.mesh)
        prepared = self._agreed(shards, inputs, prepare(inputs), micro_batch)

        def run(laid: Params, prepared: Inputs, ops: Ops) -> Output:
            return self._sharded.on_local(mark_varying(laid, self._placements), prepared, ops)

        return distribute(run, self.mesh)(laid, prepared, ops)

    def shard(self, params: Params) -> Params:
        """This rank's shard of every parameter: the same tree, its leaves the parts that this rank keeps.

        Args:
            params: the whole parameters, the same on every rank; tensors, or what stands for one in a file and reads
                the slices that are asked for (`models.llama.load(folder, lazy=True)`).

        Returns:
            Tensors in memory of their own. In the simulator, where one process holds every rank's part, the parameters
            themselves (read, where they were in a file).
        """
        if not self._split:
            return pytree.map(lambda x: x if isinstance(x, Tensor) else x[...], params)
        return _shards.cut(params, self._placements_for(pytree.shapes(params)), self.mesh)

    def unshard(self, shards: Params, *, to: int | None = None) -> Params | None:
        """The whole parameters, put together from every rank's shards, leaf by leaf, bit for bit.

        Args:
            shards: what `shard` gives, or the like: an optimizer's moments, gradients.
            to: the one rank of the world that gets them, to write a checkpoint, say; the others get None. By default
                every rank does.

        Raises:
            ValueError: the shards are not this rank's parts of the model's parameters, or `to` is no rank.
        """
        if not self._split:
            return shards
        return _shards.join(shards, self._placements, self._shapes, self.mesh, to)

    def to_dtensor(self, shards: Params) -> Params:
        """The shards as torch's DTensors over the mesh, for torch's own tools.

        A shard that torch would lay out in the same way is used as it is; another one's rows move.

        Raises:
            ValueError: the ranks are simulated; or as for `unshard`.
        """
        return _shards.to_dtensors(shards, *self._on_mesh("to_dtensor"))

    def from_dtensor(self, dtensors: Params) -> Params:
        """This rank's shards of DTensors over the mesh, however they lie over it; the inverse of `to_dtensor`.

        Raises:
            ValueError: the ranks are simulated, or the leaves are not the model's parameters.
        """
        return _shards.from_dtensors(dtensors, *self._on_mesh("from_dtensor"))

    def norm(self, shards: Params, order: float = 2.0) -> Tensor:
        """The norm over every entry of the parameters' whole leaves, float64, the same on every rank.

        An entry counts once, whether its leaf is cut, stored in pieces, replicated or an expert's. A NaN or an infinity
        on any rank makes it NaN or infinite on all.

        Args:
            shards: gradients, or whatever else lies like what `shard` gives.
            order: 2, another positive number, or infinity.

        Raises:
            ValueError: `order` is not positive, or the shards are not this rank's.
        """
        if not order > 0:
            raise ValueError(f"norm: order={order!r} must be a positive number, or infinity")
        if self._split:
            return _shards.norm(shards, self._placements, self._shapes, self.mesh, order)
        found = _shards.together([_shards.power_of(x, order) for x in pytree.leaves(shards)], order)
        return found if order == math.inf else found ** (1 / order)

    def divided(self) -> list[str]:
        """The paths of the leaves of which a process holds a part alone; in the simulator none."""
        if not self._split:
            return []
        return [path for path, p in self._placements.items() if p.stored or p.slices]

    def held(self, shapes: Shapes | None = None) -> Mapping[str, _shards.Held]:
        """What this rank holds of every parameter, by path: the whole of it where one process holds every rank's part.

        Args:
            shapes: of the parameters, where one process holds them whole. None, and on several processes: those of the
                model's `init`.

        Raises:
            ValueError: the model is a plain function, which knows no shapes, and they are needed.
        """
        if self._split:
            return _shards.held(self._placements, self._shapes, self.mesh)
        shapes = self._shapes if shapes is None else shapes
        return {path: _shards.Held(shape, part_of(shape, Placement(), {}, {})) for path, shape in shapes.items()}

    def _on_mesh(self, user: str) -> tuple[Mapping[str, Placement], Shapes, Any]:
        if not self._split:
            raise ValueError(f"{user}: no process holds a shard here; give transform a mesh, with an axis of 2 or more")
        return self._placements, self._shapes, self.mesh

    @property
    def _split(self) -> bool:
        return self.mesh is not None and bool(self.axes)

    @property
    def _sharded(self) -> Sharded:
        return cast(Sharded, self.model_fn)

    def _agreed(self, params: Params, given: Any, prepared: Inputs, micro_batch: tuple[int, int] = (0, 1)) -> Inputs:
        counted = isinstance(given, Inputs) or given.get("num_items_in_batch") is None
        return agree(
            self.mesh,
            params,
            prepared,
            what=self._what,
            own=self.own,
            counted=counted,
            micro_batch=micro_batch,
        )

    @property
    def _what(self) -> str:
        dims = {name: self.mesh.size(dim) for dim, name in enumerate(self.mesh.mesh_dim_names)}
        return f"{self.applied} {self.own} {dims}"

    @cached_property
    def _shapes(self) -> Shapes:
        model: Any = base_model(self.model_fn)
        if not hasattr(model, "shapes"):
            raise ValueError(
                f"transform: {model!r} is a plain function, and its shards do not say how large the parameters are. "
                f"Wrap it as fcp.Model(config, apply, init, rules), whose init does."
            )
        return model.shapes()

    @cached_property
    def _placements(self) -> Mapping[str, Placement]:
        return self._placements_for(self._shapes)

    def _placements_for(self, shapes: Shapes) -> Mapping[str, Placement]:
        with contextlib.ExitStack() as stack:
            for name, size in self.axes.items():  # their sizes are asked for, no rank
                stack.enter_context(bind(Axis(name, size)))
            return self._sharded.placements(shapes)

    @property
    def applied(self) -> tuple[str, ...]:
        """The transforms that were applied, innermost first."""
        return self.model_fn.applied if isinstance(self.model_fn, Sharded) else ()

    @property
    def config(self) -> Any:
        return getattr(base_model(self.model_fn), "config", None)

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes.items()) or "one rank"
        return f"Transformed({mesh}: {' . '.join(reversed(self.applied)) or 'as it is'})"
