"""In the style of speech toolkits."""

import torch
from torch.nn import LSTM, Linear


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = LSTM(8, 6, batch_first=True, bidirectional=True)
        self.out = Linear(12, 4)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


class Recognizer:
    def __init__(self, quantize_modules=("LSTM", "Linear"), quantize_dtype="qint8"):
        self.model = Encoder().eval()
        modules = {getattr(torch.nn, name) for name in quantize_modules}
        dtype = getattr(torch, quantize_dtype)
        self.model = torch.quantization.quantize_dynamic(self.model, qconfig_spec=modules, dtype=dtype)


asr = Recognizer()
model = torch.quantization.quantize_dynamic(Encoder().eval(), {torch.nn.LSTM, torch.nn.Linear}, dtype=torch.qint8)
results = [asr.model, model]
outputs = [result(torch.rand(2, 5, 8)) for result in results]
