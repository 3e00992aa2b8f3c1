"""Model families as pure functions, one file each. They know no axis: see `fcp.ops` for what they ask."""
