"""Files made to do harm: an error that says what is wrong with them."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from zeropoint import checkpoint, qint8
from zeropoint.checkpoint import CheckpointError

from .craft import Call, Global, archive, emit, plain, quantized

SIX = {"0": bytes(range(6))}
CHANNELS = Global("torch", "per_channel_affine")


def refused(data: bytes, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(data, **options)
    return str(error.value)


def test_the_crafting_tool_writes_files_that_load() -> None:
    found = checkpoint.load(archive({"w": quantized(), "p": plain((6,), (1,))}, SIX))
    assert found["w"].dtype == qint8
    assert found["w"].q_scale() == 0.5
    assert found["w"].int_repr().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["w"].untyped_storage().data_ptr() == found["p"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (quantized(size=(4, 3)), "reaches beyond its storage of 6 elements"),
        (quantized(offset=4), "reaches beyond its storage"),
        (quantized(offset=-1), "out of range"),
        (quantized(stride=(-3, 1)), "out of range"),
        (quantized(stride=(2**62, 1)), "out of range"),
        (quantized(size=(2**62,), stride=(1,)), "out of range"),
        (quantized(size=(2**40,), stride=(0,)), "over a storage of only 6 elements"),
        (quantized(size=(2, 3), stride=(1,)), "with strides"),
        (quantized(size=(2.0, 3)), "whole number"),
        (quantized(size=(1,) * 65, stride=(1,) * 65), "at most 64"),
        (quantized(numel=7), "should be 7"),
        (quantized(numel=2**62), "of 4611686018427387904 elements"),
        (quantized(kind="CharStorage"), "holds no codes"),
        (quantized(grid=(Global("torch", "per_tensor_affine"), -0.5, 0)), "scale must be finite and above 0"),
        (quantized(grid=(Global("torch", "per_tensor_affine"), 0.0, 0)), "scale must be finite and above 0"),
        (quantized(grid=(Global("torch", "per_tensor_affine"), float("nan"), 0)), "scale must be finite"),
        (quantized(grid=(Global("torch", "per_tensor_affine"), 0.5, 300)), "zero_point must lie in"),
        (quantized(grid=(Global("torch", "per_tensor_affine"), "a", 0)), "must be a number"),
        (quantized(grid=(Global("torch", "per_tensor_affine"), 0.5)), "a scale and a zero point"),
        (quantized(grid=("per_tensor_affine", 0.5, 0)), "without a known scheme"),
        (quantized(grid=(CHANNELS, [0.5, 0.5], [0, 0], 2)), "axis 2 is out of range"),
        (quantized(grid=(CHANNELS, [0.5, 0.5], [0, 0], -1)), "axis -1 is out of range"),
        (quantized(grid=(CHANNELS, [0.5, 0.5], [0, 0], 1)), "axis 1 has 3 channels"),
        (quantized(grid=(CHANNELS, [0.5, 0.5], [0], 0)), "other zero points"),
        (quantized(grid=(CHANNELS, [0.5, -0.5], [0, 0], 0)), "every scale must be finite and above 0"),
        (quantized(grid=(CHANNELS, [0.5, 0.5], [0, 900], 0)), "every zero_point must lie in"),
        (quantized(grid=(CHANNELS, [0.5, 0.5], [0.5, float("inf")], 0)), "every zero_point must be finite"),
        (quantized(grid=(CHANNELS, [0.5, "b"], [0, 0], 0)), "must be numbers"),
        (plain((2, 4), (4, 1)), "reaches beyond its storage"),
        (Call(Global("os", "system"), ("true",)), "os.system, which is not in the list"),
        (Call(Global("builtins", "eval"), ("1",)), "builtins.eval, which is not in the list"),
        (Call(Global("torch", "load"), ("a",)), "torch.load, which is not in the list"),
        (Call(Global("torch.serialization", "os.system"), ("a",)), "not in the list"),
        (Call(3, ()), "calls a value of type int"),
        (Call(Global("collections", "OrderedDict"), 3), "not with a tuple"),
        (Call(Global("collections", "OrderedDict"), (3,)), "something else than pairs"),
        (Call(Global("torch._utils", "_rebuild_tensor_v2"), (1, 2)), "_rebuild_tensor_v2"),
        (Call(Global("torch", "Size"), ((2**62, 2**62),)), "out of range"),
        (Call(Global("torch", "device"), ("nowhere",)), "torch.device"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_a_file_says_is_checked(value: Any, text: str) -> None:
    assert text in refused(archive({"w": value}, SIX))


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        (b"", "truncated"),
        (b"N", "truncated"),
        (b".", "nothing to take"),
        (b"R.", "nothing to take"),
        (b"t.", "no mark"),
        (b"h\x07.", "slot 7 is empty"),
        (b"\x80\x09N.", "protocol 9"),
        (b"i os\nsystem\n.", "not allowed"),
        (b"\x82\x01.", "not allowed"),
        (b"B\xff\xff\xff\x7fabc.", "truncated"),
        (b"\x8e" + b"\xff" * 8 + b".", "truncated"),
        (b"\x8b\xff\xff\xff\x7f.", "whole number of 2147483647 bytes"),
        (b"cos" + b"x" * 600, "does not end"),
        (b"X\x02\x00\x00\x00\xff\xfe.", "damaged"),
        (b"K\x01b.", "no object that takes a state"),
        (b"NK\x01b.", "no object that takes a state"),
        (b"}]K\x01s.", "as a dict's or a set's key"),
        (b"}(K\x01u.", "a key without a value"),
        (b"NQ.", "something else than a storage"),
        (b"]" * 10_000 + b"a" * 9_999 + b".", "nested more than 200 deep"),
    ],
)
def test_a_damaged_pickle(operations: bytes, text: str) -> None:
    assert text in refused(archive(operations))


def test_a_memo_slot_with_a_huge_number_takes_no_memory() -> None:
    assert checkpoint.load(archive(b"\x80\x02K\x05r\xff\xff\xff\xffj\xff\xff\xff\xff\x86.")) == (5, 5)


def test_one_long_list_used_for_everything_is_refused() -> None:
    long = b"(" + b"K\x00" * 5_000 + b"tq\x00"
    calls = (emit(Global("collections", "OrderedDict")) + b"h\x00\x85R0") * 400
    assert "OrderedDict" in refused(archive(long + calls + b"."))
    pairs = b"](" + b"K\x00K\x00\x86" * 5_000 + b"eq\x00"
    assert "far more work" in refused(archive(pairs + calls + b"."))


def test_packed_codes_unpacked_again_and_again_are_refused() -> None:
    """Each time would take new memory."""
    grid = (Global("torch", "per_tensor_affine"), 0.5, 0)
    one = quantized(kind="QUInt4x2Storage", numel=100_000, size=(200_000,), stride=(1,), grid=grid)
    codes = bytes(range(250)) * 400
    found = checkpoint.load(archive([one], {"0": codes}))[0]
    assert found.int_repr()[:6].tolist() == [0, 0, 1, 0, 2, 0]
    assert "far more work" in refused(archive([one] * 20, {"0": codes}))


def test_a_quantized_tensor_where_a_name_should_be() -> None:
    """It may not be compared with anything."""
    q = emit(quantized())
    assert "something else than a storage" in refused(archive(b"\x80\x02(" + q + b"K\x01K\x01K\x01K\x01tQ.", SIX))
    assert "as a dict's or a set's key" in refused(archive(b"\x80\x02}(" + q + b"K\x01u.", SIX))
    packed = emit(Global("torch", "ScriptObject")) + b")\x81("
    cell = checkpoint.load(archive(packed + b"(" + q + b"))))t" + emit("x.CellParamsBase") + b"tb.", SIX))
    with pytest.raises(CheckpointError, match="no recurrent layer"):
        cell.cell()
    module = emit(Global("torch.nn.modules.linear", "Linear")) + b")\x81}(" + emit("_non_persistent_buffers_set") + q
    assert checkpoint.load(archive(module + b"ub.", SIX)).state_dict() == {}


def test_a_list_that_holds_itself_is_read() -> None:
    found = checkpoint.load(archive(b"]q\x00h\x00a."))
    assert found[0] is found


def test_records_of_the_archive() -> None:
    good = archive({"w": quantized()}, SIX)
    assert "storage 0 is missing" in refused(archive({"w": quantized()}))
    assert "byte order" in refused(archive({"w": quantized()}, SIX, byteorder=b"big"))
    assert "TorchScript" in refused(archive({}, **{"constants.pkl": b""}))
    assert "0 records called data.pkl" in refused(_zip({"a/b": b""}))
    assert "2 records called data.pkl" in refused(_zip({"a/data.pkl": b"N.", "b/data.pkl": b"N."}))
    assert "compressed" in refused(_zip({"a/data.pkl": b"N."}, zipfile.ZIP_DEFLATED))
    for end in range(4, len(good), 7):
        assert refused(good[:end])


def test_records_that_overlap_are_refused() -> None:
    """A thousand names for the same megabyte would need a gigabyte."""
    storages = {str(n): bytes(100_000 if n == 0 else 0) for n in range(40)}
    tensors = [
        Call(Global("torch._utils", "_rebuild_tensor_v2"), (_storage(n), 0, (100_000,), (1,), False, None))
        for n in range(40)
    ]
    data = bytearray(archive(tensors, storages))
    place = data.rindex(b"PK\x05\x06")
    (directory,) = struct.unpack_from("<I", data, place + 16)
    entry, first = directory, b""
    while data[entry : entry + 4] == b"PK\x01\x02":
        name_length, extra, comment = struct.unpack_from("<HHH", data, entry + 28)
        name = bytes(data[entry + 46 : entry + 46 + name_length])
        if name == b"archive/data/0":
            first = bytes(data[entry + 16 : entry + 28]) + bytes(data[entry + 42 : entry + 46])
        elif name.startswith(b"archive/data/"):
            data[entry + 16 : entry + 28] = first[:12]
            data[entry + 42 : entry + 46] = first[12:]
        entry += 46 + name_length + extra + comment
    assert "overlap" in refused(bytes(data))


def _storage(number: int) -> Any:
    from .craft import Storage

    return Storage("CharStorage", str(number), 100_000)


def _zip(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as target:
        for name, data in records.items():
            target.writestr(name, data)
    return file.getvalue()


def test_streams(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(5.0)}, file, _use_new_zipfile_serialization=False)
    good = file.getvalue()
    assert checkpoint.load(good)["a"].tolist() == [0, 1, 2, 3, 4]
    assert "another magic number" in refused(b"\x80\x02K\x01.")
    assert "protocol 7" in refused(good.replace(b"M\xe9\x03", b"M\x07\x00"))
    assert "byte order" in refused(good.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"))
    assert "should have 5 elements, it has 6" in refused(good.replace(struct.pack("<q", 5), struct.pack("<q", 6)))
    assert "no file of torch.save" in refused(b"GIF89a")
    assert "empty" in refused(b"")
    for end in range(1, len(good)):
        assert refused(good[:end])
    path = tmp_path / "old.pt"
    path.write_bytes(good)
    with pytest.raises(CheckpointError, match="older stream"):
        checkpoint.load(path, mmap=True)


def test_a_class_of_the_user_is_read_as_a_record_where_it_is_allowed() -> None:
    data = archive({"config": Call(Global("my.config", "Config"), (3, "x"))})
    assert "allow=['my.config.Config']" in refused(data)
    record = checkpoint.load(data, allow=["my.config.Config"])["config"]
    assert (record.name, record.args) == ("my.config.Config", (3, "x"))
    with pytest.raises(TypeError, match="a list of names"):
        checkpoint.load(data, allow="my.config.Config")
