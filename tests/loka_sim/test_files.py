"""Files are written whole, under the name that was given, and never in the place of something that is no file."""

import os
import stat
import threading

import pytest

from loka_sim.errors import UserError
from loka_sim.files import write_bytes_atomic, write_text_atomic


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "a.json"
    write_text_atomic(path, "first, and longer")
    write_text_atomic(path, "second")
    assert path.read_text() == "second"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    """As a device does: root, whom nothing stops, would lose /dev/null to a file of that name."""
    pipe, payload, read = tmp_path / "pipe", os.urandom(300_000), []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_bytes_atomic(pipe, payload)
    reader.join(timeout=10)
    assert read == [payload]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    place, link = tmp_path / "there" / "table.json", tmp_path / "table.json"
    link.symlink_to(place)
    for text in ("first", "second"):  # the place is not there, then it is
        write_text_atomic(link, text)
        assert link.is_symlink()
        assert place.read_text() == text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_device_is_one_line_and_stays_a_device(monkeypatch):
    # Whatever goes wrong here must not cost the machine its device.
    monkeypatch.setattr(os, "replace", lambda *paths: pytest.fail(f"{paths[1]} would be replaced"))
    with pytest.raises(UserError, match="cannot write /dev/full: No space left on device; "):
        write_text_atomic("/dev/full", "text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
