"""What quantizing adapters costs: CPU time, bytes and the error of each module's weight, per format.

Run: python -m bench.quantization [FOLDER ...] [--ranks 1 8 16]
Measures PEFT folders, by default the shipped ones and random ones of these ranks, all modules of SmolLM2-135M.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.make_adapters import write_adapter
from common.adapter_format.base import BaseLinears
from common.adapter_format.packed import PackedAdapter, module_tensors, pack
from common.adapter_format.parts import FORMATS
from common.adapter_format.quantize import quantize
from common.adapter_format.tensor_file import open_tensors
from common.adapter_format.validate import validate
from loraplex.peft_folder import CONFIG_FILE, WEIGHTS_FILE

EXAMPLES: Final = Path(__file__).parent.parent / "examples" / "adapters"
# (out, in) of the linears of SmolLM2-135M's layers, whose shapes the random adapter has.
_SMOLLM2: Final = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}
_SMOLLM2_LAYERS: Final = 30


@dataclass(frozen=True, slots=True)
class Figures:
    """One adapter in one format. Errors are ‖ΔW - ΔŴ‖ / ‖ΔW‖ of a module's weight."""

    adapter: str
    format: str
    cpu_s: float
    file_bytes: int
    tensor_bytes: int
    mean_error: float
    worst_error: float
    worst_module: str


def read_folder(folder: Path) -> PackedAdapter:
    """Read a PEFT folder for a base that has exactly the linears that the adapter's tensors fit."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, tensor in open_tensors(folder / WEIGHTS_FILE).tensors.items():
        module = name.removeprefix("base_model.model.").removeprefix("model.").split(".lora_")[0]
        out, inner = shapes.get(module, (0, 0))
        shapes[module] = (out, tensor.shape[1]) if ".lora_A." in name else (tensor.shape[0], inner)
    return validate((folder / CONFIG_FILE).read_bytes(), folder / WEIGHTS_FILE, BaseLinears("0" * 64, shapes))


def measure(folder: Path, form: str) -> Figures:
    """Quantize and pack one adapter."""
    adapter = read_folder(folder)
    start = time.process_time()
    quantized = quantize(adapter, form)
    cpu_s = time.process_time() - start
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "packed"
        pack(quantized.adapter, file)
        file_bytes = file.stat().st_size
    worst = max(range(len(quantized.errors)), key=quantized.errors.__getitem__)
    return Figures(
        folder.name,
        form,
        round(cpu_s, 3),
        file_bytes,
        sum(array.nbytes for module in quantized.adapter.modules for _, _, array in module_tensors(module)),
        sum(quantized.errors) / len(quantized.errors),
        quantized.errors[worst],
        adapter.modules[worst].name,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="*", help="PEFT folders")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 16], help="of the random adapters")
    args = parser.parse_args(arguments)
    folders: list[Path] = args.folders
    with tempfile.TemporaryDirectory() as scratch:
        if not folders:
            shapes = {f"model.layers.{n}.{name}": s for n in range(_SMOLLM2_LAYERS) for name, s in _SMOLLM2.items()}
            random = [
                write_adapter(Path(scratch) / f"random-r{rank}", shapes, rank=rank, dtype="bfloat16", seed=0)
                for rank in args.ranks
            ]
            folders = [*sorted(EXAMPLES.iterdir()), *random]
        figures = [measure(folder, form) for folder in folders for form in FORMATS]
    plain = {one.adapter: one for one in figures if one.format == "none"}
    print("adapter            format   cpu s    file bytes  of none  tensors of none  mean error  worst  module")
    for one in figures:
        whole = plain[one.adapter]
        print(
            f"{one.adapter:<18} {one.format:<7} {one.cpu_s:>7.2f} {one.file_bytes:>12} "
            f"{one.file_bytes / whole.file_bytes:>8.3f} {one.tensor_bytes / whole.tensor_bytes:>16.3f} "
            f"{one.mean_error:>10.2%} {one.worst_error:>6.2%}  {one.worst_module}"
        )
    print(json.dumps({"bench": "quantization", "adapters": [asdict(one) for one in figures]}))


if __name__ == "__main__":
    main()
