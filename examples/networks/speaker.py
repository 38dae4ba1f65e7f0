"""Who speaks: voices to vectors whose dot product tells how alike they are, by three layers of LSTM. Trained weights.

L. Wan et al., "Generalized End-to-End Loss for Speaker Verification", 2018; C. Jemine, "Resemblyzer", 2019.
The voices are those of ``flite``, a speech synthesizer that Debian packages.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from networks.data import package_file

__all__ = ["SpeakerEncoder", "embed", "equal_error_rate", "load", "mel_spectrogram", "pieces_of", "utterances"]

RATE, WINDOW, STEP, BANDS = 16_000, 400, 160, 40
FRAMES, HOP = 160, 77  # of the pieces that an utterance is cut into
VOICES = ("awb", "rms", "slt", "kal16")
SENTENCES = (
    "The birch canoe slid on the smooth planks beside the quiet river this morning.",
    "Glue the sheet to the dark blue background before you paint the other side.",
    "It is easy to tell the depth of a well when you drop a small stone into it.",
    "These days a chicken leg is a rare dish, and people talk about it for a week.",
    "Rice is often served in round bowls together with fish and green vegetables.",
    "The juice of lemons makes fine punch for a warm afternoon in the garden.",
    "The box was thrown beside the parked truck, where nobody looked for it.",
    "The hogs were fed chopped corn and garbage by the farmer and his children.",
    "Four hours of steady work faced us when the sun came up over the hills.",
    "A large size in stockings is hard to sell, said the woman in the old shop.",
    "The boy was there when the sun rose, waiting for his father to come home.",
    "A rod is used to catch pink salmon in the cold streams of the north.",
)


class SpeakerEncoder(nn.Module):
    """Mel spectrograms ``(batch, frames, bands)`` to unit vectors."""

    def __init__(self, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.lstm = nn.LSTM(BANDS, width, layers, batch_first=True)
        self.linear = nn.Linear(width, width)
        self.relu = nn.ReLU()

    def forward(self, mel: Tensor) -> Tensor:
        _, (h, _) = self.lstm(mel)
        return nn.functional.normalize(self.relu(self.linear(h[-1])))


def load() -> SpeakerEncoder:
    """The trained network."""
    stored = torch.load(package_file("resemblyzer", "pretrained.pt"), map_location="cpu", weights_only=True)
    network = SpeakerEncoder()
    network.load_state_dict({name: stored["model_state"][name] for name in network.state_dict()})
    return network.eval()


# --- sound --------------------------------------------------------------------------------------------------------


def utterances() -> list[tuple[str, Tensor]]:
    """Every sentence in every voice: the voice, and samples in [-1, 1] at 16 kHz.

    Raises:
        ModuleNotFoundError: ``flite`` is not installed.
    """
    program = shutil.which("flite")
    if program is None:
        raise ModuleNotFoundError("no program flite: apt-get install flite", name="flite")
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for voice in VOICES:
            for number, sentence in enumerate(SENTENCES):
                path = Path(folder) / f"{voice}{number}.wav"
                subprocess.run([program, "-voice", voice, "-t", sentence, "-o", str(path)], check=True)
                with wave.open(str(path)) as file:
                    samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
                made.append((voice, torch.from_numpy(samples.astype(np.float32) / 32768)))
    return made


def _mel_filters() -> Tensor:
    """Triangles of equal area on Slaney's mel scale, (bands, bins): linear to 1 kHz, logarithmic above."""

    def hertz(mel: Tensor) -> Tensor:
        return torch.where(mel < 15, mel * (200 / 3), 1000 * torch.exp((mel - 15) * (np.log(6.4) / 27)))

    top = 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4)
    edges = hertz(torch.linspace(0, top, BANDS + 2, dtype=torch.float64))
    bins = torch.linspace(0, RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    left, middle, right = (edges[i : i + BANDS].unsqueeze(1) for i in range(3))
    rising, falling = (bins - left) / (middle - left), (right - bins) / (right - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (right - left)).float()


def mel_spectrogram(samples: Tensor) -> Tensor:
    """Power in 40 bands (not its logarithm), ``(frames, bands)``: values over many orders of magnitude."""
    loudness = samples.square().mean().sqrt()
    samples = samples * (10 ** (-30 / 20) / loudness).clamp(min=1)
    spectrum = torch.stft(
        samples, WINDOW, STEP, window=torch.hann_window(WINDOW), pad_mode="constant", return_complex=True
    )
    return (_mel_filters() @ spectrum.abs().square()).t()


# --- what is measured ---------------------------------------------------------------------------------------------


@torch.no_grad()
def embed(network: nn.Module, samples: Sequence[Tensor]) -> Tensor:
    """One unit vector a piece of 1.6 s, piece after piece of all utterances."""
    pieces = [mel_spectrogram(one).unfold(0, FRAMES, HOP).transpose(1, 2) for one in samples]
    vectors: Tensor = network(torch.cat(pieces))
    return vectors


def pieces_of(samples: Tensor) -> int:
    """Into how many pieces :func:`embed` cuts an utterance."""
    return (samples.numel() // STEP + 1 - FRAMES) // HOP + 1


def equal_error_rate(vectors: Tensor, speakers: Sequence[str]) -> float:
    """The rate at which as many pairs of one speaker are refused as pairs of two are accepted."""
    above = torch.triu_indices(len(speakers), len(speakers), 1).unbind()
    alike = (vectors @ vectors.T)[above]
    same = torch.tensor([speakers[i] == speakers[j] for i, j in zip(*(a.tolist() for a in above), strict=True)])
    order = alike.argsort()
    refused = same[order].cumsum(0) / same.sum()
    accepted = 1 - (~same[order]).cumsum(0) / (~same).sum()
    at = int((refused - accepted).abs().argmin())
    return float((refused[at] + accepted[at]) / 2)
