"""The CPU fast path: a whole decoder step as one compiled function over vector or AMX tiles.

Where to begin reading, from the outside in

    fast_runner.py     the runner the worker calls; page copies; host_side.py: checks, likeliest ids;
                       pool.py: the memory of K and V
    arch.py            which families are covered; read_model.py: a transformers model by that table
    model_image.py     weights packed, tables, records that the compiled code reads (packing.py, layout.py);
                       coding.py: 12 bits for a weight, without loss
    workspace.py       buffers of a step
    thread_team.py     the threads; team.py: claims, barrier, sleeping
    forward.py         the phases of a step in order
    gemm.py            linear layers; rowwise.py: norms, rotary embedding, K and V to pages
    attention.py       paged attention; attention_plan.py: its work items; attention_pages.py: where K and V lie
    kernels.py         the micro-kernels of one instruction set (isa.py): tiles.py, coded_tiles.py,
                       epilogue.py, rows.py, written in vector_ir.py's and scalar.py's vocabulary
    step_function.py   the step made ready while the rest of a start goes on; compile_beside.py: by another process
    lean_compile.py    inner functions are optimised once, in the step; compile_cache.py: machine code on disk

Bitwise invariance
    A row's logits are the same to the last bit alone or in any batch, in any chunks, on cold or cached
    pages, whichever pages, on any number of threads. Three rules make it so: threads split output columns,
    heads, rows and context segments, never one sum; a tile computes each of its rows in the same order
    whatever its height; the context is cut by absolute position and joined in that order. It holds
    between processes on one machine (a restarted worker), not between machines with different
    instruction sets, whose products round differently.
"""
