"""Float modules that count as one when a model is quantized: a layer with what ``fuse_modules`` found behind it.

Each is a Sequential of its parts, so it computes what they computed.

May import: torch only.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

__all__ = [
    "BNReLU2d",
    "BNReLU3d",
    "ConvBn1d",
    "ConvBn2d",
    "ConvBn3d",
    "ConvBnReLU1d",
    "ConvBnReLU2d",
    "ConvBnReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "ConvTransposeReLU1d",
    "ConvTransposeReLU2d",
    "ConvTransposeReLU3d",
    "FusedModule",
    "LinearBn1d",
    "LinearReLU",
]

_Classes = tuple[type[nn.Module], ...]
_RECTIFIERS: _Classes = (nn.ReLU, nn.ReLU6)


class FusedModule(nn.Sequential):
    """Base of the fused float modules: a Sequential that is observed and converted as one."""

    PARTS: ClassVar[tuple[_Classes, ...]] = ()

    def __init__(self, *parts: nn.Module) -> None:
        fits = len(parts) == len(self.PARTS) and all(map(isinstance, parts, self.PARTS))
        if not fits:
            wanted = ", ".join(" or ".join(c.__name__ for c in classes) for classes in self.PARTS)
            got = ", ".join(type(part).__name__ for part in parts)
            raise TypeError(f"{type(self).__name__} is made of ({wanted}), got ({got})")
        super().__init__(*parts)

    def forward(self, input: Tensor) -> Tensor:
        """The parts, one after the other; an observer that ``prepare`` adds is no part."""
        for index in range(len(self.PARTS)):
            input = self._modules[str(index)](input)
        return input


class LinearReLU(FusedModule):
    """A linear transformation followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.Linear,), _RECTIFIERS)


class LinearBn1d(FusedModule):
    """A linear transformation followed by a batch norm."""

    PARTS = ((nn.Linear,), (nn.BatchNorm1d, nn.SyncBatchNorm))


class ConvReLU1d(FusedModule):
    """A 1d convolution followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.Conv1d,), _RECTIFIERS)


class ConvReLU2d(FusedModule):
    """A 2d convolution followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.Conv2d,), _RECTIFIERS)


class ConvReLU3d(FusedModule):
    """A 3d convolution followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.Conv3d,), _RECTIFIERS)


class ConvTransposeReLU1d(FusedModule):
    """A 1d transposed convolution followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.ConvTranspose1d,), _RECTIFIERS)


class ConvTransposeReLU2d(FusedModule):
    """A 2d transposed convolution followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.ConvTranspose2d,), _RECTIFIERS)


class ConvTransposeReLU3d(FusedModule):
    """A 3d transposed convolution followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.ConvTranspose3d,), _RECTIFIERS)


class ConvBn1d(FusedModule):
    """A 1d convolution followed by a batch norm."""

    PARTS = ((nn.Conv1d,), (nn.BatchNorm1d, nn.SyncBatchNorm))


class ConvBn2d(FusedModule):
    """A 2d convolution followed by a batch norm."""

    PARTS = ((nn.Conv2d,), (nn.BatchNorm2d, nn.SyncBatchNorm))


class ConvBn3d(FusedModule):
    """A 3d convolution followed by a batch norm."""

    PARTS = ((nn.Conv3d,), (nn.BatchNorm3d, nn.SyncBatchNorm))


class ConvBnReLU1d(FusedModule):
    """A 1d convolution followed by a batch norm and a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.Conv1d,), (nn.BatchNorm1d, nn.SyncBatchNorm), _RECTIFIERS)


class ConvBnReLU2d(FusedModule):
    """A 2d convolution followed by a batch norm and a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.Conv2d,), (nn.BatchNorm2d, nn.SyncBatchNorm), _RECTIFIERS)


class ConvBnReLU3d(FusedModule):
    """A 3d convolution followed by a batch norm and a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.Conv3d,), (nn.BatchNorm3d, nn.SyncBatchNorm), _RECTIFIERS)


class BNReLU2d(FusedModule):
    """A 2d batch norm followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.BatchNorm2d,), _RECTIFIERS)


class BNReLU3d(FusedModule):
    """A 3d batch norm followed by a rectifier (ReLU or ReLU6)."""

    PARTS = ((nn.BatchNorm3d,), _RECTIFIERS)
