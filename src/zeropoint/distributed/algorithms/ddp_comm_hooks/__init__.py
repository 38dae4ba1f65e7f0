"""Communication hooks for ``DistributedDataParallel``, at torch's path."""
