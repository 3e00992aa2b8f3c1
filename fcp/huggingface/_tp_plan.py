"""transformers' tensor-parallel plans, in fcp's words: a rule for each parameter, and where enter and leave go.

A plan names modules and parameters by pattern, and a style for each: this linear map is cut by output, that one by
input, the experts by their inner width. In transformers a style is DTensors and hooks. Here it is two things. A rule
(`Split`, `Shared`, `Replicated`) says how the leaf lies. And the forward of the module, on the private copy, is
surrounded by what the style does to values: `enter` before split work, `leave` after it, `split` and `join` where the
plan wants a whole value cut or a cut one whole. Alone these are the identity, so it is one function for every mesh.

A style that is not listed in `STYLES` is refused by name. What a plan says nothing about is found out, and what it
says is checked, by `_tp_proof.py`.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fcp._linear import linear
from fcp.huggingface._interfaces import current
from fcp.ops import LOCAL, Ops
from fcp.typing import Replicated, Rule, Shared, Split

__all__ = ["STYLES", "Plan", "plan_of", "surround"]


@dataclass(frozen=True)
class Style:
    """What a style does.

    Attributes:
        cut: where the leaf is cut: "out" (dim -2, or the only one), "in" (the last dim; a bias stays whole), "vocab",
            None.
        packed: the cut dim holds two matrices, one after another, and each is cut.
        shared: the leaf stays whole and is used in split work.
        around: what surrounds the module's forward.
    """

    cut: str | None = None
    packed: bool = False
    shared: bool = False
    around: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Plan:
    """Of one module.

    Attributes:
        rules: the rule of every parameter that the plan names, by name; the two names of a tied one may be here.
        around: what surrounds the forward of every module that the plan names.
        refusal: why the plan cannot be followed, said where somebody asks for it.
    """

    rules: Mapping[str, Rule]
    around: Mapping[str, Callable[..., Any]]
    refusal: str | None = None


def _ops() -> Ops:
    call = current()
    return LOCAL if call is None else call.ops


# --- what surrounds a forward -----------------------------------------------------------------------------------------


def _enter(module: nn.Module, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return forward(_ops().enter(x), *args, **kwargs)


def _enter_join(module: nn.Module, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _ops().join(forward(_ops().enter(x), *args, **kwargs))[..., : module.out_features]


def _leave(module: nn.Module, forward: Callable[..., Any], x: Tensor) -> Tensor:
    """A linear map cut by input: the ranks' sums are added up, then the bias is added once."""
    held: Any = module
    y = _ops().leave(linear(x, held.weight))
    return y if held.bias is None else y + held.bias


def _split_leave(module: nn.Module, forward: Callable[..., Any], x: Tensor) -> Tensor:
    return _leave(module, forward, _ops().split(x))


