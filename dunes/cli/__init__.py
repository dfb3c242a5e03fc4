"""dunes <verb>: parses, calls, prints. No logic of its own."""
