"""Files are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeropoint.files import replacing, write_bytes, write_text


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "ours.txt", "ä")
    assert (tmp_path / "ours.txt").read_bytes() == "ä".encode()
    assert (tmp_path / "ours.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_that_is_replaced_keeps_its_permissions_and_links_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_bytes(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException], exists: bool) -> None:
    target = tmp_path / "target.pt"
    if exists:
        target.write_text("old")

    def half() -> None:
        with replacing(target) as temporary:
            assert temporary.suffix == ".pt"
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        half()
    assert [file.read_text() for file in tmp_path.iterdir()] == (["old"] if exists else [])


def test_what_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no regular file"):
        write_text("/dev/null", "x")
    assert not Path("/dev/null").is_file()
    with pytest.raises(OSError, match="no regular file"):
        write_text(tmp_path, "x")
    with pytest.raises(FileNotFoundError, match="no folder"):
        write_text(tmp_path / "missing" / "file", "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="file"):
        write_text(tmp_path / "file", "x")
