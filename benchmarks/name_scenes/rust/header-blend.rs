#[derive(Clone, Copy)]
pub struct Color {
    pub red: f32,
    pub green: f32,
    pub blue: f32,
}

fn blend_colors(first: Color, second: Color, share: f32) -> Color {
    Color {
        red: first.red * share + second.red * (1.0 - share),
        green: first.green * share + second.green * (1.0 - share),
        blue: first.blue * share + second.blue * (1.0 - share),
    }
}

/// The color in the middle between two others.
pub fn middle(first: Color, second: Color) -> Color {
    blend_colors(▏first, second,…▕
}
