"""Every tolerance of the suite, in one place."""

EXACT = 0.0
"""Layouts, adjoints of integers, and whatever else has no rounding."""

FLOAT64 = 1e-10
"""Relative, of loss, logits and every gradient leaf: what two orders of summation may differ by, with room."""

PARITY_LOGITS = 1e-5
"""Relative, float32: logits against another implementation of the same model."""

PARITY_GRADIENTS = 1e-4
"""Relative, float32: gradients against another implementation of the same model."""
