"""Float modules that simulate quantized weights while they train, under torch.ao's names."""
