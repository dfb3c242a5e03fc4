"""Readings of a soil probe that are far from the others."""

import csv
import statistics


def read_moisture(path):
    with open(path, newline="") as file:
        return [float(row["moisture"]) for row in csv.DictReader(file)]


def far_readings(path, factor=3.0):
    """The readings that are further from the median than `factor` deviations."""
    readings = read_moisture(path)
    median = statistics.median(readings)
    deviations = [abs(reading - median) for reading in readings]
    typical_deviation = statistics.median(deviations)
    allowed = factor * typ▏ical_deviation▕
    return [reading for reading in readings if abs(reading - median) > allowed]
