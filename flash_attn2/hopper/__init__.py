"""FlashAttention for sm_90 in Gluon: loads, tensor cores and exponentials overlap (FlashAttention-3, Shah et al. 2024).

Gluon's names change with triton, so nothing here is imported but by `dispatch.py`, under a version listed in KNOWN.
"""
import triton

VERSION = ".".join(triton.__version__.split(".")[:2])
KNOWN = ("3.6", "3.7")      # those the tests compile with; a newer one is an entry here and its names in gluon_api.py
