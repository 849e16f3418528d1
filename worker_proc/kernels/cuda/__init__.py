"""GPU kernels in Triton. Importing this package does not import Triton; importing its modules does.

Where to begin reading

    common.py             what the kernels share: products, score shaping, fp8 rounding, block sizes
    kv_write.py           new keys and values into their pages
    decode_attention.py   one query per sequence: split over the context, joined in a second stage
    extend_attention.py   several queries per sequence (prefill chunks)
    norm.py, rope.py, activation.py   what lies between the matrix products
    sample_adjust.py      penalties, grammar masks, biases and bans on the logits
    sample_draw.py        greedy choice, top-k, top-p, min-p and the draw, without sorting
    logprobs.py           log-probabilities and the likeliest ids

Each kernel has a plain torch counterpart (``attention/reference.py``, ``sampling/torch_sampler.py``,
transformers' own modules) that it is compared with, on the CPU under Triton's interpreter
(``TRITON_INTERPRET=1``, which Triton reads when it is first imported) or on a GPU.

A row of attention does not depend on its neighbours: context is cut by absolute position, and the pieces
are joined in that order.
"""
