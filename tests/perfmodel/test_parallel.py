"""Jobs of several processes come back in order, each process has one thread, and what fails is said."""

import os

import pytest

from perfmodel import parallel


def threads_and_size(name: str, rows: range) -> tuple[str, int, int, str | None]:
    return name, len(rows), os.getpid(), os.environ.get("OMP_NUM_THREADS")


def fails(name: str, rows: range) -> None:
    raise ValueError(f"{name} has {len(rows)} rows")


JOBS = [("small", range(10)), ("large", range(30_000)), ("middle", range(500))]


def test_many_rows_are_shared_among_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = list(parallel.each(threads_and_size, JOBS))
    assert [(name, size) for name, size, *_ in found] == [(name, len(rows)) for name, rows in JOBS]
    assert os.getpid() not in {process for *_, process, _ in found} and {threads for *_, threads in found} == {"1"}
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(("cores", "jobs"), [(1, JOBS), (2, JOBS[:1]), (2, [JOBS[0], JOBS[2]])])
def test_few_rows_one_core_and_one_job_stay_here(monkeypatch, cores, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    assert {process for *_, process, _ in parallel.each(threads_and_size, jobs)} == {os.getpid()}


def test_what_a_job_raises_comes_back(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    with pytest.raises(ValueError, match="small has 10 rows"):
        list(parallel.each(fails, JOBS))
