"""Files: quantized models saved and loaded, and old files of ``torch.ao`` read without it.

* :func:`load` reads what ``torch.save`` wrote, ``torch.ao``'s quantized tensors and modules included, and runs no
  code from the file;
* :func:`save_file` and :func:`load_file` write and read safetensors, where there is no pickle at all;
* :func:`convert_file` brings an old file to safetensors, as ``python -m zeropoint convert-checkpoint`` does.

May import: everything below the reports.
"""

from __future__ import annotations

from zeropoint.checkpoint._archive import load
from zeropoint.checkpoint._records import CheckpointError, ModuleRecord, PackedParams, Record

__all__ = ["CheckpointError", "ModuleRecord", "PackedParams", "Record", "load"]
