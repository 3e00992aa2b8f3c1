"""The gated MLP (Shazeer 2020) that most families share: its tensors, and how they are split.

    down(silu(gate x) * up x)

What it computes is `models.llama.mlp`. gate and up are cut by their output, the width, and down by its input.
"""

from fcp.typing import Rule, Split

__all__ = ["mlp_rules", "mlp_shapes"]


def mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of its three matrices, by their names below `name`."""
    matrices = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {f"{name}.{matrix}.weight": shape for matrix, shape in matrices.items()}


def mlp_rules(name: str, width: int) -> dict[str, Rule]:
    """The rules of its three matrices, by their names below `name`."""
    dims = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
    return {f"{name}.{matrix}.weight": Split(dim, blocks=width) for matrix, dim in dims.items()}
