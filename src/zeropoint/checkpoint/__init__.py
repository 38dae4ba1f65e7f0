"""Files: quantized models saved and loaded, and old files of ``torch.ao`` read without it.

* :func:`load` reads what ``torch.save`` wrote, ``torch.ao``'s quantized tensors and modules included, and runs no
  code from the file;
* :func:`save_file` and :func:`load_file` write and read safetensors, where there is no pickle at all;
* :func:`convert_file` brings an old file to safetensors, as ``python -m zeropoint convert-checkpoint`` does.

May import: everything below the reports.
"""

from __future__ import annotations

from zeropoint.checkpoint._archive import load
from zeropoint.checkpoint._convert import ConversionSummary, convert_file, convert_state_dict
from zeropoint.checkpoint._records import CheckpointError, PackedParams, Record, SavedModule
from zeropoint.checkpoint._safetensors import load_file, read_facts, read_metadata, save_file

__all__ = [
    "CheckpointError",
    "ConversionSummary",
    "PackedParams",
    "Record",
    "SavedModule",
    "convert_file",
    "convert_state_dict",
    "load",
    "load_file",
    "read_facts",
    "read_metadata",
    "save_file",
]
