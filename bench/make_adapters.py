"""Random LoRA adapters of any rank for a base model folder, as PEFT writes them: load for benchmarks.

Run: python -m bench.make_adapters --base DIR --out DIR [--count 8] [--rank 16] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors.numpy import save_file

from common.adapter_format.base import KINDS
from loraplex.manifest import MAX_HEADER_BYTES, weight_files
from loraplex.safetensors_header import read_header

MODULES: Final = tuple(KINDS)
_DTYPES: Final[dict[str, DTypeLike]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def linear_shapes(base: Path, modules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every weight of the given kinds of modules, by its name without `.weight`."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in weight_files(base):
        for name, entry in read_header(file, max_header_bytes=MAX_HEADER_BYTES).tensors.items():
            module = name.removesuffix(".weight")
            if ".layers." in name and module != name and module.rsplit(".", 1)[-1] in modules:
                rows, columns = entry.shape
                shapes[module] = (rows, columns)
    if not shapes:
        raise SystemExit(f"{base} has none of the modules {', '.join(modules)}")
    return dict(sorted(shapes.items()))


def write_adapter(out: Path, shapes: dict[str, tuple[int, int]], *, rank: int, dtype: str, seed: int) -> Path:
    """Write one adapter folder with normal factors whose effect is about a tenth of a typical weight's."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.generic]] = {}
    for module, (rows, columns) in shapes.items():
        a = rng.standard_normal((rank, columns), np.float32) / np.sqrt(columns)
        b = rng.standard_normal((rows, rank), np.float32) * (0.1 / np.sqrt(rank))
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(_DTYPES[dtype])
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype(_DTYPES[dtype])
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in shapes}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def main() -> None:
    """Write `--count` adapters a0, a1, … below `--out` and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", type=Path, required=True, help="base model folder the shapes are read from")
    parser.add_argument("--out", type=Path, required=True, help="folder the adapters' folders go into")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--seed", type=int, default=0, help="adapter i is made from seed + i")
    args = parser.parse_args()
    shapes = linear_shapes(args.base, args.modules)
    for index in range(args.count):
        path = write_adapter(args.out / f"a{index}", shapes, rank=args.rank, dtype=args.dtype, seed=args.seed + index)
        print(path)


if __name__ == "__main__":
    main()
