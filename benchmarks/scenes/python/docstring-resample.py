import numpy as np


def smooth(signal, width, passes):
    """Replace each value by the mean of its neighbours.

    Args:
        signal: Values, one-dimensional.
        width: Number of neighbours on each side.
        passes: How often this is done.
    """
    kernel = np.ones(2 * width + 1) / (2 * width + 1)
    for _ in range(passes):
        signal = np.convolve(signal, kernel, mode="same")
    return signal


def resample(signal, old_rate, new_rate):
    """Interpolate a signal at another rate.

    Args:
        signal: ▏Values, one-dimensional.▕
        old_rate: Values a second in the signal.
        new_rate: Values a second in the result.
    """
    seconds = len(signal) / old_rate
    times = np.arange(0, seconds, 1 / new_rate)
    return np.interp(times, np.arange(len(signal)) / old_rate, signal)
