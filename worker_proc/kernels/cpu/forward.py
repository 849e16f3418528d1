"""A whole decoder step as one compiled function that every thread of the team runs.

    embed, norm                                    rows
    for each layer
        q, k, v = xn @ W                           panels
        q/k norm, rotary, K and V to pages         rows
        attend; join split contexts                items
        x += att @ W                               panels (to y where a norm follows)
        [x += norm(y)], norm                       rows
        silu(xn @ W_gate) * (xn @ W_up)            panels
        x += mlp @ W                               panels
        [x += norm(y)], norm of the next layer     rows
    norm of the rows whose logits are wanted       rows
    logits = xn @ W_head                           panels

A barrier follows each line. Calling numpy or torch for each line would cost 10 to 50 microseconds
each; here a line costs its barrier, below a microsecond when both cores are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import carray

from worker_proc.kernels.cpu.attention import make_attention
from worker_proc.kernels.cpu.attention_plan import plan_attention
from worker_proc.kernels.cpu.gemm import ADD, GELU, SILU, STORE, make_linear
from worker_proc.kernels.cpu.isa import Isa
from worker_proc.kernels.cpu.kernels import KernelSet, build, jit
from worker_proc.kernels.cpu.layout import NUM_SPLIT_TOKENS
from worker_proc.kernels.cpu.rowwise import make_norms, make_rope, make_row_phases
from worker_proc.kernels.cpu.scalar import CLOCK_MONOTONIC, CLOCK_THREAD_CPU, clock_ns, i32_pointer, i64_pointer
from worker_proc.kernels.cpu.team import begin_phase, make_waiting

PHASES = ("embed", "qkv", "rope", "attend", "join", "o_proj", "mlp_norm", "gate_up", "down", "next_norm",
          "final_norm", "lm_head")  # fmt: skip
"""Names of the profile's columns."""
EMBED, QKV, ROPE, ATTEND, JOIN, O_PROJ, MLP_NORM, GATE_UP, DOWN, NEXT_NORM, FINAL_NORM, LM_HEAD = range(len(PHASES))


def _make_tile_switch(kernels: KernelSet) -> Any:
    """Load a tile configuration, or do nothing where there are no tiles."""
    configure = kernels.configure_tiles
    if configure is None:

        @kernels.jit
        def nothing(address: int) -> None:
            return

        return nothing

    @kernels.jit
    def switch(address: int) -> None:
        configure(address)

    return switch


@jit
def start_clocks(profile: int, nt: int, tid: int) -> None:
    """The profile's clocks start with the step."""
    book = carray(i64_pointer(profile), (nt, len(PHASES) + 1, 3))
    book[tid, len(PHASES), 0], book[tid, len(PHASES), 1] = clock_ns(CLOCK_THREAD_CPU), clock_ns(CLOCK_MONOTONIC)


def _make_clock(kernels: KernelSet, end_phase: Any) -> Any:
    """``end_timed``: the barrier; it books the phase's nanoseconds when profiling.

    Profile: int64 [threads, phases + 1, 3]: processor time of the work, its wall time (more, when the
    core was lent to another process) and wall time of waiting; the last row keeps the clocks.
    """

    @kernels.jit
    def end_timed(sync: int, phase: int, nt: int, profile: int, tid: int, column: int) -> Any:
        if profile == 0:
            return end_phase(sync, phase, nt, tid)
        book = carray(i64_pointer(profile), (nt, len(PHASES) + 1, 3))
        wall, cpu = clock_ns(CLOCK_MONOTONIC), clock_ns(CLOCK_THREAD_CPU)
        book[tid, column, 0] += cpu - book[tid, len(PHASES), 0]
        book[tid, column, 1] += wall - book[tid, len(PHASES), 1]
        phase = end_phase(sync, phase, nt, tid)
        book[tid, len(PHASES), 0], book[tid, len(PHASES), 1] = clock_ns(CLOCK_THREAD_CPU), clock_ns(CLOCK_MONOTONIC)
        book[tid, column, 2] += book[tid, len(PHASES), 1] - wall
        return phase

    return end_timed


