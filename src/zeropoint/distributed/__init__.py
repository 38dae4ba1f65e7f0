"""Training on several machines: gradients that travel as codes. ``docs/ddp.md`` tells which hook when.

``collectives`` has the exchanges as plain functions; ``algorithms.ddp_comm_hooks.quantization_hooks`` the hooks for
``DistributedDataParallel``; ``fsdp`` the reduce-scatter for ``fully_shard``.
"""

from zeropoint.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    QuantizedAllReduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
    register_hook,
)
from zeropoint.distributed.collectives import (
    all_reduce_range,
    gathered_mean,
    quantized_all_reduce,
    quantized_reduce_scatter,
)
from zeropoint.distributed.fsdp import QuantizedReduceScatter

__all__ = [
    "QuantizedAllReduceState",
    "QuantizedReduceScatter",
    "all_reduce_range",
    "gathered_mean",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "quantized_all_reduce",
    "quantized_allreduce_hook",
    "quantized_reduce_scatter",
    "register_hook",
]
