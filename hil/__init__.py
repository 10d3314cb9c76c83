"""Hardware in the loop: the real kernels, timed and checked. Imports without a GPU; does its work with one."""
