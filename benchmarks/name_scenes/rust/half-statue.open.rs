/// The height of a plinth that carries a statue of this weight.
pub fn plinth_height_for(weight: f64, stone: &Stone) -> f64 {
    (weight / stone.strength).sqrt() + stone.margin
}

pub struct Stone {
    pub strength: f64,
    pub margin: f64,
}
