"""Float layers taken apart, so that every step inside can be observed and quantized, under torch.ao's names."""

import zeropoint.ao.nn.quantized  # first: these are made of its modules, and its last ones of these  # noqa: F401
from zeropoint.ao.nn.quantizable.attention import MultiheadAttention
from zeropoint.ao.nn.quantizable.rnn import LSTM, LSTMCell

__all__ = ["LSTM", "LSTMCell", "MultiheadAttention"]
