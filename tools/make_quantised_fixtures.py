"""Pack small linears with the public quantizer packages, and keep what those packages themselves read back from them.

    python tools/make_quantised_fixtures.py gptqmodel | compressed-tensors

Writes tests/runtime/quantised_fixtures/<package>.npz. Neither package is needed by a test: install the one you name into an
environment that has torch (with --no-deps; their own requirements may want another torch). The committed files were made with
gptqmodel 7.7.0 and compressed-tensors 0.20.1 over torch 2.13.0 on a CPU.

In a file, "<case>/settings" is JSON; "<case>/plain" the package's dequantised weight [out, in] in float32; the others are the
tensors of a checkpoint. float8_e4m3fn is stored as its bytes, in names that end with "#fp8".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "runtime" / "quantised_fixtures"
OUT, IN, GROUP = 32, 64, 32


def weight(seed: int) -> torch.Tensor:
    """[OUT, IN], uneven in its columns."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(OUT, IN, generator=random) * (torch.rand(IN, generator=random) + 0.1)


def gptq_cases() -> dict[str, dict[str, Any]]:
    """Bits, symmetry, order and both conventions of zeros, packed and dequantised by gptqmodel's own plain-torch linear."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig, Quantizer
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    found = {}
    for bits in (2, 3, 4, 8):
        for sym, order, layout in ((True, False, "gptq"), (True, True, "gptq_v2"), (False, False, "gptq_v2"), (False, True, "gptq_v2")):
            w = weight(bits)
            groups = torch.arange(IN) // GROUP
            if order:
                groups = groups[torch.randperm(IN, generator=torch.Generator().manual_seed(3))]
            config = QuantizeConfig(bits=bits, group_size=GROUP, sym=sym, desc_act=order)
            scales, zeros = torch.empty(OUT, IN // GROUP), torch.empty(OUT, IN // GROUP)
            for group in range(IN // GROUP):
                quantizer = Quantizer(config)
                quantizer.configure(perchannel=True, bits=bits, sym=sym)
                quantizer.find_params(w[:, groups == group].half().float(), weight=True)
                scales[:, group], zeros[:, group] = quantizer.scale.flatten().half().float(), quantizer.zero.flatten()
            plain = torch.nn.Linear(IN, OUT, bias=False)
            plain.weight.data = w
            packed = TorchLinear(bits, GROUP, sym, order, IN, OUT, enable_wf_unsqueeze=True)
            packed.pack_original(plain, scales, zeros, groups.to(torch.int32))
            packed.qzero_format(format=2)
            packed.scales = packed.scales.float()  # read back in full: the package would round to half
            dequantised = packed.dequantize_weight().t().float()
            if layout == "gptq":
                convert_gptq_v2_to_v1_format_module(packed, config)
            settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": sym, "desc_act": order, "checkpoint_format": layout}
            tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "g_idx")} | {"scales": packed.scales.half()}
            found[f"{bits}-{'sym' if sym else 'asym'}{'-order' if order else ''}"] = {"settings": settings, "plain": dequantised, **tensors}
    return found


def compressed_cases() -> dict[str, dict[str, Any]]:
    """Each layout that is read, packed and unpacked by the package's own compressors."""
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor, IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization.quant_args import QuantizationArgs
    from compressed_tensors.quantization.quant_scheme import QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    group = {"strategy": "group", "group_size": GROUP}
    rows = {
        "w4a16": ("pack-quantized", PackedQuantizationCompressor, {"num_bits": 4, **group}),
        "w4a16-asym": ("pack-quantized", PackedQuantizationCompressor, {"num_bits": 4, "symmetric": False, **group}),
        "w8a16": ("pack-quantized", PackedQuantizationCompressor, {"num_bits": 8, **group}),
        "w8a16-channel": ("pack-quantized", PackedQuantizationCompressor, {"num_bits": 8, "strategy": "channel"}),
        "int8-channel": ("int-quantized", IntQuantizationCompressor, {"num_bits": 8, "strategy": "channel"}),
        "int8-tensor": ("int-quantized", IntQuantizationCompressor, {"num_bits": 8, "strategy": "tensor"}),
        "fp8-channel": ("float-quantized", FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "fp8-tensor": ("float-quantized", FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        "fp8-block": ("float-quantized", FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
    }
    found = {}
    for at, (name, (layout, compressor, args)) in enumerate(rows.items()):
        w, given = weight(at + 20), QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=given)
        high, width = {"group": (1, GROUP), "channel": (1, IN), "tensor": (OUT, IN), "block": (16, 32)}[args["strategy"]]
        blocks = w.reshape(OUT // high, high, IN // width, width)
        scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), given)
        shape = (1,) if args["strategy"] == "tensor" else scale.shape
        state = {"weight": w, "weight_scale": scale.reshape(shape), "weight_zero_point": zero.reshape(shape)}
        stored = compressor.compress(state, scheme)
        plain = compressor.decompress(dict(stored), scheme)["weight"].float()
        settings = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(given.model_dump_json())}}}
        found[name] = {"settings": settings, "plain": plain, **stored}
    return found


def main() -> None:
    made = {"gptqmodel": gptq_cases, "compressed-tensors": compressed_cases}[sys.argv[1]]()
    flat: dict[str, np.ndarray] = {}
    for case, parts in made.items():
        for name, value in parts.items():
            if name == "settings":
                flat[f"{case}/settings"] = np.array(json.dumps(value))
            elif value.dtype == torch.float8_e4m3fn:
                flat[f"{case}/{name}#fp8"] = value.contiguous().view(torch.uint8).numpy()
            else:
                flat[f"{case}/{name}"] = value.contiguous().numpy()
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / f"{sys.argv[1]}.npz", **flat)
    print(f"{len(made)} cases")


if __name__ == "__main__":
    main()
