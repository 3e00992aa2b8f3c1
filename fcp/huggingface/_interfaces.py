"""What arrives at transformers' attention, mask and experts interfaces, said in fcp's words.

transformers lets an attention, a mask and a way to compute experts be registered under a name, and a configuration
choose it. Under the name "fcp" three functions are registered, once and for good; the private copies that `functional`
makes choose it, nobody else does. What they do is decided by the call under way (`Call`, a context variable): without
one they refuse.

The mask function is asked for its window or chunk (`_window.py`) and hands the layer an `Opaque` that holds those two
numbers in the place of a tensor. Nothing can be computed with it: a module that adds a bias to its mask, or slices it,
is refused at that line, where a placeholder tensor would have swallowed what it added. The attention function takes
the Opaque back and calls `Ops.attention` with the mask of the whole sequence.

Every argument of the attention call is one of three: known and passed on, known to mean nothing here, or refused by
name. None is swallowed.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcp._grouped import Project
from fcp.huggingface._window import words_of
from fcp.masks import Mask
from fcp.ops import Ops
from fcp.typing import Params

__all__ = [
    "NAME",
    "Call",
    "Opaque",
    "attend",
    "bound_call",
    "choose_experts",
    "current",
    "describe_mask",
    "kept_modes",
    "register",
]

NAME = "fcp"


@dataclass(frozen=True)
class Call:
    """One call of a model under way.

    Attributes:
        ops: what the transforms provide.
        mask: of the whole sequence.
        positions: [batch, seq_local], what embeddings of positions read in the place of those that the module counts;
            None lets it count.
        units: the parameters of each unit (a decoder layer, an embedding, ...), by its path.
        unit: the path of the unit that is running, None between units.
        seen: told of every attention call as (module, q, k, v); None where nobody listens.
    """

    ops: Ops
    mask: Mask
    positions: Tensor | None = None
    units: Mapping[str, Params] = field(default_factory=dict)
    unit: str | None = None
    seen: Callable[[Any, Tensor, Tensor, Tensor], None] | None = None


_call: ContextVar[Call | None] = ContextVar("fcp_huggingface_call", default=None)


def current() -> Call | None:
    """The call under way here."""
    return _call.get()


def _required() -> Call:
    call = _call.get()
    if call is None:
        raise ValueError(
            f"huggingface: attn_implementation={NAME!r} is chosen by fcp.huggingface.functional for its own copy of a "
            f"module, and serves no other; choose 'sdpa' or 'eager'"
        )
    return call


@contextlib.contextmanager
def bound_call(call: Call) -> Iterator[Call]:
    """Makes it the call under way. A module's operations that vmap does one rank at a time are no news there."""
    token = _call.set(call)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            yield call
    finally:
        _call.reset(token)


