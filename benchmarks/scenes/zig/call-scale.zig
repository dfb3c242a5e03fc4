const Vector = struct {
    x: f32,
    y: f32,
};

fn scaled(vector: Vector, factor: f32) Vector {
    return .{ .x = vector.x * factor, .y = vector.y * factor };
}

/// The point between two others at a fraction of the way.
pub fn between(first: Vector, second: Vector, fraction: f32) Vector {
    const near = scaled(first, 1 - fraction);
    const far = scaled(▏second, fraction);▕
    return .{ .x = near.x + far.x, .y = near.y + far.y };
}
