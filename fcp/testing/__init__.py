"""For tests of models: tiny configurations of transformers' model types."""

from fcp.testing._tiny import tiny_config
from fcp.testing._wide import wide

__all__ = ["tiny_config", "wide"]