def _make_attention_half(parts: _Parts) -> Any:
    """Attention and what surrounds it in a layer."""
    kernels = parts.kernels
    linear, end_timed, switch, rope = parts.linear, parts.end_timed, parts.switch, parts.rope
    attend, join, residual, next_norm = parts.attend, parts.join, parts.residual, parts.next_norm

    @kernels.jit
    def attention_half(tid: int, nt: int, sync: int, phase: int, model: Any, layer: Any, step: Any, own: Any) -> Any:
        columns = (model.num_heads + 2 * model.num_kv_heads) * model.head_pad
        counters = begin_phase(sync, phase, tid, nt)
        linear(
            STORE, tid, nt, counters, step.xn, step.xn_stride, step.num_tokens, step.row_block, layer.qkv_w,
            layer.qkv_b, columns // 32, model.hidden_pad // 32, step.qkv, step.qkv_stride, own.sums, own.panel, 0,
        )  # fmt: skip
        phase = end_timed(sync, phase, nt, step.profile, tid, QKV)
        counters = begin_phase(sync, phase, tid, nt)
        rope(tid, nt, counters, model, layer, step, own)
        phase = end_timed(sync, phase, nt, step.profile, tid, ROPE)
        counters = begin_phase(sync, phase, tid, nt)
        switch(model.tiles_attention)
        attend(tid, nt, counters, model, layer, step, own)
        switch(model.tiles_gemm)
        phase = end_timed(sync, phase, nt, step.profile, tid, ATTEND)
        if carray(i32_pointer(step.counts), (2,))[NUM_SPLIT_TOKENS] > 0:
            counters = begin_phase(sync, phase, tid, nt)
            join(tid, nt, counters, model, layer, step, own)
            phase = end_timed(sync, phase, nt, step.profile, tid, JOIN)
        counters = begin_phase(sync, phase, tid, nt)
        residual(
            tid, nt, counters, step.att, step.q_stride, step.row_block, layer.o_w, layer.o_b,
            model.num_heads * model.head_pad, layer.attn_post_norm, model, step, own,
        )  # fmt: skip
        phase = end_timed(sync, phase, nt, step.profile, tid, O_PROJ)
        counters = begin_phase(sync, phase, tid, nt)
        next_norm(tid, nt, counters, layer.attn_post_norm, layer.mlp_norm, model, step)
        return end_timed(sync, phase, nt, step.profile, tid, MLP_NORM)

    return attention_half


def _make_mlp_half(parts: _Parts) -> Any:
    """The gated MLP and the norm before the next layer."""
    kernels = parts.kernels
    linear, end_timed, residual, next_norm = parts.linear, parts.end_timed, parts.residual, parts.next_norm

    @kernels.jit
    def mlp_half(
        tid: int, nt: int, sync: int, phase: int, norm: int, model: Any, layer: Any, step: Any, own: Any
    ) -> Any:
        counters = begin_phase(sync, phase, tid, nt)
        linear(
            GELU if model.gelu != 0 else SILU, tid, nt, counters, step.xn, step.xn_stride, step.num_tokens,
            step.row_block, layer.gate_up_w, layer.gate_up_b, model.inner_pad // 16, model.hidden_pad // 32,
            step.mlp, step.mlp_stride, own.sums, own.panel, 0,
        )  # fmt: skip
        phase = end_timed(sync, phase, nt, step.profile, tid, GATE_UP)
        counters = begin_phase(sync, phase, tid, nt)
        residual(
            tid, nt, counters, step.mlp, step.mlp_stride, step.inner_row_block, layer.down_w, layer.down_b,
            model.inner_pad, layer.mlp_post_norm, model, step, own,
        )  # fmt: skip
        phase = end_timed(sync, phase, nt, step.profile, tid, DOWN)
        if norm == 0 and layer.mlp_post_norm == 0:
            return phase
        counters = begin_phase(sync, phase, tid, nt)
        next_norm(tid, nt, counters, layer.mlp_post_norm, norm, model, step)
        return end_timed(sync, phase, nt, step.profile, tid, NEXT_NORM)

    return mlp_half


def _make_head(parts: _Parts) -> Any:
    """Logits of the wanted rows."""
    kernels = parts.kernels
    linear, end_timed, final_norm = parts.linear, parts.end_timed, parts.final_norm

    @kernels.jit
    def head(tid: int, nt: int, sync: int, phase: int, model: Any, step: Any, own: Any) -> Any:
        counters = begin_phase(sync, phase, tid, nt)
        final_norm(tid, nt, counters, model, step)
        phase = end_timed(sync, phase, nt, step.profile, tid, FINAL_NORM)
        counters = begin_phase(sync, phase, tid, nt)
        linear(
            STORE, tid, nt, counters, step.xn, step.xn_stride, step.num_logits, step.row_block, model.head_w,
            model.head_b, model.vocab_pad // 32, model.hidden_pad // 32, step.logits, step.logits_stride, own.sums,
            own.panel, model.vocab_pad * 4,
        )  # fmt: skip
        return end_timed(sync, phase, nt, step.profile, tid, LM_HEAD)

    return head


