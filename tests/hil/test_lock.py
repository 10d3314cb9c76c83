import multiprocessing
import pickle
import time

import pytest

from hil.lock import GpuLock


def _append(lock, path, word):
    with lock, lock:
        for _ in range(3):
            with path.open("a") as stream:
                stream.write(f"{word}\n")
            time.sleep(0.05)


def test_processes_take_turns(tmp_path):
    context, path = multiprocessing.get_context("spawn"), tmp_path / "written"
    lock = GpuLock(tmp_path / "gpu.lock")
    with lock:
        some = [context.Process(target=_append, args=(lock, path, word)) for word in "ab"]
        for process in some:
            process.start()
        time.sleep(0.5)
        assert not path.exists()
    for process in some:
        process.join()
    assert path.read_text().split() in (list("aaabbb"), list("bbbaaa"))


def test_a_holder_that_dies_gives_it_back(tmp_path):
    lock = GpuLock(tmp_path / "gpu.lock")
    with pytest.raises(RuntimeError), lock:
        raise RuntimeError
    with pickle.loads(pickle.dumps(lock)), pytest.raises(FileNotFoundError), GpuLock(tmp_path / "nowhere" / "gpu.lock"):
        pass
