"""Records made while the collector of cycles is paused start no collection afterwards, and cycles among them still go."""

import gc
import weakref

import pytest

from loka_sim.garbage import uncollected


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_many_records_start_no_collection():
    looked = []
    gc.callbacks.append(lambda phase, info: looked.append(info["generation"]))
    try:
        gc.collect()
        looked.clear()
        with uncollected():
            kept = [[number] for number in range(50_000)]
        [[] for _ in range(10)]
    finally:
        gc.callbacks.pop()
    assert looked == [] and gc.isenabled() and len(kept) == 50_000


def test_cycles_made_meanwhile_are_collected_later():
    class Node:
        pass

    with uncollected():
        node = Node()
        node.itself = node
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None


def test_a_failure_ends_the_pause():
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_is_off_and_frozen_objects_stay_so():
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with uncollected():
            pass
        # Objects go as they are no longer needed; none goes back to the collector.
        assert gc.get_freeze_count() > 0.9 * frozen and gc.isenabled()
    finally:
        gc.unfreeze()
