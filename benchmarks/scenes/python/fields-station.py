class WeatherStation:
    """A station and its latest measurements."""

    def __init__(self, station_id, latitude, longitude, elevation, operator):
        self.station_id = station_id
        self.latitude = latitude
        self.longitude = longitude
        self.elev▏ation = elevation▕
        self.operator = operator
        self.measurements = []

    def add(self, measurement):
        self.measurements.append(measurement)