def kept_modes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under the torch function modes that are active now, wherever it is called.

    torch turns them off inside a Function that is under a transform, which is where layers are computed again and
    where experts run; a module's code has to see them there as well.
    """
    modes = _modes()

    def run(*args: Any, **kwargs: Any) -> Any:
        active = _modes()
        with contextlib.ExitStack() as stack:
            for mode in modes:
                if not any(mode is each for each in active):
                    stack.enter_context(mode)
            return fn(*args, **kwargs)

    return run


_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack  # pyright: ignore[reportAttributeAccessIssue]


class Opaque:
    """A layer's mask: its window or chunk, and nothing that could be computed with.

    `shape` is what the tensor's would be here. `refusal` is why a mask cannot be said in these words; models build some
    that no layer uses, so it is raised where one attends with it.
    """

    def __init__(
        self,
        window: int | None = None,
        chunk: int | None = None,
        refusal: str | None = None,
        shape: tuple[int, ...] = (),
    ) -> None:
        self.window, self.chunk, self.refusal, self.shape = window, chunk, refusal, torch.Size(shape)

    def size(self) -> torch.Size:
        return self.shape

    def narrowed(self, window: int) -> "Opaque":
        """The same mask with a window, where it has none."""
        if self.window is not None:
            raise ValueError(f"huggingface: a mask with a window of {self.window} and one of {window}")
        return Opaque(window, self.chunk, self.refusal, self.shape)

    def __repr__(self) -> str:
        return f"Opaque(window={self.window}, chunk={self.chunk}, refusal={self.refusal!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(_reads_mask(f".{name}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, Tensor) and x.dim() > 4 for x in args):
            raise ValueError(
                "huggingface: the module turns one row of position ids into a table for all rows of the batch, and "
                "packed rows differ"
            )
        raise ValueError(_reads_mask(getattr(function, "__name__", str(function))))

    def _computed(self, *_: Any) -> Any:
        raise ValueError(_reads_mask("an operator"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _computed
    __invert__ = __neg__ = __bool__ = __len__ = __iter__ = __getitem__ = _computed


def _reads_mask(what: str) -> str:
    return (
        f"huggingface: the module computes with its attention mask itself ({what}), as for a position bias or "
        f"attention of its own; fcp knows the mask only as a description of the whole sequence"
    )


def register() -> None:
    """Makes the three functions known to transformers under `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)
    ExpertsInterface.register(NAME, choose_experts)


MASK_ARGUMENTS = {
    "batch_size",
    "q_offset",
    "kv_offset",
    "attention_mask",
    "allow_is_causal_skip",
    "local_size",
    "dtype",
}
MASK_ARGUMENTS |= {"config", "use_vmap", "device", "allow_is_bidirectional_skip", "allow_torch_fix"}
"""Of the mask interface: what says how a tensor would be laid out, or what `mask_function` says as well."""


def describe_mask(*, mask_function: Any, q_length: int, kv_length: int, **known: Any) -> Opaque:
    """transformers' mask interface: the words of `mask_function`, for whichever slice of the sequence.

    Raises:
        ValueError: an argument that is not understood.
    """
    _required()
    shape = (known.get("batch_size", 1), 1, q_length, kv_length)
    unknown = sorted(set(known) - MASK_ARGUMENTS)
    if unknown:
        raise ValueError(f"huggingface: the mask interface was given {', '.join(unknown)}, which is not understood")
    if q_length != kv_length or known.get("q_offset", 0) or known.get("kv_offset", 0):
        return Opaque(refusal=f"a mask of {q_length} queries and {kv_length} keys (a cache, or another sequence)")
    try:
        return Opaque(*words_of(mask_function), shape=shape)
    except ValueError as error:
        return Opaque(refusal=str(error))
    except (IndexError, RuntimeError) as error:
        return Opaque(refusal=f"a mask that depends on more than indices ({error})")


INERT = {"position_ids", "cache_position", "return_dict", "use_cache", "logits_to_keep"}
"""Arguments that ride along to an attention function and say nothing there; nor does one that is None or False."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: Any = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [batch, heads, seq, dim] to [batch, seq, heads, dim], by `Ops.attention`.

    Raises:
        ValueError: an argument that is not understood, dropout, a mask that is not the description it was given, or a
            window other than the mask's.
    """
    call = _required()
    who = f"huggingface: {type(module).__name__}"
    unknown = sorted(name for name, x in more.items() if x is not None and x is not False and name not in INERT)
    if unknown:
        raise ValueError(
            f"{who} hands {', '.join(unknown)} to attention, which is not understood here; leaving it out would "
            f"compute something else"
        )
    if dropout:
        raise ValueError(f"{who} drops attention weights ({dropout}); set the dropout to 0, or the module to eval()")
    if is_causal is False:
        raise ValueError(f"{who} attends to what comes later (is_causal=False)")
    if not isinstance(attention_mask, Opaque):
        what = "no mask" if attention_mask is None else f"a mask of its own ({type(attention_mask).__name__})"
        raise ValueError(f"{who} attends with {what}, not with one of transformers' mask functions")
    if attention_mask.refusal is not None:
        raise ValueError(f"{who} attends with {attention_mask.refusal}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{who} attends with {query.shape[2]} queries to {key.shape[2]} keys, which are no tokens")
    window, chunk = attention_mask.window, attention_mask.chunk
    if sliding_window is not None and sliding_window != window:
        raise ValueError(
            f"{who} asks for a window of {sliding_window} keys where its mask has "
            f"{'none' if window is None else window}: flash and eager attention would differ"
        )
    if s_aux is not None and sinks is not None:
        raise ValueError(f"{who} hands both s_aux and sinks to attention")
    sinks = s_aux if sinks is None else sinks
    if call.seen is not None:
        call.seen(module, query, key, value)
    out = call.ops.attention(
        query,
        key,
        value,
        call.mask,
        window=window,
        chunk=chunk,
        scale=None if scaling is None else float(scaling),
        softcap=None if softcap is None else float(softcap),
        sinks=None if sinks is None else sinks.reshape(-1),
    )
    return out.transpose(1, 2).contiguous(), None  # modules go on with view


def choose_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any, **more: Any
) -> Tensor:
    """transformers' experts interface: [tokens, hidden] to the same, by `Ops.experts`.

    Raises:
        ValueError: an argument that is not understood, or experts that end in a norm with parameters of its own.
    """
    call = _required()
    who = f"huggingface: {type(module).__name__}"
    if args or more:
        raise ValueError(f"{who} hands more to its experts than rows, choices and weights, which is not understood")
    if module.has_post_expert_norm:
        raise ValueError(f"{who} norms what each expert gives (post_expert_norm), which is not computed here")
    up = "gate_up_proj" if module.has_gate else "up_proj"
    params = {"up": getattr(module, up), "down": module.down_proj}
    if module.is_transposed:
        params = {name: x.mT for name, x in params.items()}
    if module.has_bias:
        params |= {"up_bias": getattr(module, f"{up}_bias"), "down_bias": module.down_proj_bias}
    run = kept_modes(partial(_one_expert, module._apply_gate if module.has_gate else module.act_fn))
    return call.ops.experts(hidden_states[None], top_k_weights[None], top_k_index[None], params, run)[0]


def _one_expert(act: Callable[[Tensor], Tensor], rows: Tensor, params: Params, project: Project) -> Tensor:
    return project(act(project(rows, params["up"], params.get("up_bias"))), params["down"], params.get("down_bias"))
