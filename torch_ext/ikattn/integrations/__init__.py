"""Connections with other libraries: imported on demand, never required."""
