"""A model in the form the compiled forward reads: packed weights, tables and their records."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_proc.kernels.cpu import coding
from worker_proc.kernels.cpu.arch import Bf16, Decoder, Layer, Linear
from worker_proc.kernels.cpu.isa import Isa
from worker_proc.kernels.cpu.layout import LAYER, MODEL, pad32
from worker_proc.kernels.cpu.packing import (
    Arena,
    interleave_gate_up,
    pack_coded,
    pack_on,
    pad_halves,
    pad_head_columns,
    pad_heads,
    padded,
)
from worker_proc.kernels.cpu.tiles import tile_config


def _positions_table(frequencies: NDArray[np.float32], scaling: float, count: int) -> NDArray[np.float32]:
    """[count, 2, half] cosines and sines, in float32 as transformers computes them; half padded to 16."""
    angles = np.outer(np.arange(count, dtype=np.float32), frequencies)
    table = np.zeros((count, 2, -(-len(frequencies) // 16) * 16), np.float32)
    for place, function in enumerate((np.cos, np.sin)):
        table[:, place, : len(frequencies)] = function(angles) * np.float32(scaling)
    return table


def _vector(values: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    out = np.zeros(size, np.float32)
    out[: values.size] = values
    return out


def _bias(layer: Linear) -> NDArray[np.float32]:
    """The bias of a layer whose neighbours in one product have theirs."""
    return np.zeros(layer.weight.shape[0], np.float32) if layer.bias is None else layer.bias


def is_tied(decoder: Decoder) -> bool:
    """The head's weight is the embedding."""
    head, embedding = decoder.head.weight, decoder.embedding
    return head.shape == embedding.shape and head.ctypes.data == embedding.ctypes.data


