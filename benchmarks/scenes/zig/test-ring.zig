const std = @import("std");
const RingBuffer = @import("ring_buffer.zig").RingBuffer;

test "a new buffer is empty" {
    var buffer = try RingBuffer.init(std.testing.allocator, 4);
    defer buffer.deinit();
    try std.testing.expectEqual(@as(usize, 0), buffer.count());
}

test "a write is counted" {
    var buffer = try RingBuffer.init(std.testing.allocator, 4);
    defer buffer.deinit();
    buffer.write(7);
    try std.testing.exp▏ectEqual(@as(usize,…▕
}
