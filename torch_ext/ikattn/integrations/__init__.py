"""What connects this package with others: imported on demand, never required."""
