"""Model optimization: quantization workflow, quantized modules, numeric comparison."""
