"""Dispatch: which kernel each GEMM of a model runs, decided on predicted time and predicted error."""
