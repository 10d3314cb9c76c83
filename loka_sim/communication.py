"""What a step exchanges between GPUs: pooled embeddings and dense gradients, each GPU with its own batch.

Embedding tables are spread over the GPUs, whole tables each, the dense part is replicated. Per step: an
all-to-all of pooled embeddings forward and one of their gradients backward, and all-reduces of the dense
gradients in DistributedDataParallel's default buckets, all in bf16. Their sum is what would be exposed if nothing overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loka_sim.dispatch.steps import Step
from loka_sim.modelspec import ModelSpec

BF16_BYTES = 2
BUCKET_BYTES = 25 * 2**20
"""Default `bucket_cap_mb` of `torch.nn.parallel.DistributedDataParallel`."""


@dataclass(frozen=True)
class Communication:
    """Collectives of one training step on one of `gpus` GPUs; times are None where nothing was measured.

    Attributes:
        gpus: Ranks.
        all_to_all_bytes: What one rank exchanges in one direction.
        all_reduce_bytes: Dense gradients.
        all_to_all_us: Forward and backward together.
        all_reduce_us: All-reduces of all dense gradients, bucket after bucket.
        missing: Why there is no figure, in words; None where there is one.
    """

    gpus: int
    all_to_all_bytes: int
    all_reduce_bytes: int
    all_to_all_us: float | None = None
    all_reduce_us: float | None = None
    missing: str | None = None

    @property
    def exposed_us(self) -> float | None:
        """All collectives, nothing overlapped; None where one of them is unknown."""
        if self.all_to_all_us is None or self.all_reduce_us is None:
            return None
        return self.all_to_all_us + self.all_reduce_us

    @property
    def text(self) -> str:
        """What it is, in words."""
        if self.exposed_us is None:
            return f"No figure for communication between {self.gpus} GPUs: {self.missing}."
        return (
            f"Communication between {self.gpus} GPUs in bf16, not overlapped: all-to-all of embeddings "
            f"{self.all_to_all_us:,.0f} us ({self.all_to_all_bytes / 2**20:,.1f} MiB a rank each way), "
            f"all-reduce of dense gradients {self.all_reduce_us:,.0f} us ({self.all_reduce_bytes / 2**20:,.1f} MiB)."
        )

    def to_dict(self, steps: Sequence[Step]) -> dict[str, Any]:
        """The document's part; `steps` holds bf16 first and the decision last."""
        exposed = self.exposed_us
        bf16, decided = steps[0].total.us, steps[-1].total.us
        return {
            "gpus": self.gpus,
            "all_to_all_bytes": self.all_to_all_bytes,
            "all_reduce_bytes": self.all_reduce_bytes,
            "all_to_all_us": self.all_to_all_us,
            "all_reduce_us": self.all_reduce_us,
            "exposed_us": exposed,
            "step_us": None if exposed is None else decided + exposed,
            "speedup": None if exposed is None else (bf16 + exposed) / (decided + exposed),
            "text": self.text,
        }


def embedding_bytes(spec: ModelSpec) -> int:
    """Bytes of pooled embeddings that one rank's batch needs: one vector a table, or one a look-up without pooling."""
    vectors = ((table.lookups if table.pooling == "none" else 1.0) * table.dim for table in spec.tables)
    return round(sum(vectors) * spec.batch) * BF16_BYTES


def communication(spec: ModelSpec, gpus: int, hardware: str) -> Communication | None:
    """Collectives of one step at the model's batch per GPU; None for one GPU.

    A number of ranks or a size that was not measured gives no figure, and says so.
    """
    if gpus == 1:
        return None
    embeddings, gradients = embedding_bytes(spec), spec.dense_parameters * BF16_BYTES
    import pandas

    from perfmodel import collectives

    full, rest = divmod(gradients, BUCKET_BYTES)
    asked = [("all_to_all", embeddings, 1), ("all_reduce", BUCKET_BYTES, full), ("all_reduce", rest, 1)]
    frame = pandas.DataFrame([entry for entry in asked if entry[1] and entry[2]], columns=["op", "bytes_per_rank", "count"])
    try:
        model = collectives.load(hardware)
        frame["us"] = model.predict(frame.assign(ranks=gpus))["time_us"] * frame["count"]
        all_to_all, all_reduce = (float(frame.loc[frame["op"] == op, "us"].sum()) for op in ("all_to_all", "all_reduce"))
    except (ValueError, FileNotFoundError) as error:
        return Communication(gpus, embeddings, gradients, missing=str(error).rstrip("."))
    # The gradients of the embeddings travel back the way that the embeddings came.
    return Communication(gpus, embeddings, gradients, 2 * all_to_all, all_reduce)
