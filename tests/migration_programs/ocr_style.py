"""In the style of OCR packages."""

import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn


def get_recognizer(device="cpu", quantize=True):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    if device == "cpu":
        model.eval()
        if quantize:
            try:
                torch.quantization.quantize_dynamic(model, dtype=torch.qint8, inplace=True)
            except ImportError:
                raise
    else:
        cudnn.benchmark = False
    return model


results = [get_recognizer()]
outputs = [results[0](torch.rand(3, 4, 4))]
