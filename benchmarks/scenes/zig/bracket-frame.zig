const std = @import("std");

const frame_length = 512;

fn frameCount(byte_count: usize, length: usize) usize {
    return (byte_count + length - 1) / length;
}

/// The bytes that all frames of a message take.
pub fn paddedLength(message: []const u8) usize {
    return frame_length * frameCount(message.len, fr▏ame_length▕);
}
