const std = @import("std");

pub fn shout(allocator: std.mem.Allocator, text: []const u8) ![]u8 {
    var scratch = std.heap.ArenaAllocator.init(allocator);
    defer scratch.deinit();
    return std.ascii.allocUpperString(scratch.allocator(), text);
}

pub fn repeat(allocator: std.mem.Allocator, text: []const u8, times: usize) ![]u8 {
    var repeated = std.ArrayList(u8).init(allocator);
    defer ▏repeated.deinit();▕
    for (0..times) |_| {
        try repeated.appendSlice(text);
    }
    return repeated.toOwnedSlice();
}
