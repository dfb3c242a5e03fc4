"""Line completion: engine, index, copies, gate, simulated typing and the thresholds fitted by it."""
