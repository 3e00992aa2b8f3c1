"""Shape annotations become checks in every test; ranks share this process, so one thread is enough and repeatable."""

import torch
from jaxtyping import install_import_hook

# Before anything imports fcp: the hook rewrites modules as they are first imported.
install_import_hook(["fcp", "models"], "beartype.beartype")

torch.set_num_threads(1)
