#[derive(Clone, Copy)]
pub struct Point {
    pub x: f64,
    pub y: f64,
}

fn distance(from: Point, to: Point) -> f64 {
    ((from.x - to.x).powi(2) + (from.y - to.y).powi(2)).sqrt()
}

/// The circumference of a triangle.
pub fn circumference(a: Point, b: Point, c: Point) -> f64 {
    let first = distance(a, b);
    let second = distance(b, c);
    let third = distance(▏c, a);▕
    first + second + third
}
