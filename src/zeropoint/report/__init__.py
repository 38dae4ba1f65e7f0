"""Reports that people look at: what a quantized model is, what it costs, and where.

zeropoint.report.write(model, reference, data, "report.html")
"""

from zeropoint.report._collect import LayerReport, Report, collect
from zeropoint.report._write import write

__all__ = ["LayerReport", "Report", "collect", "write"]