def _all_enter_leave(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Experts: rows and routing weights both go into split work."""

    def enter(x: Any) -> Any:
        return _ops().enter(x) if isinstance(x, Tensor) and x.is_floating_point() else x

    return _ops().leave(forward(*(enter(x) for x in args), **{name: enter(x) for name, x in kwargs.items()}))


def _only_leave(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _ops().leave(forward(*args, **kwargs))


def _out_enters(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A latent and a rotary key side by side, which all heads share (DeepSeek-V2, section 2.1.3): the key goes on to
    attention as it is, so both enter here, and the latent's own projection (`LATENT`) does not a second time."""
    return _ops().enter(forward(*args, **kwargs))


LATENT = "kv_b_proj"


class _Rows(TorchFunctionMode):
    """Within it, looking up rows of one table is `Ops.embed`, whatever the module does before and after."""

    def __init__(self, table: Tensor, embed: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._table, self._embed = table, embed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.embedding or len(args) < 2 or args[1] is not self._table:
            return func(*args, **kwargs)
        ids, _, padding, most, *_ = (*args, None, None)
        if most is not None or kwargs.get("max_norm") is not None:
            raise ValueError("huggingface: an embedding that renormalises its rows (max_norm) cannot be split")
        rows = self._embed(ids, self._table)
        padding = kwargs.get("padding_idx", padding)
        # The row of padding is looked up and never learns.
        return rows if padding is None else torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)


def _vocabulary(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    held: Any = module
    with _Rows(held.weight, _ops().embed):
        return forward(*args, **kwargs)


STYLES: Mapping[str, Style] = {
    "colwise": Style("out", around=_enter),
    "colwise_gather_output": Style("out", around=_enter_join),
    "colwise_rep": Style("out", around=_enter_join),
    "packed_colwise": Style("out", packed=True, around=_enter),
    "rowwise": Style("in", around=_leave),
    "rowwise_split_input": Style("in", around=_split_leave),
    "rowwise_rep": Style("in", around=_split_leave),
    "packed_rowwise": Style("in", packed=True),
    "embedding_rowwise": Style("vocab", around=_vocabulary),
    "moe_tp_experts": Style(around=_all_enter_leave),
    "mla_kv_a_proj": Style(around=_out_enters),
    "all_reduce": Style(around=_only_leave),
    "replicated_with_grad_allreduce": Style(shared=True),
    "local_params": Style(),
    "replicate": Style(),
}
"""transformers' styles. Its others are no tensor parallelism (`sequence_parallel`), or not computed here."""


# --- a module's plan --------------------------------------------------------------------------------------------------


def plan_of(module: Any) -> Plan | None:
    """The plan that the module carries; None where it carries none."""
    try:
        return _read(module)
    except ValueError as error:
        return Plan({}, {}, str(error))


def _read(module: Any) -> Plan | None:
    """Raises ValueError for a style that is not known, or one on a module it does not fit, by name."""
    patterns: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters(remove_duplicate=False))
    config = module.config.get_text_config(decoder=True)
    rules: dict[str, Rule] = {}
    around: dict[str, Callable[..., Any]] = {}
    for pattern, name in patterns.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", "[^.]+")).fullmatch
        for path in filter(matches, parameters):
            rules[path] = _rule(_style(name, path), parameters[path])
        for path in filter(matches, modules):
            style, held = _style(name, path), modules[path]
            if style.around in (_leave, _split_leave, _enter_join) and type(held).forward is not nn.Linear.forward:
                raise ValueError(f"its plan has {name} on {path} ({type(held).__name__}), which is no plain linear map")
            vocab = held is module.get_output_embeddings() and style.around is _enter_join
            heads = _heads(modules[path.rpartition(".")[0]], path.rpartition(".")[2], held, config)
            for own, x in held.named_parameters(recurse=False):
                if style.cut or style.shared:
                    rules[f"{path}.{own}"] = _rule(style, x, bias=own == "bias", heads=heads, vocab=vocab)
            if style.around is not None:
                around[path] = style.around
    for path in [path for path, what in around.items() if what is _out_enters]:
        around.pop(f"{path.rpartition('.')[0]}.{LATENT}", None)
    return Plan(rules, around) if rules else None


def _style(name: str, path: str) -> Style:
    if name not in STYLES:
        raise ValueError(
            f"its plan has the style {name!r} on {path}, which is not known; known are {', '.join(STYLES)}"
        )
    return STYLES[name]


def _rule(style: Style, x: Tensor, *, bias: bool = False, heads: int | None = None, vocab: bool = False) -> Rule:
    if style.shared:
        return Shared()
    if style.cut == "vocab" or vocab:
        return Split(0, vocab=x.shape[0])
    if style.cut is None or (style.cut == "in" and (bias or x.dim() == 1)):
        return Replicated()
    dim = x.dim() - 1 if style.cut == "in" or x.dim() == 1 else x.dim() - 2
    return Split(dim, pieces=(x.shape[dim] // 2,) * 2) if style.packed else Split(dim, blocks=heads)


def _heads(parent: Any, name: str, held: Any, config: Any) -> int | None:
    """How many heads a projection of attention makes or takes, which have to stay whole."""
    size = getattr(parent, "head_dim", None)
    width = held.out_features if hasattr(held, "out_features") else 0
    if name in ("k_proj", "v_proj") and isinstance(size, int) and width and width % size == 0:
        return width // size
    attends = any(hasattr(parent, each) for each in ("head_dim", "head_size", "num_heads", "num_key_value_groups"))
    if not attends or not width:
        return None
    heads = getattr(parent, "num_heads", None)
    if heads is None:
        with contextlib.suppress(Exception):  # a config may refuse to name one number for all layers
            heads = config.num_attention_heads
    if not isinstance(heads, int):
        return None
    return heads if held.in_features % heads == 0 and width % heads == 0 else None


def surround(module: nn.Module, around: Mapping[str, Callable[..., Any]]) -> None:
    """Replaces the forward of every planned part of a private copy."""
    for path, what in around.items():
        each = module.get_submodule(path)
        each.forward = partial(what, each, each.forward)
