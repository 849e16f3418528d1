"""What a start found out about a model, kept for the next one.

A first start imports torch and transformers (seconds of it), builds the model's modules, reads from them
what the CPU's fast path needs to know, and compares logits with transformers' own. The next start of the
same files needs the outcome alone: sizes, rotary frequencies, norms and biases, the name that each large
weight has in the checkpoint, and the logits to compare with. That is a record: one safetensors file of the
small arrays, with the rest as JSON in its header. Its name is a digest of everything the outcome depends on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import worker_proc.generic.selfcheck
from worker_proc.kernels.cpu import arch
from worker_proc.kernels.cpu.arch import Bf16, Decoder, Layer, Linear, Shape
from worker_proc.kernels.cpu.compile_cache import KEEP_S, cache_root, private_folder
from worker_proc.recorded.checkpoint import Checkpoint, weight_files

F32 = NDArray[np.float32]
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "q_norm", "k_norm")
FILE_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")


class NotRecorded(Exception):
    """No record can be made of this start, or there is none that can be used; the message says why."""


class LayerNotes(msgspec.Struct, frozen=True):
    """A layer without its arrays."""

    names: dict[str, str]
    """The checkpoint's name of each linear layer's weight."""
    window: int
    rope: str


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """A record without its arrays."""

    shape: Shape
    layers: list[LayerNotes]
    embedding: str
    head: str
    rope_scales: dict[str, float]
    position_limit: int
    """Positions the model's config allows."""
    num_embeddings: int
    """What the check's prompts are drawn from."""


class StartRecord(msgspec.Struct, frozen=True):
    """A record that was read."""

    notes: Notes
    arrays: dict[str, F32]
    path: Path

    @property
    def reference(self) -> list[F32]:
        """Transformers' logits of the start-up check, one array for each prompt."""
        return [self.arrays[name] for name in sorted(self.arrays) if name.startswith("reference.")]

    def decoder(self, checkpoint: Checkpoint) -> Decoder:
        """The model, its large weights from the checkpoint. Raises KeyError or ValueError where they do not fit."""
        notes, arrays = self.notes, self.arrays
        embedding = checkpoint.bf16(notes.embedding)
        tied = notes.head == notes.embedding
        head = Linear(embedding if tied else checkpoint.bf16(notes.head), arrays.get("head.bias"))
        layers = [self._layer(index, layer, checkpoint) for index, layer in enumerate(notes.layers)]
        ropes = {kind: (arrays[f"rope.{kind}"], scale) for kind, scale in notes.rope_scales.items()}
        return Decoder(notes.shape, embedding, head, arrays["final_norm"], tuple(layers), ropes)

    def _layer(self, index: int, layer: LayerNotes, checkpoint: Checkpoint) -> Layer:
        find = self.arrays.get
        linears = {part: Linear(checkpoint.bf16(layer.names[part]), find(f"{index}.{part}.bias")) for part in LINEARS}
        norms = {name: find(f"{index}.{name}") for name in NORMS}
        return Layer(**linears, **norms, window=layer.window, rope=layer.rope)  # type: ignore[arg-type]


def folder() -> Path:
    """Where records are, beside compiled code, mode 0700. Raises :class:`NotRecorded` where it must not be used."""
    found = private_folder(cache_root() / "starts")
    if isinstance(found, str):
        raise NotRecorded(found)
    return found


def record_path(model_dir: Path, context_length: int) -> Path:
    """Where the record of a model is, whether there is one or not. Raises :class:`NotRecorded`, OSError.

    The name depends on the model's config and weight files (name, size and time of change: their contents are
    compared by the start-up check), on the versions of what computes the logits, on --context-length, and on
    the code that reads models.
    """
    files = weight_files(model_dir)
    if not files:
        raise NotRecorded("the weights are not safetensors files")
    digest = hashlib.sha256()
    for path in files:
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    for source in (Path(__file__), Path(arch.__file__), Path(arch.__file__).with_name("read_model.py"),
                   Path(worker_proc.generic.selfcheck.__file__), model_dir / "config.json"):  # fmt: skip
        digest.update(source.read_bytes() + b"\0")
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    digest.update(f"{versions} {context_length}".encode())
    return folder() / f"{digest.hexdigest()[:32]}.safetensors"


def save(
    path: Path,
    decoder: Decoder,
    names: Mapping[int, str],
    checkpoint: Checkpoint,
    reference: list[F32],
    position_limit: int,
    num_embeddings: int,
) -> None:
    """Write the record of a start. ``names``: the name of a parameter by the address of its memory.

    Raises :class:`NotRecorded` where a weight is not in the checkpoint as the model has it, OSError.
    """

    def name_of(weight: Bf16) -> str:
        name = names.get(weight.ctypes.data, "")
        try:
            same = np.array_equal(checkpoint.bf16(name), weight)
        except (KeyError, ValueError) as error:
            raise NotRecorded(f"a weight {list(weight.shape)} is not in the checkpoint: {name!r}") from error
        if not same:
            raise NotRecorded(f"{name} is not in the checkpoint as the model has it")
        return name

    layers = [
        LayerNotes({part: name_of(getattr(layer, part).weight) for part in LINEARS}, layer.window, layer.rope)
        for layer in decoder.layers
    ]
    notes = Notes(
        shape=decoder.shape, layers=layers, embedding=name_of(decoder.embedding), head=name_of(decoder.head.weight),
        rope_scales={kind: scale for kind, (_, scale) in decoder.ropes.items()},
        position_limit=position_limit, num_embeddings=num_embeddings,
    )  # fmt: skip
    arrays = dict(_arrays(decoder))
    arrays |= {f"reference.{number}": np.ascontiguousarray(logits) for number, logits in enumerate(reference)}
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    try:
        save_file(arrays, temporary, {"notes": msgspec.json.encode(notes).decode()})
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    remove_unused(path.parent, time.time())


def _arrays(decoder: Decoder) -> Iterator[tuple[str, F32]]:
    """Everything small."""
    yield "final_norm", decoder.final_norm
    if decoder.head.bias is not None:
        yield "head.bias", decoder.head.bias
    for kind, (frequencies, _) in decoder.ropes.items():
        yield f"rope.{kind}", np.ascontiguousarray(frequencies)
    for index, layer in enumerate(decoder.layers):
        for part in LINEARS:
            if (bias := getattr(layer, part).bias) is not None:
                yield f"{index}.{part}.bias", bias
        for name in NORMS:
            if (norm := getattr(layer, name)) is not None:
                yield f"{index}.{name}", norm


def read(path: Path) -> StartRecord | None:
    """A record; None: there is none. Raises :class:`NotRecorded` for one that cannot be read."""
    try:
        with safe_open(path, "np") as file:
            notes = msgspec.json.decode(file.metadata()["notes"], type=Notes)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        os.utime(path)  # in use: remove_unused() leaves it
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise NotRecorded(f"{path}: {error}") from error
    return StartRecord(notes, arrays, path)


def remove_unused(root: Path, now: float) -> None:
    """Remove records that no start has used for as long as compiled code is kept."""
    for path in root.iterdir():
        try:
            if FILE_NAME.fullmatch(path.name) and now - path.stat().st_mtime > KEEP_S:
                path.unlink()
        except OSError:  # another process was faster
            continue
