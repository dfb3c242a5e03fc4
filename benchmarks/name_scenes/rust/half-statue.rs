use crate::stone::{plinth_height_for, Stone};

pub struct Statue {
    pub weight: f64,
    pub height: f64,
}

impl Statue {
    /// The height of the statue on its plinth.
    pub fn total_height(&self, stone: &Stone) -> f64 {
        let below = plin▏th_height_for…▕
        self.height + below
    }
}
