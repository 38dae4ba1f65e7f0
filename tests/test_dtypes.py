"""The quantized dtypes and schemes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import zeropoint as zp
from zeropoint.dtypes import QDtype, QScheme, as_qdtype, as_qscheme

ALL = (zp.qint8, zp.quint8, zp.qint32)


@pytest.mark.parametrize(
    ("qdtype", "storage", "low", "high", "size"),
    [
        (zp.qint8, torch.int8, -128, 127, 1),
        (zp.quint8, torch.uint8, 0, 255, 1),
        (zp.qint32, torch.int32, -(2**31), 2**31 - 1, 4),
    ],
    ids=str,
)
def test_each_dtype_has_its_storage_and_range(
    qdtype: QDtype, storage: torch.dtype, low: int, high: int, size: int
) -> None:
    assert (qdtype.storage, qdtype.qmin, qdtype.qmax, qdtype.itemsize) == (storage, low, high, size)
    assert qdtype.is_quantized
    assert qdtype.is_signed == (low < 0)


@pytest.mark.parametrize("qdtype", ALL, ids=str)
def test_copies_and_pickles_are_the_same_object(qdtype: QDtype) -> None:
    assert copy.deepcopy(qdtype) is qdtype
    assert pickle.loads(pickle.dumps(qdtype)) is qdtype


@pytest.mark.parametrize("qdtype", ALL, ids=str)
def test_every_spelling_is_understood(qdtype: QDtype) -> None:
    spellings = [qdtype, qdtype.name, qdtype.storage]
    if hasattr(torch, qdtype.name):
        spellings.append(getattr(torch, qdtype.name))
        assert qdtype == getattr(torch, qdtype.name)
        assert hash(qdtype) == hash(getattr(torch, qdtype.name))
    assert all(as_qdtype(spelling) is qdtype for spelling in spellings)


@pytest.mark.parametrize("wrong", [torch.float32, torch.int64, "int7", None, 8])
def test_other_dtypes_are_refused_by_name(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected a quantized dtype"):
        as_qdtype(wrong)


def test_a_dtype_is_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        zp.qint8.qmax = 3  # type: ignore[misc]


def test_a_scheme_is_an_int_that_prints_as_a_name() -> None:
    assert QScheme.per_channel_affine == 1
    assert str(zp.per_tensor_symmetric) == "zeropoint.per_tensor_symmetric"
    assert zp.per_channel_symmetric.is_symmetric
    assert zp.per_channel_affine_float_qparams.is_per_channel
    assert not zp.per_tensor_symmetric.is_per_channel


def test_torchs_schemes_are_understood() -> None:
    for scheme in QScheme:
        assert as_qscheme(int(scheme)) is scheme
        assert as_qscheme(scheme.name) is scheme
        if hasattr(torch, scheme.name):
            assert as_qscheme(getattr(torch, scheme.name)) is scheme


@pytest.mark.parametrize("wrong", [7, "per_row", None, torch.int8])
def test_other_schemes_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected a quantization scheme"):
        as_qscheme(wrong)
