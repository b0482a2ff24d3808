"""What an adapter makes of a base's tensors, and of its config: which change, which are new, and the arithmetic.

Pure: knows names, shapes and rows of numbers, no files. Rows come and go in float32, whatever they are stored in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.base import EMBEDDING_WEIGHT, HEAD_WEIGHT, full_name
from common.adapter_format.packed import EMBEDDING, HEAD, PackedAdapter, PackedAffine, PackedMatrix, PackedModule
from common.adapter_format.parts import dequantize, widen
from loraplex.errors import AdapterMismatch, UnsupportedAdapter
from loraplex.families import check_family

Rows = NDArray[np.float32]

_ATTENTION: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_BIAS_SWITCHES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "llama": {"attention_bias": _ATTENTION, "mlp_bias": _MLP},
    "qwen3": {"attention_bias": _ATTENTION},
}
"""By family: the config's fields that give linears biases, and which; those of other families cannot get any."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """How one tensor of the merged model comes about.

    `source` is the base's tensor that it is made from, None where it starts from zeros; `matrix` takes its place. Then
    `factors` are added, and `affine` applied: along the rows' elements of an embedding, else by row.
    """

    name: str
    shape: tuple[int, ...]
    source: str | None
    matrix: PackedMatrix | None = None
    factors: tuple[tuple[Rows, Rows], ...] = ()
    """(A [rank, in], B [out, rank]) with all scales folded in."""
    affine: PackedAffine | None = None
    by_token: bool = False
    """An embedding: row t of the tensor is what token t becomes."""

    def rows(self, base: Rows, start: int) -> Rows:
        """Return the merged rows from `start` on; `base` [n, ...] are the base's there, or zeros."""
        stop = start + len(base)
        out = base if self.matrix is None else widen(self.matrix.weight[start:stop], self.matrix.dtype)
        out = np.array(out, dtype=np.float32)
        for a, b in self.factors:
            out += (b @ a[:, start:stop]).T if self.by_token else b[start:stop] @ a
        if self.affine is None:
            return out
        if self.by_token:
            return out * self.affine.scale + self.affine.shift
        scale, shift = self.affine.scale[start:stop], self.affine.shift[start:stop]
        return scale * out + shift if out.ndim == 1 else scale[:, None] * out


@dataclass(frozen=True, slots=True)
class Changes:
    """All that an adapter makes of a base."""

    config: Mapping[str, Any]
    """The merged model's config.json."""
    tensors: Mapping[str, Change]
    """By name; tensors of the base that are not here stay as they are."""
    dropped: frozenset[str]
    """Tensors of the base that the merged model has in another form."""


