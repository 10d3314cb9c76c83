"""Number formats, scaling, tensor-core accumulation, and the error they bring to one GEMM."""
