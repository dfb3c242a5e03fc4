const std = @import("std");

const Tank = struct {
    litres: f64,
    gribble_density: f64,
};

/// The number of gribbles in all tanks.
pub fn count(tanks: []const Tank) f64 {
    var total: f64 = 0;
    for (tanks) |tank| {
        total += tank.litres * tank.gri▏bble_density…▕
    }
    return total;
}
