const std = @import("std");

/// The bytes of a packet with a checksum behind them.
pub fn seal(allocator: std.mem.Allocator, payload: []const u8) ![]u8 {
    var checksum: u8 = 0;
    for (payload) |byte| checksum +%= byte;
    const sealed_packet = try allocator.alloc(u8, payload.len + 1);
    @memcpy(sealed_packet[0..payload.len], payload);
    sealed_packet[payload.len] = check▏sum;▕
    return sealed_packet;
}
