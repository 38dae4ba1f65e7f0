"""Float layers taken apart, so that every step inside can be observed and quantized, under torch.ao's names."""

from zeropoint.ao.nn.quantizable.attention import MultiheadAttention
from zeropoint.ao.nn.quantizable.rnn import LSTM, LSTMCell

__all__ = ["LSTM", "LSTMCell", "MultiheadAttention"]
