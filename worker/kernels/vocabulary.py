"""What an adapter changes of the base's embedding and head: everything of the vocabulary's size, outside the arena.

Such parts are too large for chunks and read by few operators: the token embedding and the output head. Only steps that
hold a row of such an adapter look at them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from worker.kernels.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class OutputAffine:
    """What an output becomes after its LoRA: y <- scale · y + shift, both [outputs] float32."""

    scale: Tensor
    shift: Tensor

    def apply(self, y: Tensor) -> Tensor:
        """Return the affine of y [T, outputs], in y's dtype.

        A product and a sum, each rounded on its own: a row's bits do not depend on how many there are.
        """
        return (y.float() * self.scale).add_(self.shift).to(y.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingChange:
    """An adapter's own embedding: `matrix` instead of the base's, then `up` of the token's row of `down` is added."""

    matrix: Tensor | None = None
    """[vocabulary, hidden], any float dtype."""
    down: Tensor | None = None
    """[vocabulary, rank]."""
    up: Linear | None = None
    """[hidden, rank], as the backend packed it; all scales are in it. There is one where `down` is."""
    affine: OutputAffine | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadChange:
    """An adapter's own head: `matrix` instead of the base's, then `up(down(x))` is added; all as the backend packs."""

    matrix: Linear | None = None
    """[vocabulary, hidden]."""
    down: Linear | None = None
    """[rank, hidden]."""
    up: Linear | None = None
    """[vocabulary, rank], with all scales in it. There is one where `down` is."""
    affine: OutputAffine | None = None


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyChange:
    """What one adapter changes; with tied weights, too, one leaves the other as it is."""

    embedding: EmbeddingChange | None
    head: HeadChange | None
    num_bytes: int
    """Memory that it takes."""
