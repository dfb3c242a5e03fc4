const std = @import("std");
const palette = @import("palette.zig");

/// Draws a line of blocks, each darker than the last.
pub fn drawShades(writer: anytype, base: palette.Color, count: u8) !void {
    var step: u8 = 0;
    while (step < count) : (step += 1) {
        const shade = palette.darkenBy(▏base, step);▕
        try writer.print("{d} {d} {d}\n", .{ shade.red, shade.green, shade.blue });
    }
}
