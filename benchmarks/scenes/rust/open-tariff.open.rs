pub struct Tariff {
    pub day: f64,
    pub night: f64,
    pub discount: f64,
}

/// The price of so much at night.
pub fn night_price(tariff: &Tariff, kilowatt_hours: f64) -> f64 {
    tariff.night * kilowatt_hours * (1.0 - tariff.discount)
}

/// The price of a reading that was taken at night.
pub fn reading_price(tariff: &Tariff, reading: &Reading) -> f64 {
    night_price(tariff, reading.kilowatt_hours)
}