def plan_changes(adapter: PackedAdapter, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Changes:
    """Plan the merge of an adapter into a base with this config.json and tensors of these shapes.

    Raises AdapterMismatch for a module that the base does not have so, and UnsupportedAdapter for one whose output gets
    a shift that no model of the base's family has a place for.
    """
    return _Planner(adapter, config, shapes).plan()


class _Planner:
    def __init__(
        self, adapter: PackedAdapter, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._adapter, self._shapes = adapter, shapes
        self._family = check_family(config)
        self._config = dict(config)
        self._modules = {module.name: module for module in adapter.modules}
        self._matrices = {matrix.name: matrix for matrix in adapter.matrices}
        self._changes: dict[str, Change] = {}
        self._dropped: set[str] = set()

    def plan(self) -> Changes:
        for name, module in sorted(self._modules.items()):
            if name not in (EMBEDDING, HEAD):
                self._linear(module)
        self._outside()
        return Changes(self._config, self._changes, frozenset(self._dropped))

    def _linear(self, module: PackedModule) -> None:
        name = full_name(module.name)
        weight, bias = f"{name}.weight", f"{name}.bias"
        shape = self._shapes.get(weight)
        if shape != (module.out_features, module.in_features):
            raise _mismatch(module, shape)
        self._changes[weight] = Change(weight, shape, weight, factors=_factors(module), affine=module.affine)
        if module.affine is None:
            return
        if bias in self._shapes:
            self._changes[bias] = Change(bias, (module.out_features,), bias, affine=module.affine)
        elif module.affine.shift.any():
            self._give_biases(module)
            self._changes[bias] = Change(bias, (module.out_features,), None, affine=module.affine)

    def _give_biases(self, module: PackedModule) -> None:
        """Switch biases on for all linears that the config has one switch for; those without a shift get zeros."""
        _, kind = module.name.split(".", 2)[1:]
        switches = _BIAS_SWITCHES.get(self._family, {})
        field = next((field for field, kinds in switches.items() if kind in kinds), None)
        if field is None:
            raise UnsupportedAdapter(
                f"{module.name} gets a bias (LoRA bias), and models of the family {self._family} have no place for "
                "one; such an adapter can be served, but not merged",
                field="lora_bias",
                module=module.name,
            )
        if self._config.get(field):
            return
        self._config[field] = True
        for weight, shape in self._shapes.items():
            linear = weight.removesuffix(".weight")
            if linear != weight and any(linear.endswith(f".{one}") for one in switches[field]):
                bias = f"{linear}.bias"
                self._changes.setdefault(bias, Change(bias, shape[:1], None))

    def _outside(self) -> None:
        """Embedding and head. Where they are one matrix and one of them changes, they become two."""
        changed = {name for name in (EMBEDDING, HEAD) if name in self._modules or name in self._matrices}
        if not changed:
            return
        tied = bool(self._config.get("tie_word_embeddings", False))
        if tied:
            self._config["tie_word_embeddings"] = False
            if HEAD_WEIGHT in self._shapes:  # some checkpoints store the tied matrix twice
                self._dropped.add(HEAD_WEIGHT)
        for name, weight in ((EMBEDDING, EMBEDDING_WEIGHT), (HEAD, HEAD_WEIGHT)):
            source = EMBEDDING_WEIGHT if tied else weight
            if name in changed or (tied and name == HEAD):
                self._changes[weight] = self._outer(name, weight, source)

    def _outer(self, name: str, weight: str, source: str) -> Change:
        module, matrix, shape = self._modules.get(name), self._matrices.get(name), self._shapes.get(source)
        if shape is None or (matrix is not None and matrix.weight.shape != shape):
            raise AdapterMismatch(
                f"the adapter's {name} is {list(matrix.weight.shape) if matrix else 'a LoRA'}, the base has "
                f"{list(shape) if shape else 'no such tensor'}",
                tensor=name,
            )
        if module is None:
            return Change(weight, shape, source, matrix)
        by_token = name == EMBEDDING
        wanted = (module.in_features, module.out_features) if by_token else (module.out_features, module.in_features)
        if shape != wanted:
            raise _mismatch(module, shape)
        if not by_token and module.affine is not None and module.affine.shift.any():
            raise UnsupportedAdapter(
                f"{name} gets a bias (LoRA bias), and output heads have no place for one; such an adapter can be "
                "served, but not merged",
                field="lora_bias",
                module=name,
            )
        return Change(weight, shape, source, matrix, _factors(module), module.affine, by_token=by_token)


def row_blocks(num_rows: int, width: int, block_values: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of blocks of rows with about so many values each."""
    step = max(1, block_values // max(1, width))
    for start in range(0, num_rows, step):
        yield start, min(num_rows, start + step)


def _factors(module: PackedModule) -> tuple[tuple[Rows, Rows], ...]:
    return tuple(dequantize(part) for part in module.parts)


def _mismatch(module: PackedModule, shape: tuple[int, ...] | None) -> AdapterMismatch:
    return AdapterMismatch(
        f"{module.name} maps {module.in_features} to {module.out_features} features; the base's weight is "
        f"{list(shape) if shape else 'not there'}",
        tensor=module.name,
    )
