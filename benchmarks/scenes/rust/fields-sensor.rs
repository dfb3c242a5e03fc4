pub struct Sensor {
    name: String,
    interval: u32,
    calibration: f32,
    enabled: bool,
}

impl Sensor {
    pub fn silent(name: String, interval: u32, calibration: f32) -> Self {
        Self {
            name,
            interval,
            calibration,
            enabled: false,
        }
    }

    pub fn new(name: String, interval: u32, calibration: f32) -> Self {
        Self {
            name,
            interval,
            cal▏ibration,▕
            enabled: true,
        }
    }
}
