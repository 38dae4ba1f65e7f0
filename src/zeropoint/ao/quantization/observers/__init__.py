"""The observers, one file a kind. Users import them from ``zeropoint.ao.quantization``."""
