const std = @import("std");

/// Returns the index of the first byte that is equal to `needle`, or null if there is none.
pub fn findFirst(haystack: []const u8, needle: u8) ?usize {
    for (haystack, 0..) |byte, index| {
        if (byte == needle) return index;
    }
    return null;
}

/// Returns the index of the last byte that is ▏equal to `needle`, or null if there is none.▕
pub fn findLast(haystack: []const u8, needle: u8) ?usize {
    var index = haystack.len;
    while (index > 0) {
        index -= 1;
        if (haystack[index] == needle) return index;
    }
    return null;
}
