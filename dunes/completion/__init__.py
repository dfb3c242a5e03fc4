"""The rest of a line: engine, index, copies, gate, simulated typing and the thresholds fitted by it."""
