"""Two models side by side, and one model's maps while it trains."""
