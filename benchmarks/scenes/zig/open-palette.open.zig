pub const Color = struct { red: u8, green: u8, blue: u8 };

/// A colour that is darker by so many steps.
pub fn darkenBy(base: Color, step: u8) Color {
    return .{ .red = base.red -| step, .green = base.green -| step, .blue = base.blue -| step };
}

test "black stays black" {
    const black = Color{ .red = 0, .green = 0, .blue = 0 };
    _ = darkenBy(black, 3);
}

/// The red of a colour after so many steps.
pub fn redAfter(base: Color, step: u8) u8 {
    const shade = darkenBy(base, step);
    return shade.red;
}
