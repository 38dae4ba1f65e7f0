"""Pictures with ImageNet labels, photos to calibrate on, and texts with similarities judged by people.

All are files inside packages of ``examples/requirements.txt``; the packages' own code is never imported.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

__all__ = ["calibration_crops", "imagenet_pictures", "lee_documents", "other_crops", "package_file", "word_pairs"]

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg", "ihc.png", "retina.jpg")
"""Colour pictures inside scikit-image's wheel."""


def package_file(package: str, path: str) -> Path:
    """The path of a file that an installed package ships.

    Raises:
        ModuleNotFoundError: the package is not installed, or ships no such file.
    """
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / path).exists():
            return Path(folder) / path
    raise ModuleNotFoundError(
        f"no file {path} in a package {package}: pip install --no-deps -r examples/requirements.txt", name=package
    )


# --- pictures -----------------------------------------------------------------------------------------------------


def _to_input(picture: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(picture, dtype=np.float32))
    return ((pixels - 127.0) / 128.0).permute(2, 0, 1)


def centre_crop(picture: Image.Image, size: int = 224) -> Tensor:
    """What EfficientNet-Lite0 was trained to see: float32 (3, size, size), 7/8 of the short side, bicubic."""
    side = int(min(picture.size) * size / (size + 32))
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return _to_input(
        picture.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
    )


def imagenet_pictures() -> tuple[Tensor, Tensor]:
    """Twenty ImageNet pictures: float32 (20, 3, 224, 224), and their classes, int64 (20,)."""
    files = sorted(package_file("foolbox", "data").glob("imagenet_*.jpg"))
    with_labels = [(centre_crop(Image.open(file)), int(file.stem.split("_")[-1])) for file in files]
    return torch.stack([x for x, _ in with_labels]), torch.tensor([label for _, label in with_labels])


def random_crops(pictures: Iterable[Image.Image], each: int, seed: int, size: int = 224) -> Tensor:
    """Random square crops, half of them mirrored: float32 (pictures * each, 3, size, size)."""
    random = np.random.default_rng(seed)
    crops = []
    for picture in pictures:
        picture = picture.convert("RGB")
        for _ in range(each):
            side = int(min(picture.size) * random.uniform(0.5, 1.0))
            left = int(random.integers(0, picture.width - side + 1))
            top = int(random.integers(0, picture.height - side + 1))
            crop = picture.resize((size, size), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
            crops.append(_to_input(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else crop))
    return torch.stack(crops)


def calibration_crops(count: int = 64, seed: int = 0) -> Tensor:
    """Crops of scikit-image's photos, none of which is a test picture: float32 (count, 3, 224, 224)."""
    photos = [Image.open(package_file("skimage", f"data/{name}")) for name in PHOTOS]
    return random_crops(photos, -(-count // len(photos)), seed)[:count]


def other_crops(each: int = 10, seed: int = 1) -> Tensor:
    """Random crops of the twenty ImageNet pictures, to compare networks on: float32 (20 * each, 3, 224, 224)."""
    files = sorted(package_file("foolbox", "data").glob("imagenet_*.jpg"))
    return random_crops(map(Image.open, files), each, seed)


# --- texts --------------------------------------------------------------------------------------------------------


def lee_documents() -> tuple[list[str], Tensor]:
    """Fifty news texts and what people said of their similarity, from 0 to 1: float64 (50, 50).

    M. D. Lee, B. Pincombe, M. Welsh, "An empirical evaluation of models of text document similarity", 2005.
    """
    texts = package_file("gensim", "test/test_data/lee.cor").read_text("latin-1").strip().split("\n")
    judged = np.loadtxt(package_file("gensim", "test/test_data/similarities0-1.txt"))
    return texts, torch.from_numpy(judged)


def word_pairs(name: str = "wordsim353.tsv") -> tuple[list[str], list[str], Tensor]:
    """Pairs of words and how related people found them: WordSim353, or SimLex999 as "simlex999.txt"."""
    with package_file("gensim", f"test/test_data/{name}").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if not row[0].startswith("#")]
    return [row[0] for row in rows], [row[1] for row in rows], torch.tensor([float(row[2]) for row in rows])
