"""Model: a frozen record that is itself a model function.

A family's file under `models/` builds one: the pure function `apply`, a deterministic `init`, the sharding `rules` of
its parameters and the `config` they were made for. `model(params, batch)` calls `apply` on the prepared batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fcp import pytree
from fcp._prepare import prepare
from fcp.axes import bare
from fcp.ops import LOCAL, Ops
from fcp.typing import Inputs, Output, Params

__all__ = ["Model", "dropouts"]


def dropouts(config: Any) -> dict[str, float]:
    """The dropouts above zero, whatever a config calls them (attention_dropout, resid_pdrop, ...).

    Those of classification heads are no part of the model.
    """
    return {
        name: value
        for name in dir(config)
        if "drop" in name
        and not name.startswith(("_", "classifier", "summary"))
        and type(value := getattr(config, name)) in (int, float)
        and value > 0
    }


@dataclass(frozen=True)
class Model:
    """A model function with what belongs to it.

    Attributes:
        config: the family's Config; its fields carry config.json's names.
        apply: the pure function (params, Inputs, Ops) -> Output.
        init: seed -> parameters, nested as a checkpoint names them; float32 unless `dtype=` says otherwise.
        rules: how each leaf may be split over a tensor-parallel axis, by path pattern. Every leaf matches exactly one.
            None: nobody said.
        prove: raises ValueError unless each position outside attention stands for itself; asked before the sequence is
            split. None: the function's author vouches for it.
        num_positions: the rows of its table of learned positions, where it has one: a batch that goes past it is
            refused.
    """

    config: Any
    apply: Callable[[Params, Inputs, Ops], Output] = field(repr=False)
    init: Callable[..., Params] = field(repr=False)
    rules: Any = field(repr=False)  # Rules | None, left unchecked: to peek into a lazy one would make it prove its plan
    prove: Callable[[], None] | None = field(default=None, repr=False)
    num_positions: int | None = field(default=None, repr=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every leaf, by path, of the parameters that `init` gives; none of them is made."""
        with FakeTensorMode():
            return pytree.shapes(self.init(seed=0))

    def __call__(self, params: Params, inputs: Inputs | Mapping[str, Any], ops: Ops = LOCAL) -> Output:
        prepared = prepare(inputs)
        self._check_positions(prepared)
        return self.apply(params, prepared, ops)

    def _check_positions(self, inputs: Inputs) -> None:
        """Raises ValueError past the table. The count is that of the whole batch, so every rank raises alike."""
        reached = bare(inputs.num_positions)
        if self.num_positions is None or isinstance(reached, FakeTensor) or get_proxy_mode() is not None:
            return  # where a trace stands for the values there is nothing to read
        with temporarily_clear_interpreter_stack():
            found = int(reached.max())
        if found > self.num_positions:
            raise ValueError(
                f"model: position_ids go up to {found - 1}, and this model has learned {self.num_positions} positions, "
                f"0 to {self.num_positions - 1}. Give shorter rows, or position_ids that start again in each document."
            )
