"""The step that tells how fast a host is: bound by the host, and the same again."""

import pytest
import torch

from hil import host
from hil.compiled import kernel_launches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_the_reference_step_is_its_hosts():
    """Its kernels take a fraction of what launching them takes, and so they must be many, some for every layer."""
    launches = kernel_launches(host.reference(compiled=False), 3)
    assert len(launches) / 3 > 5 * host.LAYERS
    taken = host.step_us()
    assert sum(us for _, us in launches) / 3 < 0.5 * taken
    assert host.step_us() == pytest.approx(taken, rel=0.5)