class ModelImage:
    """Weights of a :class:`Decoder` packed into one arena, and the records that point to them.

    Nothing of the decoder is needed afterwards. A tied embedding is not stored: its rows are read
    from the packed head.
    """

    def __init__(self, decoder: Decoder, page_size: int, isa: Isa, num_threads: int = 1) -> None:
        self.shape = shape = decoder.shape
        self.head_pad = pad32(shape.head_dim)
        self.hidden_pad, self.inner_pad = pad32(shape.hidden), pad32(shape.inner)
        self.vocab_pad = pad32(shape.vocab)
        self.page_bytes = 2 * shape.num_kv_heads * page_size * self.head_pad * 2
        """Bytes of a page in one layer: K and V."""
        self.page_stride = self.page_bytes * shape.num_layers
        self._isa = isa
        self._encode = coding.make_encoder() if isa.codes_weights else None
        self.panel_bytes = 0
        """Of the largest panel, decoded, and one step more; 0 where weights are not coded."""
        self._keep: list[Any] = []
        self._arena = Arena(self._arena_bytes(is_tied(decoder)), "packed weights")
        self.models = np.zeros(1, MODEL)
        self.layers = np.zeros(shape.num_layers, LAYER)
        ropes = {}
        for kind, (freq, scale) in decoder.ropes.items():
            ropes[kind] = self._hold(_positions_table(freq, scale, shape.max_positions))
        self._num_threads = num_threads
        with ThreadPoolExecutor(num_threads, "pack") as self._pool:
            for record, layer in zip(self.layers, decoder.layers, strict=True):
                self._fill_layer(record, layer)
                record["rope"] = ropes[layer.rope]
            self._fill_model(decoder, page_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights and of an embedding of its own."""
        return self._arena.used

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step reads: all but an embedding of its own, of which it reads rows."""
        own_embedding = int(self.models[0]["embedding"]) != 0
        return self._arena.used - own_embedding * 2 * self.shape.hidden * self.shape.vocab

    def _arena_bytes(self, tied: bool) -> int:
        d = self.shape
        q_rows, kv_rows = d.num_heads * self.head_pad, d.num_kv_heads * self.head_pad
        layer = self.hidden_pad * (2 * q_rows + 2 * kv_rows + 3 * self.inner_pad)
        table = 0 if tied else d.hidden * d.vocab
        return 2 * (layer * d.num_layers + self.hidden_pad * self.vocab_pad + table) + 4096 * (d.num_layers + 1)

    def _hold(self, values: NDArray[Any]) -> int:
        """Keep a small array alive; its address."""
        self._keep.append(values)
        return int(values.ctypes.data)

    def _weights(self, weight: Bf16, rows: int, columns: int) -> int:
        """Pack a matrix; its address, or where weights are coded that of the list of its panels."""
        if self._encode is not None:
            self.panel_bytes = max(self.panel_bytes, coding.PLAIN_STEP_BYTES * (columns // 32 + 1))
            whole = padded(weight, rows, columns)
            return self._hold(pack_coded(self._pool, self._num_threads, whole, self._arena, self._encode))
        place = self._arena.take(2 * rows * columns)
        pack_on(
            self._pool, self._num_threads, padded(weight, rows, columns), place, blocks_apart=self._isa.blocks_apart
        )
        return int(place.ctypes.data)

    def _bias(self, bias: NDArray[np.float32] | None, size: int) -> int:
        return 0 if bias is None else self._hold(_vector(bias, size))

    def _norm(self, weight: NDArray[np.float32] | None, size: int) -> int:
        return 0 if weight is None else self._hold(_vector(weight, size))

    def _fill_layer(self, record: Any, layer: Layer) -> None:
        d = self.shape
        heads = [(layer.q, d.num_heads), (layer.k, d.num_kv_heads), (layer.v, d.num_kv_heads)]
        columns = (d.num_heads + 2 * d.num_kv_heads) * self.head_pad
        pads = (pad_halves, pad_halves, pad_heads)
        qkv = np.concatenate([pad(m.weight, n, d.head_dim) for (m, n), pad in zip(heads, pads, strict=True)])
        record["qkv_w"] = self._weights(qkv, columns, self.hidden_pad)
        if layer.q.bias is not None:
            biases = [pad(_bias(m), n, d.head_dim) for (m, n), pad in zip(heads, pads, strict=True)]
            record["qkv_b"] = self._bias(np.concatenate(biases), columns)
        # Attention's output has padded heads, so its weight has zero columns there.
        o = pad_head_columns(layer.o.weight, d.num_heads, d.head_dim)
        record["o_w"] = self._weights(o, self.hidden_pad, d.num_heads * self.head_pad)
        record["o_b"] = self._bias(layer.o.bias, self.hidden_pad)
        gate, up = (padded(m.weight, self.inner_pad, self.hidden_pad) for m in (layer.gate, layer.up))
        record["gate_up_w"] = self._weights(interleave_gate_up(gate, up), 2 * self.inner_pad, self.hidden_pad)
        if layer.gate.bias is not None:
            pair = [_vector(_bias(m), self.inner_pad) for m in (layer.gate, layer.up)]
            record["gate_up_b"] = self._hold(interleave_gate_up(*pair))
        record["down_w"] = self._weights(layer.down.weight, self.hidden_pad, self.inner_pad)
        record["down_b"] = self._bias(layer.down.bias, self.hidden_pad)
        for name in ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm"):
            record[name] = self._norm(getattr(layer, name), self.hidden_pad)
        for name in ("q_norm", "k_norm"):
            weight = getattr(layer, name)
            halves = None if weight is None else pad_halves(weight, 1, d.head_dim)
            record[name] = self._norm(halves, self.head_pad)
        record["window"] = layer.window

    def _embedding(self, embedding: Bf16) -> int:
        """A copy in the arena: the model's own may be a file in memory, to be read again at any time."""
        place = self._arena.take(2 * embedding.size)
        place[:] = np.ascontiguousarray(embedding).view(np.uint8).reshape(-1)
        return int(place.ctypes.data)

    def _fill_model(self, decoder: Decoder, page_size: int) -> None:
        d, m = self.shape, self.models[0]
        for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "vocab", "embed_scale", "norm_eps"):
            m[name] = getattr(d, name)
        for name in ("hidden_pad", "head_pad", "inner_pad", "vocab_pad", "page_bytes", "page_stride"):
            m[name] = getattr(self, name)
        m["activation_bytes"] = self._isa.activation_bytes
        m["num_layers"], m["page_size"], m["gelu"] = d.num_layers, page_size, int(d.gelu)
        m["post_norms"] = int(d.post_norms)
        m["head_eps"], m["score_scale"] = d.norm_eps, d.score_scale / math.log(2)
        m["embedding"] = 0 if is_tied(decoder) else self._embedding(decoder.embedding)
        m["final_norm"] = self._norm(decoder.final_norm, self.hidden_pad)
        m["head_w"] = self._weights(decoder.head.weight, self.vocab_pad, self.hidden_pad)
        m["head_b"] = self._bias(decoder.head.bias, self.vocab_pad)
        if self._isa.dot == "amx":
            for name, attention in (("tiles_gemm", False), ("tiles_attention", True)):
                m[name] = self._hold(np.frombuffer(tile_config(attention), np.uint8))
