"""A wheel's first breath, in an environment with only torch and numpy: native kernels load and a model converts."""

import torch
from torch import nn

import zeropoint as zp
from zeropoint.ao.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig, prepare, quantize_dynamic


def main() -> None:
    assert zp.backends.is_native(), zp.backends.describe()
    torch.manual_seed(0)
    model = nn.Sequential(
        QuantStub(), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10), DeQuantStub()
    )
    model.eval().qconfig = get_default_qconfig()
    x = torch.randn(4, 3, 8, 8)
    prepared = prepare(model)
    prepared(x)
    quantized = convert(prepared)
    error = (quantized(x) - model(x)).square().mean() / model(x).square().mean()
    assert error < 1e-3, f"relative squared error {error}"
    dynamic = quantize_dynamic(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).eval())
    assert dynamic(torch.randn(2, 64)).shape == (2, 4)
    print(f"zeropoint {zp.__version__} works: {zp.backends.describe()}")


main()
