"""The three networks of MTCNN, a face detector, with trained weights, written for eager quantization.

Each narrows down what the one before found: where a face may be, its box, and five points of it. They are made of
convolutions, PReLU with a slope for every channel, max pooling in ceil mode, and softmax.

K. Zhang et al., "Joint Face Detection and Alignment using Multi-task Cascaded Convolutional Networks", 2016.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from networks.data import package_file
from zeropoint.ao.quantization import DeQuantStub, QuantStub

__all__ = ["SIZES", "Stage", "load", "windows"]

SIZES = {"pnet": 12, "rnet": 24, "onet": 48}
"""The side of the square window that each network judges."""


class Stage(nn.Module):
    """One network: (N, 3, side, side) windows to the probability that each shows a face, and its box.

    Args:
        name: ``"pnet"``, ``"rnet"`` or ``"onet"``.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        pool, convs, dense = {  # (kernel, stride) of the poolings; channels and kernels; features
            "pnet": ([(2, 2)], [(3, 10, 3), (10, 16, 3), (16, 32, 3)], None),
            "rnet": ([(3, 2), (3, 2)], [(3, 28, 3), (28, 48, 3), (48, 64, 2)], (576, 128)),
            "onet": ([(3, 2), (3, 2), (2, 2)], [(3, 32, 3), (32, 64, 3), (64, 64, 3), (64, 128, 2)], (1152, 256)),
        }[name]
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.trunk = nn.Sequential()
        for i, (a, b, kernel) in enumerate(convs, 1):
            self.trunk.add_module(f"conv{i}", nn.Conv2d(a, b, kernel))
            self.trunk.add_module(f"prelu{i}", nn.PReLU(b))
            if i <= len(pool):
                self.trunk.add_module(f"pool{i}", nn.MaxPool2d(*pool[i - 1], ceil_mode=True))
        number = len(convs) + 1
        self.dense: nn.Sequential | None = None
        if dense is None:
            features = convs[-1][1]
            self.face: nn.Module = nn.Conv2d(features, 2, 1)
            self.box: nn.Module = nn.Conv2d(features, 4, 1)
        else:
            self.dense = nn.Sequential(nn.Linear(*dense), nn.PReLU(dense[1]))
            self.face, self.box = nn.Linear(dense[1], 2), nn.Linear(dense[1], 4)
        self.softmax = nn.Softmax(dim=1)
        self._names = {f"dense{number}": "dense.0", f"prelu{number}": "dense.1"}
        head = number if dense is None else number + 1
        kind = "conv" if dense is None else "dense"
        self._names |= {f"{kind}{head}_1": "face", f"{kind}{head}_2": "box"}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (N, 2, ...) of no face and of a face, and box corrections (N, 4, ...)."""
        x = self.trunk(self.quant(x))
        if self.dense is not None:
            x = self.dense(x.permute(0, 3, 2, 1).contiguous().flatten(1))
        return self.dequant(self.softmax(self.face(x))), self.dequant(self.box(x))

    def take(self, state: dict[str, Tensor]) -> None:
        """Takes the published tensors, which name the layers in a row; the points of the face are left out."""
        for name, value in state.items():
            layer, _, rest = name.rpartition(".")
            path = self._names.get(layer, f"trunk.{layer}")
            if not layer.endswith("_3"):
                self.get_parameter(f"{path}.{rest}").data.copy_(value)


def load(name: str) -> Stage:
    """A network with the weights of the package ``facenet-pytorch``, in eval mode."""
    stage = Stage(name)
    stage.take(torch.load(package_file("facenet_pytorch", f"data/{name}.pt"), weights_only=True))
    return stage.eval()


def windows(side: int, count: int = 400, seed: int = 0) -> Tensor:
    """Square windows of a portrait (scikit-image's astronaut), float32 (count, 3, side, side), every third on the face.

    The values are ``(pixel - 127.5) / 128``, as the networks expect.
    """
    photo = Image.open(package_file("skimage", "data/astronaut.png")).convert("RGB")
    random = np.random.default_rng(seed)
    crops = []
    for i in range(count):
        if i % 3 == 0:  # the face is about 110 pixels wide around (222, 115)
            size = int(random.uniform(90, 150))
            left, top = (int(centre + random.normal(0, 8) - size / 2) for centre in (222, 115))
        else:
            size = int(random.uniform(40, 300))
            left, top = (int(random.integers(0, 512 - size)) for _ in range(2))
        crop = photo.resize((side, side), Image.Resampling.BILINEAR, (left, top, left + size, top + size))
        crops.append((torch.from_numpy(np.array(crop, dtype=np.float32)) - 127.5) / 128.0)
    return torch.stack(crops).permute(0, 3, 1, 2).contiguous()
