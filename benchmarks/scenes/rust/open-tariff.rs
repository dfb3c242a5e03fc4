use crate::tariff::{Tariff, night_price};

pub struct Reading {
    pub hour: u32,
    pub kilowatt_hours: f64,
}

/// What the readings of a day cost.
pub fn day_price(readings: &[Reading], tariff: &Tariff) -> f64 {
    let mut total = 0.0;
    for reading in readings {
        total += if reading.hour < 6 {
            night_price(▏tariff, reading.kilowatt_hours)▕
        } else {
            tariff.day * reading.kilowatt_hours
        };
    }
    total
}