def _make_residual(kernels: KernelSet, linear: Any) -> Any:
    """A linear layer whose output joins the residual stream."""

    @kernels.jit
    def residual(
        tid: int, nt: int, counters: int, x: int, ldx: int, block: int, w: int, bias: int, inner: int, post: int,
        model: Any, step: Any, own: Any,
    ) -> None:  # fmt: skip
        """x += in @ W, or y = in @ W where a norm comes before the sum."""
        mode, out = (STORE, step.y) if post != 0 else (ADD, step.x)
        linear(
            mode, tid, nt, counters, x, ldx, step.num_tokens, block, w, bias, model.hidden_pad // 32, inner // 32,
            out, step.x_stride, own.sums, own.panel, 0,
        )  # fmt: skip

    return residual


@dataclass(frozen=True, slots=True)
class _Parts:
    """The phases' functions, each made (and so compiled) once."""

    kernels: KernelSet
    linear: Any
    residual: Any
    rope: Any
    attend: Any
    join: Any
    embed: Any
    next_norm: Any
    final_norm: Any
    end_timed: Any
    switch: Any


def _make_parts(kernels: KernelSet, end_phase: Any) -> _Parts:
    linear = make_linear(kernels)
    norm_row, normed_row = make_norms(kernels)
    attend, join = make_attention(kernels)
    embed, next_norm, final_norm = make_row_phases(kernels, norm_row, normed_row)
    return _Parts(
        kernels=kernels,
        linear=linear,
        residual=_make_residual(kernels, linear),
        rope=make_rope(kernels, normed_row),
        attend=attend,
        join=join,
        embed=embed,
        next_norm=next_norm,
        final_norm=final_norm,
        end_timed=_make_clock(kernels, end_phase),
        switch=_make_tile_switch(kernels),
    )


def make_forward(isa: Isa) -> Any:
    """``team_main`` for an instruction set, not compiled yet.

    ``team_main(tid, nt, sync, phase, models, layers, steps, owns, stay)`` runs one step and returns
    the next phase number (tid -1: only wakes the team, to stop it); with ``stay`` it is a thread of the
    team, runs every step the caller starts, and returns when the team is stopped.
    """
    kernels = build(isa)
    end_phase, wait_step, start_step = make_waiting(kernels)
    parts = _make_parts(kernels, end_phase)
    switch, embed, end_timed = parts.switch, parts.embed, parts.end_timed
    attention_half, mlp_half, head = _make_attention_half(parts), _make_mlp_half(parts), _make_head(parts)

    def team_main(
        tid: int, nt: int, sync: int, phase: int, models: Any, layers: Any, steps: Any, owns: Any, stay: bool
    ) -> Any:
        model, step, own = models[0], steps[0], owns[max(tid, 0)]
        number = 0
        while True:
            number += 1
            if stay:
                if not wait_step(sync, number):
                    return phase
            else:
                start_step(sync)
                if tid < 0:
                    return phase
            if step.profile != 0:
                start_clocks(step.profile, nt, tid)
            # After the last barrier the caller may already write the next step's record: read it before.
            num_logits = step.num_logits
            switch(model.tiles_gemm)
            counters = begin_phase(sync, phase, tid, nt)
            if tid == 0:
                plan_attention(model, step)
            embed(tid, nt, counters, layers[0].attn_norm, model, step)
            phase = end_timed(sync, phase, nt, step.profile, tid, EMBED)
            for index in range(model.num_layers):
                layer = layers[index]
                phase = attention_half(tid, nt, sync, phase, model, layer, step, own)
                norm = layers[index + 1].attn_norm if index + 1 < model.num_layers else 0
                phase = mlp_half(tid, nt, sync, phase, norm, model, layer, step, own)
            if num_logits > 0:
                phase = head(tid, nt, sync, phase, model, step, own)
            switch(0)
            if not stay:
                return phase

    team_main.__qualname__ += f".{isa.name}"
    return team_main
