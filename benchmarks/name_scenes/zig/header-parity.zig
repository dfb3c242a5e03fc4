const std = @import("std");

fn parityOf(bytes: []const u8, seed: u8) u8 {
    var parity = seed;
    for (bytes) |byte| {
        parity ^= byte;
    }
    return parity;
}

/// True if the last byte of a message is the parity of the others.
pub fn isIntact(message: []const u8, seed: u8) bool {
    const bytes = message[0 .. message.len - 1];
    const expected = parityOf(▏bytes, seed);▕
    return message[message.len - 1] == expected;
}
