"""For tests of models: the mixin that holds a transformers model to itself under the transforms, and tiny models.

_mixin.py   ContextParallelTesterMixin
_tiny.py    tiny configurations and modules of transformers' model types, and every change with its reason
_wide.py    float64 where a module casts to float32
"""

from fcp.testing._mixin import ContextParallelTesterMixin
from fcp.testing._tiny import tiny_config, tiny_module
from fcp.testing._wide import wide

__all__ = ["ContextParallelTesterMixin", "tiny_config", "tiny_module", "wide"]
