"""The cluster that a training job runs on: a preset's name or a file, checked, as `perfmodel.topology` takes it."""

from __future__ import annotations

from pathlib import Path

from loka_sim.errors import UserError, expected_of_lower_floors
from loka_sim.specfile import read
from perfmodel.topology import MOST_GPUS, PRESETS, Cluster, from_dict, usual


def cluster_of(named: str | Path | Cluster | None, hardware: str) -> Cluster | None:
    """The cluster asked for.

    Args:
        named: A preset, a `.json` or `.yaml` file of `perfmodel.topology.Cluster`'s fields, or None for the hosts that the
            hardware usually stands in.
        hardware: Name of the hardware.

    Returns:
        The cluster; None where none was asked for and none is usual: then one host is all that can be asked about.

    Raises:
        UserError: no such preset or file, or a field is wrong; one line with the field and the mend.
    """
    if named is None:
        return usual(hardware)
    if isinstance(named, Cluster):
        return named
    if str(named) in PRESETS:
        return PRESETS[str(named)]
    path = Path(named)
    if not path.is_file() and not path.suffix:
        raise UserError(f"--cluster {named} is neither a file nor one of {', '.join(PRESETS)}; give one of them")
    document = read(path, "cluster")
    with expected_of_lower_floors():
        return from_dict(document, str(path))


def check_gpus(gpus: int, cluster: Cluster | None) -> None:
    """Refuse a number of GPUs that the cluster's hosts do not hold.

    Raises:
        UserError: the number and the mend.
    """
    if gpus > MOST_GPUS:
        raise UserError(f"--gpus {gpus} is more than can be asked about; give at most {MOST_GPUS:,}")
    if cluster is not None and gpus > cluster.gpus_per_host and gpus % cluster.gpus_per_host:
        less, more = (cluster.gpus_per_host * (gpus // cluster.gpus_per_host + i) for i in (0, 1))
        raise UserError(
            f"--gpus {gpus}: hosts of {cluster.name} have {cluster.gpus_per_host} GPUs; give whole hosts, {less:,} or {more:,}"
        )
